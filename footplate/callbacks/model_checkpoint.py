"""Save checkpoints: when, under which name, and which to keep.

A checkpoint is written in the background (see `footplate.checkpoint`). An older one is deleted only once the new one is
complete, and the newest complete one is never deleted before there is another, so that a run can always be resumed. What
a save makes superfluous is written down in it: if the process is killed before it is deleted, the resumed run deletes it.

Several savers may share a directory. Each deletes only what it has saved, and takes no name that another has taken.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from footplate import checkpoint
from footplate.callbacks.base import Callback
from footplate.callbacks.monitored_metric import better, check_mode, monitored
from footplate.checkpoint.storage import Place, is_remote, to_place
from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


log = logging.getLogger(__name__)


class ModelCheckpoint(Callback):
    """Save the run state after validation (or training epochs, or so many steps, or so much time).

    Args:
        dirpath: where: a directory, or a URI of an object store (`s3://bucket/run/checkpoints`, `gs://…`); `checkpoints/`
            of the run's directory by default, or of the bucket that a job's directory is in.
        filename: a template such as `"{epoch}-{val_loss:.2f}"`; `"{epoch}-{step}"` by default.
        monitor: keep the best by this metric; without it, the latest.
        verbose: say each save.
        save_last: keep `last.ckpt`, which stands for the newest checkpoint, whether it is among the best or not.
            "link" is accepted for Lightning's sake: it always is a link.
        save_top_k: how many to keep, of the best or the latest; -1 keeps all, 0 saves none but the last.
        save_weights_only: leave out all that resuming needs.
        mode: "min" or "max": which way `monitor` is better.
        auto_insert_metric_name: write `epoch=3` rather than `3` for `{epoch}`.
        every_n_train_steps: save after every so many optimizer steps.
        train_time_interval: save after every so much time.
        every_n_epochs: save only in every so many-th epoch.
        save_on_train_epoch_end: save at the end of training epochs rather than of validation. By default so when
            validation runs once an epoch or not at all: the metrics of the training epoch are known then.
        enable_version_counter: don't overwrite a file of an earlier run: add `-v1`, `-v2`, …
        save_on_exception: save when an exception ends training, also without `save_last`; only where the run can be
            continued from, which a half-finished optimizer step can't.

    A `monitor` that has not been logged yet is waited for until validation has run.
    """

    order = 2
    sees_weights = False

    def __init__(
        self,
        dirpath: str | Place | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = True,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        save_on_exception: bool = False,
    ) -> None:
        if save_top_k < -1:
            raise ConfigError(f"ModelCheckpoint(save_top_k={save_top_k}): expected -1 (all), 0 (none) or more.")
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None and value < 0:
                raise ConfigError(f"ModelCheckpoint({name}={value}): expected 0 (never) or more.")
        if sum((bool(every_n_train_steps), train_time_interval is not None, bool(every_n_epochs))) > 1:
            raise ConfigError(
                "ModelCheckpoint: give one of every_n_train_steps, train_time_interval and every_n_epochs; "
                "for several rhythms, use several ModelCheckpoints."
            )
        self.dirpath: Place | None = None if dirpath is None else to_place(dirpath)
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = bool(save_last)
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = check_mode(mode, "ModelCheckpoint")
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        self.every_n_epochs = every_n_epochs if every_n_epochs is not None else int(not self._by_step)
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.save_on_exception = save_on_exception

        self._forget()

    def _forget(self) -> None:
        self._kept_scores: dict[str, float] = {}
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self._latest = ""
        self._last_link: Place | None = None
        self.current_score: float | None = None
        self._unkept: set[str] = set()  # what the latest save made superfluous
        self._there: set[str] = set()  # what lay in the directory when training began
        self._left_over: set[str] = set()  # of these, what a killed process may not have deleted
        self._due_after_validation = False  # a save by step that waits for its metric
        self._saved_at = 0
        self._saved_batches = -1
        self._saved_when = 0.0

    @property
    def best_k_models(self) -> dict[str, float]:
        """The score of each checkpoint that is kept as one of the best, or of the latest, by its path."""
        return self._kept_scores

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint."""
        return self._latest

    @property
    def _directory(self) -> Place:
        assert self.dirpath is not None
        return to_place(self.dirpath)

    @property
    def _by_step(self) -> bool:
        return bool(self.every_n_train_steps) or self.train_time_interval is not None

    @property
    def state_key(self) -> str:
        rhythm = f"{self.every_n_train_steps},{self.every_n_epochs},{self.train_time_interval}"
        return f"ModelCheckpoint[{self.monitor},{self.mode},{rhythm}]"

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": str(self.dirpath),
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "best_k_models": dict(self._kept_scores),
            "last_model_path": self._latest,
            "last_link": None if self._last_link is None else str(self._last_link),
            "current_score": self.current_score,
            "unkept": sorted(self._unkept),
            "saved_at": self._saved_at,
            "saved_batches": self._saved_batches,
            "due_after_validation": self._due_after_validation,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.dirpath is None or not _same(to_place(state_dict["dirpath"]), to_place(self.dirpath)):
            return  # another directory: begin a new collection
        scores = state_dict["best_k_models"]
        self._kept_scores = {path: score for path, score in scores.items() if checkpoint.is_complete(path)}
        self.best_model_path = state_dict["best_model_path"]
        self.best_model_score = state_dict["best_model_score"]
        if self._kept_scores and self.best_model_path not in self._kept_scores:  # somebody has deleted it
            ranks = {path: _rank(score, self.mode) for path, score in self._kept_scores.items()}
            self.best_model_path = min(
                reversed(ranks), key=ranks.__getitem__
            )  # without a metric all rank alike: the latest
            self.best_model_score = self._kept_scores[self.best_model_path]
        self._latest = state_dict["last_model_path"]
        self._last_link = to_place(state_dict["last_link"]) if state_dict.get("last_link") else None
        self.current_score = state_dict["current_score"]
        self._left_over = set(state_dict.get("unkept", ()))
        self._saved_at = state_dict["saved_at"]
        self._saved_batches = state_dict["saved_batches"]
        self._due_after_validation = state_dict.get("due_after_validation", False)

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        dirpath = trainer.checkpoint_dir if self.dirpath is None else self._directory
        self.dirpath = dirpath = trainer.group.from_first(trainer.for_all(dirpath))
        if stage != "fit":
            return
        self._forget()
        if trainer.fast_dev_run or trainer.world.rank != 0:
            return  # rank 0 names what all save; and what it sweeps away here would go while another lists it
        checkpoint.prepare(dirpath)
        if is_remote(dirpath) and any(map(_wants_checkpoints, trainer.recorders)):
            log.warning("Loggers are not given the checkpoints: these lie in %s, not on a disk.", dirpath)
        self._there = set(map(str, checkpoint.find(dirpath)))  # once: a save must not wait for an answer

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._saved_when = trainer.clock()
        best = self._kept_scores, self.best_model_path, self.best_model_score
        self._kept_scores, self.best_model_path, self.best_model_score = trainer.group.from_first(best)
        if self.save_on_train_epoch_end is None:
            self.save_on_train_epoch_end = trainer.validates_once_per_epoch or not trainer.has_validation

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._by_step or trainer.global_step == self._saved_at:
            return
        if self.train_time_interval is not None:
            due = trainer.clock() - self._saved_when >= self.train_time_interval.total_seconds()
        else:
            due = trainer.global_step % self.every_n_train_steps == 0
        if due and self.monitor is not None and trainer.validation_ends_epoch(batch_idx):
            self._due_after_validation = True  # the metric is about to be measured
        elif due:
            self._save(trainer)

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if not trainer.training_in_progress:
            return
        if self._due_after_validation:
            self._due_after_validation = False
            self._save(trainer)
        elif not self._by_step and not self.save_on_train_epoch_end:
            self._save_in_epoch(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if not self._by_step and self.save_on_train_epoch_end:
            self._save_in_epoch(trainer)

    def _save_in_epoch(self, trainer: TrainerView) -> None:
        due = self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if due and trainer.global_step != self._saved_at:
            self._save(trainer)

    def _save(self, trainer: TrainerView) -> None:
        """Save if it is among the best, or as the last; forget and delete what is no longer kept."""
        if trainer.fast_dev_run or trainer.sanity_checking:
            return
        values = self._values(trainer)
        score, kept = None, True
        if self.monitor is not None:
            score = monitored(trainer, self.monitor, "ModelCheckpoint", not self._may_wait(trainer), values)
            kept = score is not None
            self._due_after_validation = self._by_step and not kept
        if score is not None and score != score:
            score = float("inf" if self.mode == "min" else "-inf")  # NaN is worse than any number
        self.current_score = score
        kept = kept and self._is_kept(score)
        if kept or self.save_last:
            self._write(trainer, self._path(trainer, values, score, kept), score, kept)

    def _values(self, trainer: TrainerView) -> dict[str, float]:
        """What can be monitored and written into names: the metrics, and the epoch and step unless these were logged."""
        metrics = trainer.latest_metrics()
        counters = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        logged = {name: int(metrics[name]) for name in counters if math.isfinite(metrics.get(name, math.nan))}
        return {**metrics, **counters, **logged}

    def _may_wait(self, trainer: TrainerView) -> bool:
        """Whether a metric may be missing: validation has not run yet, or the first epoch is not over."""
        before_validation = trainer.has_validation and trainer.progress.validated_at < 0
        return before_validation or (self._by_step and trainer.current_epoch == 0)

    def save_now(self, trainer: TrainerView) -> Place | None:
        """Save the run as it stands, as the last, unless it has been: before an early end, and at the end."""
        if trainer.fast_dev_run or self.save_weights_only:
            return None
        if trainer.progress.batches == self._saved_batches:
            return to_place(self._latest)
        kept = self.monitor is None and self.save_top_k != 0
        path = self._path(trainer, self._values(trainer), None, kept)
        self._write(trainer, path, None, kept)
        return path

    def _write(self, trainer: TrainerView, path: Place, score: float | None, kept: bool) -> None:
        """Write a checkpoint, as the last; once it is complete, delete what it makes superfluous."""
        before = self._own_paths()
        if kept:
            self._remember(path, score)
        is_best = self.best_model_path == str(path)
        self._latest = str(path)
        self._saved_at, self._saved_when = trainer.global_step, trainer.clock()
        self._saved_batches = trainer.progress.batches
        unkept = self._unkept = (before | self._left_over) - self._own_paths() - self._others_paths(trainer)
        unkept -= {
            old for old in unkept if trainer.resumed_from is not None and _same(to_place(old), trainer.resumed_from)
        }
        self._left_over = set()
        last_link, best_link = self._links(trainer)
        old_link, self._last_link = self._last_link, last_link
        aliases = (("best",) if is_best else ()) + (("last",) if self.save_last else ())

        def finish() -> None:
            if last_link is not None:
                checkpoint.point(last_link, path)
                if old_link is not None and old_link != last_link:
                    checkpoint.unpoint(old_link)
            if best_link is not None and is_best:
                checkpoint.point(best_link, path)
            for old in unkept:
                checkpoint.delete(to_place(old))
            if isinstance(path, Path):
                for logger in trainer.recorders:
                    logger.log_checkpoint(path, aliases)

        trainer.write_checkpoint(path, self.save_weights_only, finish)
        if self.verbose:
            said = "" if self.current_score is None else f" ({self.monitor} = {self.current_score:.6g})"
            trainer.print(f"Saving {path.name}{said}")

    def _is_kept(self, score: float | None) -> bool:
        if self.save_top_k == 0:
            return False
        if self.save_top_k == -1 or score is None or len(self._kept_scores) < self.save_top_k:
            return True
        return any(better(score, other, self.mode) for other in self._kept_scores.values())

    def _remember(self, path: Place, score: float | None) -> None:
        if score is None:
            self._kept_scores.pop(str(path), None)  # saved anew, it is the latest
            self._kept_scores[str(path)] = 0.0
            if self.save_top_k != -1:
                self._kept_scores = dict(list(self._kept_scores.items())[-self.save_top_k :])
            self.best_model_path = str(path)
            return
        self._kept_scores[str(path)] = score
        ranked = sorted(self._kept_scores.items(), key=lambda item: _rank(item[1], self.mode))
        if self.save_top_k != -1:
            ranked = ranked[: self.save_top_k]
        self._kept_scores = dict(ranked)
        self.best_model_path, self.best_model_score = ranked[0]

    def _path(self, trainer: TrainerView, values: Mapping[str, float], score: float | None, kept: bool) -> Place:
        """The next checkpoint's: one that is free, or whose checkpoint the new one supersedes."""
        links = self._links(trainer)
        name = format_name(self.filename or "{epoch}-{step}", values, self.auto_insert_metric_name)
        path = self._directory / f"{name}{checkpoint.SUFFIX}"
        still_kept = set(self._kept_scores) - ({self._superseded()} if kept else set())
        taken = still_kept | self._others_paths(trainer)
        there = self._there - self._own_paths() - self._unkept - self._left_over
        version = 1
        while path in links or (self.enable_version_counter and str(path) in taken | there):
            path = self._directory / f"{name}-v{version}{checkpoint.SUFFIX}"
            version += 1
        return trainer.group.from_first(path)

    def _links(self, trainer: TrainerView) -> tuple[Place | None, Place | None]:
        """`last.ckpt` and `best.ckpt`, as far as this saver keeps them."""
        last = self._directory / checkpoint.LAST if self.save_last else None
        return last, self._directory / f"best{checkpoint.SUFFIX}" if self.monitor is not None else None

    def _superseded(self) -> str:
        """Which of the best is no longer kept when one more is; nothing, if there is room."""
        if self.save_top_k == -1 or len(self._kept_scores) < self.save_top_k:
            return ""
        return max(self._kept_scores, key=lambda path: _rank(self._kept_scores[path], self.mode))

    def _own_paths(self) -> set[str]:
        return {*self._kept_scores, self._latest} - {""}

    def _others_paths(self, trainer: TrainerView) -> set[str]:
        """What other savers keep, which may be in the same directory."""
        others = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint) and one is not self]
        return set().union(*(one._own_paths() for one in others))


def format_name(template: str, values: Mapping[str, float], insert_names: bool = True) -> str:
    """Fill a file name's template.

    >>> format_name("{epoch}-{val_loss:.2f}", {"epoch": 3, "val_loss": 0.1234})
    'epoch=3-val_loss=0.12'
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        value = values.get(name, 0)
        text = format(value, spec[1:]) if spec else f"{value:g}" if isinstance(value, float) else str(value)
        return f"{name}={text}".replace("/", "_") if insert_names else text

    filled = re.sub(r"\{([^{}:]+)(:[^{}]*)?\}", fill, template)
    if Path(filled).is_absolute() or ".." in Path(filled).parts:
        raise ConfigError(f'ModelCheckpoint(filename="{template}"): a name must stay inside dirpath.')
    return filled


def _same(one: Place, other: Place) -> bool:
    """Whether two places are the same, seen from the working directory."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.absolute() == other.absolute()
    return one == other


def _wants_checkpoints(logger: Any) -> bool:
    return type(logger).log_checkpoint is not Logger.log_checkpoint


def _rank(score: float, mode: str) -> float:
    return score if mode == "min" else -score
