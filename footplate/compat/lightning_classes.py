"""Lightning's callbacks that work on Lightning's own loops, with methods of ours in place of those that do.

The user's object stays the same object: `trainer.callbacks` holds it, `isinstance` and its attributes work as under
Lightning, and its subclasses' own methods run. Only its class changes, to one that looks methods up in this order:

    the user's subclasses  →  the replacement in this file  →  Lightning's class

`super()` in a user's method therefore reaches our replacement first. Lightning itself is never imported here.
"""

# pyright: reportIncompatibleVariableOverride=false
# Saving shows values as properties that ours keeps as attributes.

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from footplate import callbacks as ours
from footplate import checkpoint
from footplate.callbacks.model_checkpoint import format_name
from footplate.checkpoint.storage import Place, to_place
from footplate.compat._between import Between, between, is_lightnings, users_classes
from footplate.core.errors import ConfigError
from footplate.training.crash_checkpoint import moment_of, savable

if TYPE_CHECKING:
    from footplate.callbacks.trainer_view import TrainerView
    from footplate.training.trainer import Trainer


def replace_methods(callback: Any) -> None:
    """Give a callback of Lightning's the methods that work here, if it needs them; does so once.

    Raises:
        ConfigError: a subclass overrides a method of Lightning's that is never called here.
    """
    kind = type(callback)
    if isinstance(kind, Between):
        return
    name = next((base.__name__ for base in kind.__mro__ if is_lightnings(base) and base.__name__ in REPLACED), None)
    if name is None:
        return
    replacement = REPLACED[name]
    _check_overrides(kind, name, replacement)
    callback.__class__ = between(kind, replacement)
    replacement.take_over(callback)


def _check_overrides(kind: type, name: str, replacement: Any) -> None:
    lightnings = next(base for base in kind.__mro__ if is_lightnings(base) and base.__name__ == name)
    for base in users_classes(kind):
        for method, value in vars(base).items():
            unused = callable(value) and not method.startswith("__") and not hasattr(replacement, method)
            if unused and replacement.runs_ours and callable(getattr(lightnings, method, None)):
                raise ConfigError(
                    f"{kind.__name__} overrides {name}.{method}(), which is not called here. Override a hook such as "
                    f"on_validation_end() instead, or inherit from footplate.{name}."
                )


class AsItIs:
    """Lightning's own methods, all of them; they don't look at the weights.

    Class attributes:
        runs_ours: whether Footplate's methods take over, so that Lightning's other methods are never called.
    """

    runs_ours = False
    sees_weights = False

    def take_over(self) -> None:
        """Set what the new methods need, from what Lightning's `__init__` has set."""


class Stopping(AsItIs):
    """`EarlyStopping`: acts on what other callbacks and the module log."""

    order = 1

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = trainer.validates_once_per_epoch


_SHOWN = (
    "dirpath",
    "best_k_models",
    "best_model_score",
    "current_score",
    "last_model_path",
    "kth_best_model_path",
    "_last_checkpoint_saved",
)  # fmt: skip  what Saving has as properties


class Saving(ours.ModelCheckpoint):
    """`ModelCheckpoint`: ours, which writes in the background, seen as Lightning's."""

    runs_ours = True
    every_n_epochs: int = 0  # a property of Lightning's, without a setter
    _shown_dirpath: str | None = None

    def take_over(self) -> None:
        given: Any = self
        if given.FILE_EXTENSION != checkpoint.SUFFIX:
            raise ConfigError(
                f'{type(self).__name__}.FILE_EXTENSION is "{given.FILE_EXTENSION}": checkpoints of Footplate end in '
                f'"{checkpoint.SUFFIX}", by which they are found again.'
            )
        kept = {name: vars(self).pop(name, None) for name in _SHOWN}
        ours.ModelCheckpoint.__init__(
            self,
            dirpath=kept["dirpath"],
            filename=given.filename,
            monitor=given.monitor,
            verbose=given.verbose,
            save_last=given.save_last,
            save_top_k=given.save_top_k,
            save_weights_only=given.save_weights_only,
            mode=given.mode,
            auto_insert_metric_name=given.auto_insert_metric_name,
            every_n_train_steps=given._every_n_train_steps,
            train_time_interval=given._train_time_interval,
            every_n_epochs=given._every_n_epochs,
            save_on_train_epoch_end=given._save_on_train_epoch_end,
            enable_version_counter=given._enable_version_counter,
            save_on_exception=getattr(given, "save_on_exception", False),
        )

    @property
    def dirpath(self) -> Any:
        """As text, which is what Lightning has."""
        return self._shown_dirpath

    @dirpath.setter
    def dirpath(self, place: str | Place | None) -> None:
        self._shown_dirpath = None if place is None else str(place)

    @property
    def last_model_path(self) -> str:
        """`last.ckpt`, as in Lightning; nothing without `save_last`, or before the first save."""
        return str(self._last_link) if self._last_link is not None else ""

    @property
    def kth_best_model_path(self) -> str:
        """The worst of those that are kept, once there are as many as `save_top_k` says."""
        if not self.best_k_models:
            return ""
        return list(self.best_k_models)[-1] if self.save_top_k == -1 else self._kept.superseded()

    @property
    def best_k_models(self) -> dict[str, Any]:
        """The scores of the best, as tensors; nothing without `monitor`, as in Lightning."""
        return {} if self.monitor is None else {path: _as_tensor(score) for path, score in self._kept_scores.items()}

    @property
    def best_model_score(self) -> Any:
        """As a tensor, which is what Lightning has."""
        return self._shown_best

    @best_model_score.setter
    def best_model_score(self, score: float | None) -> None:
        self._shown_best = _as_tensor(score)

    @property
    def current_score(self) -> Any:
        """As a tensor, which is what Lightning has."""
        return self._shown_current

    @current_score.setter
    def current_score(self, score: float | None) -> None:
        self._shown_current = _as_tensor(score)

    @property
    def _last_checkpoint_saved(self) -> str:
        return self._latest

    def _links(self, trainer: TrainerView) -> tuple[Place | None, Place | None]:
        shown: Any = self
        if not self.save_last:
            return None, None
        name = format_name(shown.CHECKPOINT_NAME_LAST, self._values(trainer), self.auto_insert_metric_name)
        return self._directory / f"{name}{checkpoint.SUFFIX}", None

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths of the best checkpoints and their scores."""
        import yaml

        path = self._directory / "best_k_models.yaml" if filepath is None else to_place(filepath)
        if not isinstance(path, Path):
            raise ConfigError(f"ModelCheckpoint.to_yaml({str(path)!r}): expected a path on a disk.")
        path.write_text(yaml.safe_dump({saved: float(score) for saved, score in self.best_k_models.items()}))


def _as_tensor(score: float | None) -> Any:
    return None if score is None else torch.tensor(float(score), dtype=torch.float64)


class SavingOnException(AsItIs):
    """`OnExceptionCheckpoint`: keeps what it has saved, where Lightning's `teardown` is not called after an exception."""

    order = 2
    _has_failed = False

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._has_failed = True
        ended = (
            trainer.training_in_progress
            and not trainer.group.is_distributed
            and moment_of(exception) == "between steps"
        )
        if ended or savable(trainer.run, exception):
            trainer.save_checkpoint(self.ckpt_path)  # type: ignore[attr-defined]

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._has_failed = False

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not self._has_failed and trainer.world.rank == 0:
            checkpoint.delete(self.ckpt_path)  # type: ignore[attr-defined]


class Rates(AsItIs):
    """`LearningRateMonitor`: its names and values, in the rows of ours; read before each step that is reported."""

    sees_weights = True  # so that its hook comes before every step, also where a call makes several

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.loggers:
            super().on_train_start(trainer, *args, **kwargs)  # type: ignore[misc]

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        given: Any = self
        if trainer.loggers and given.logging_interval != "epoch" and trainer.logs_next_step:
            trainer.log_now(given._extract_stats(trainer, "step" if given.logging_interval is None else "any"))

    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        given: Any = self
        if trainer.loggers and given.logging_interval != "step":
            trainer.log_now(given._extract_stats(trainer, "epoch" if given.logging_interval is None else "any"))


class DeviceStats(AsItIs):
    """`DeviceStatsMonitor`: Lightning's figures, in the rows of ours."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Lightning's refuses a trainer without loggers; here the figures are then in `callback_metrics` alone."""

    def _get_and_log_device_stats(self, trainer: Trainer, key: str) -> None:
        given: Any = self
        here, on_host = trainer.device, trainer.device.type == "cpu"
        due = trainer.logs_this_step if key == "on_train_batch_end" else trainer.logs_next_step
        if not due or (given._cpu_stats is False and on_host):
            return
        stats: dict[str, Any] = {}
        if here.type == "cuda":
            stats |= torch.cuda.memory_stats(here)
        elif not on_host:
            stats |= trainer.accelerator.stats(here)
        if on_host or given._cpu_stats:
            stats |= sys.modules["lightning.pytorch.accelerators.cpu"].get_cpu_stats()
        prefix = f"{type(self).__qualname__}.{key}"
        trainer.log_now({f"{prefix}/{name}": float(value) for name, value in stats.items()})


class Bar(AsItIs):
    """Lightning's progress bars: they ask the loop one thing."""

    @property
    def total_val_batches_current_epoch(self) -> int | float:
        """Validation batches of the epoch in progress."""
        trainer = self.trainer  # type: ignore[attr-defined]
        every = trainer.check_val_every_n_epoch
        due = every is None or (trainer.current_epoch + 1) % every == 0
        return sum(trainer.num_val_batches) if due else 0

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        """What the bar shows: Lightning's `v_num` only where every logger has a version."""
        if all(hasattr(logger, "version") for logger in trainer.loggers):
            return super().get_metrics(trainer, pl_module)  # type: ignore[misc]
        return dict(trainer.progress_bar_metrics)


class Summary(AsItIs):
    """`ModelSummary`: Lightning's table for a LightningModule, ours for a module of ours."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if hasattr(pl_module, "_trainer"):
            super().on_fit_start(trainer, pl_module)  # type: ignore[misc]
        elif self._max_depth:  # type: ignore[attr-defined]
            ours.ModelSummary(self._max_depth).on_fit_start(trainer, pl_module)  # type: ignore[attr-defined]

    def _summary(self, trainer: Trainer, pl_module: Any) -> Any:
        attached, pl_module._trainer = pl_module._trainer, None  # else it asks the trainer for Lightning's plugins
        try:
            return super()._summary(trainer, pl_module)  # type: ignore[misc]
        finally:
            pl_module._trainer = attached


class Accumulating(ours.GradientAccumulationScheduler):
    """`GradientAccumulationScheduler`: ours."""

    runs_ours = True

    def take_over(self) -> None:
        ours.GradientAccumulationScheduler.__init__(self, self.scheduling)


class Averaging(ours.StochasticWeightAveraging):
    """`StochasticWeightAveraging`: ours."""

    runs_ours = True

    def take_over(self) -> None:
        names = ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy", "avg_fn", "device")
        given = {name: vars(self)[f"_{name}"] for name in names}
        ours.StochasticWeightAveraging.__init__(self, **given)


REPLACED: dict[str, Any] = {
    "EarlyStopping": Stopping,
    "ModelCheckpoint": Saving,
    "OnExceptionCheckpoint": SavingOnException,
    "LearningRateMonitor": Rates,
    "DeviceStatsMonitor": DeviceStats,
    "ModelSummary": Summary,
    "Timer": AsItIs,
    "ProgressBar": Bar,
    "GradientAccumulationScheduler": Accumulating,
    "StochasticWeightAveraging": Averaging,
}
