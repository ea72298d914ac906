"""The callback that saves checkpoints: when, under which name, and which of them to keep.

A checkpoint is written in the background (see `footplate.checkpoint`). An older checkpoint is deleted only when the new one
is complete. The newest complete checkpoint is never deleted before there is another, so that a run can always resume. Each
checkpoint lists the older ones that it replaces. If the process is killed before it deletes them, the resumed run does.

Several savers may share a directory. Each deletes only its own checkpoints, and uses no name that another saver uses.
`kept_checkpoints.py` decides which checkpoints to keep.
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
from footplate.callbacks.kept_checkpoints import KeptCheckpoints
from footplate.callbacks.monitored_metric import check_mode, monitored
from footplate.checkpoint.storage import Place, is_remote, to_place
from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


log = logging.getLogger(__name__)


class ModelCheckpoint(Callback):
    """Save the run state after validation, after training epochs, or at an interval of steps or time.

    Args:
        dirpath: a directory, or a URI of an object store (`s3://bucket/run/checkpoints`, `gs://…`, `abfss://…`). The
            default is `checkpoints/` in the run's directory, or in the bucket of a job's directory.
        filename: a template such as `"{epoch}-{val_loss:.2f}"`. The default is `"{epoch}-{step}"`.
        monitor: keep the best checkpoints by this metric. Without it, the latest are kept.
        verbose: print each save.
        save_last: keep `last.ckpt`, a link to the newest checkpoint, whether it is among the best or not. "link" is
            accepted for compatibility: `last.ckpt` is always a link.
        save_top_k: how many of the best or latest to keep; -1 keeps all, 0 saves only the last.
        save_weights_only: save the weights without the state that resuming needs.
        mode: "min" or "max": which direction of `monitor` is better.
        auto_insert_metric_name: write `epoch=3` instead of `3` for `{epoch}`.
        every_n_train_steps: save after every n optimizer steps.
        train_time_interval: save at this interval of time.
        every_n_epochs: save only in every n-th epoch.
        save_on_train_epoch_end: save at the end of training epochs instead of validation. This is the default if validation
            runs once an epoch or never, because the metrics of the training epoch are complete then.
        enable_version_counter: don't overwrite a file of an earlier run; add `-v1`, `-v2`, …
        save_on_exception: save when an exception ends training, even without `save_last`. There is no save if the run can't
            continue from this point, such as in the middle of an optimizer step.

    If `monitor` has not been logged yet, the first save waits until validation has run.

    Examples:
        >>> best = fp.ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.2f}", save_top_k=2)
        >>> fp.Trainer(max_epochs=1, callbacks=[best]).fit(model, train, val)
        >>> best.best_model_path.endswith(".ckpt")
        True
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
                "ModelCheckpoint: use one of every_n_train_steps, train_time_interval and every_n_epochs. "
                "For several schedules, use several ModelCheckpoints."
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

        self._reset()

    def _reset(self) -> None:
        self._kept = KeptCheckpoints(self.save_top_k, self.mode)
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self._latest = ""
        self._last_link: Place | None = None
        self.current_score: float | None = None

        # Checkpoints that the latest save replaces, and that are deleted when it is complete.
        self._replaced: set[str] = set()
        # Everything that was in the directory when training began.
        self._existing: set[str] = set()
        # Replaced checkpoints that a killed process may not have deleted.
        self._undeleted: set[str] = set()
        # A save by step is due and waits for its metric.
        self._due_after_validation = False
        self._saved_at = 0
        self._saved_batches = -1
        self._saved_when = 0.0

    @property
    def best_k_models(self) -> dict[str, float]:
        """The score of each kept checkpoint, the best or the latest, by its path."""
        return self._kept.scores

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint."""
        return self._latest

    @property
    def _kept_scores(self) -> dict[str, float]:
        return self._kept.scores

    @property
    def _directory(self) -> Place:
        assert self.dirpath is not None
        return to_place(self.dirpath)

    @property
    def _by_step(self) -> bool:
        return bool(self.every_n_train_steps) or self.train_time_interval is not None

    @property
    def state_key(self) -> str:
        schedule = f"{self.every_n_train_steps},{self.every_n_epochs},{self.train_time_interval}"
        return f"ModelCheckpoint[{self.monitor},{self.mode},{schedule}]"

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": str(self.dirpath),
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "best_k_models": dict(self._kept.scores),
            "last_model_path": self._latest,
            "last_link": None if self._last_link is None else str(self._last_link),
            "current_score": self.current_score,
            "unkept": sorted(self._replaced),
            "saved_at": self._saved_at,
            "saved_batches": self._saved_batches,
            "due_after_validation": self._due_after_validation,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.dirpath is None or not _same(to_place(state_dict["dirpath"]), to_place(self.dirpath)):
            # Checkpoints in another directory are not this saver's.
            return

        scores = state_dict["best_k_models"]
        self._kept.scores = {path: score for path, score in scores.items() if checkpoint.is_complete(path)}
        self.best_model_path = state_dict["best_model_path"]
        self.best_model_score = state_dict["best_model_score"]
        # Someone may have deleted the best checkpoint.
        if self._kept.scores and self.best_model_path not in self._kept.scores:
            self.best_model_path = self._kept.best()
            self.best_model_score = self._kept.scores[self.best_model_path]

        self._latest = state_dict["last_model_path"]
        self._last_link = to_place(state_dict["last_link"]) if state_dict.get("last_link") else None
        self.current_score = state_dict["current_score"]
        self._undeleted = set(state_dict.get("unkept", ()))
        self._saved_at = state_dict["saved_at"]
        self._saved_batches = state_dict["saved_batches"]
        self._due_after_validation = state_dict.get("due_after_validation", False)

    def begin_at(self, step: int) -> None:
        """Begin at a step that another training has made. Its scores aren't those of this training."""
        self._saved_at = step

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        dirpath = trainer.checkpoint_dir if self.dirpath is None else self._directory
        self.dirpath = dirpath = trainer.group.from_first(trainer.for_all(dirpath))
        if stage != "fit":
            return
        self._reset()

        # Rank 0 chooses the names for all ranks. It also removes temporary files, which would disturb a listing elsewhere.
        if trainer.fast_dev_run or trainer.world.rank != 0:
            return

        checkpoint.prepare(dirpath)
        if is_remote(dirpath) and any(map(_wants_checkpoints, trainer.recorders)):
            log.warning("Loggers don't get the checkpoints, because %s is not on a disk of this machine.", dirpath)
        # List the directory once, so that a save doesn't wait for the object store.
        self._existing = set(map(str, checkpoint.find(dirpath)))

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._saved_when = trainer.clock()
        best = self._kept.scores, self.best_model_path, self.best_model_score
        self._kept.scores, self.best_model_path, self.best_model_score = trainer.group.from_first(best)
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
            # The metric is about to be measured.
            self._due_after_validation = True
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
        """Save if the checkpoint is among the best, or as the last one."""
        if trainer.fast_dev_run or trainer.sanity_checking:
            return

        values = self._values(trainer)
        score, kept = None, True
        if self.monitor is not None:
            score = monitored(trainer, self.monitor, "ModelCheckpoint", not self._may_wait(trainer), values)
            kept = score is not None
            self._due_after_validation = self._by_step and not kept

        # NaN is worse than any number.
        if score is not None and score != score:
            score = float("inf" if self.mode == "min" else "-inf")
        self.current_score = score

        kept = kept and self._kept.accepts(score)
        if kept or self.save_last:
            self._write(trainer, self._path(trainer, values, score, kept), score, kept)

    def _values(self, trainer: TrainerView) -> dict[str, float]:
        """Values for `monitor` and for file names: the metrics, and the epoch and step unless they were logged."""
        metrics = trainer.latest_metrics()
        counters = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        logged = {name: int(metrics[name]) for name in counters if math.isfinite(metrics.get(name, math.nan))}
        return {**metrics, **counters, **logged}

    def _may_wait(self, trainer: TrainerView) -> bool:
        """Return True if the metric may be missing: before the first validation, or in the first epoch."""
        before_validation = trainer.has_validation and trainer.progress.validated_at < 0
        return before_validation or (self._by_step and trainer.current_epoch == 0)

    def save_now(self, trainer: TrainerView) -> Place | None:
        """Save the current state as the last checkpoint, unless it is saved already; return the path.

        The trainer calls this at the end of training and before an early end.
        """
        if trainer.fast_dev_run or self.save_weights_only:
            return None
        if trainer.progress.batches == self._saved_batches:
            return to_place(self._latest)
        kept = self.monitor is None and self.save_top_k != 0
        path = self._path(trainer, self._values(trainer), None, kept)
        self._write(trainer, path, None, kept)
        return path

    def _write(self, trainer: TrainerView, path: Place, score: float | None, kept: bool) -> None:
        """Write a checkpoint as the last one. When it is complete, delete the checkpoints that it replaces."""
        before = self._own_paths()
        if kept:
            self._kept.add(str(path), score)
            self.best_model_path = str(path) if score is None else next(iter(self._kept.scores))
            if score is not None:
                self.best_model_score = self._kept.scores[self.best_model_path]
        is_best = self.best_model_path == str(path)
        self._latest = str(path)
        self._saved_at, self._saved_when = trainer.global_step, trainer.clock()
        self._saved_batches = trainer.progress.batches

        # The checkpoint that this run resumed from may have been named by the user, so it stays.
        replaced = self._replaced = (before | self._undeleted) - self._own_paths() - self._others_paths(trainer)
        replaced -= {
            old for old in replaced if trainer.resumed_from is not None and _same(to_place(old), trainer.resumed_from)
        }
        self._undeleted = set()

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
            for old in replaced:
                checkpoint.delete(to_place(old))
            if isinstance(path, Path):
                for logger in trainer.recorders:
                    logger.log_checkpoint(path, aliases)

        trainer.write_checkpoint(path, self.save_weights_only, finish)
        if self.verbose:
            metric = "" if self.current_score is None else f" ({self.monitor} = {self.current_score:.6g})"
            trainer.print(f"Saving {path.name}{metric}")

    def _path(self, trainer: TrainerView, values: Mapping[str, float], score: float | None, kept: bool) -> Place:
        """The path of the next checkpoint: a free one, or that of the checkpoint that it replaces."""
        links = self._links(trainer)
        name = format_name(self.filename or "{epoch}-{step}", values, self.auto_insert_metric_name)
        path = self._directory / f"{name}{checkpoint.SUFFIX}"

        still_kept = set(self._kept.scores) - ({self._kept.superseded()} if kept else set())
        foreign = self._existing - self._own_paths() - self._replaced - self._undeleted
        taken = still_kept | self._others_paths(trainer) | foreign
        version = 1
        while path in links or (self.enable_version_counter and str(path) in taken):
            path = self._directory / f"{name}-v{version}{checkpoint.SUFFIX}"
            version += 1
        return trainer.group.from_first(path)

    def _links(self, trainer: TrainerView) -> tuple[Place | None, Place | None]:
        """The paths of `last.ckpt` and `best.ckpt`; None for a link that this saver doesn't keep."""
        last = self._directory / checkpoint.LAST if self.save_last else None
        return last, self._directory / f"best{checkpoint.SUFFIX}" if self.monitor is not None else None

    def _own_paths(self) -> set[str]:
        return {*self._kept.scores, self._latest} - {""}

    def _others_paths(self, trainer: TrainerView) -> set[str]:
        """The checkpoints of other savers, which may be in the same directory."""
        other_savers = [
            saver for saver in trainer.callbacks if isinstance(saver, ModelCheckpoint) and saver is not self
        ]
        return set().union(*(saver._own_paths() for saver in other_savers))


def format_name(template: str, values: Mapping[str, float], insert_names: bool = True) -> str:
    """Fill in the template of a file name.

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
        raise ConfigError(f'ModelCheckpoint(filename="{template}"): the name must stay inside dirpath.')
    return filled


def _same(first: Place, second: Place) -> bool:
    """Return True if two places are the same, relative to the working directory."""
    if isinstance(first, Path) and isinstance(second, Path):
        return first.absolute() == second.absolute()
    return first == second


def _wants_checkpoints(logger: Any) -> bool:
    return type(logger).log_checkpoint is not Logger.log_checkpoint
