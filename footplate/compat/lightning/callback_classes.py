"""Replacement methods for Lightning's callbacks that read Lightning's loops.

The user's object stays the same object: `trainer.callbacks` holds it, `isinstance` and its attributes work as under
Lightning, and the methods of the user's subclass run. Only the object's class changes, to a class that looks methods up
in this order:

    the user's subclasses  →  the replacement in this file  →  Lightning's class

So `super()` in a user's method reaches our replacement first. Each replacement below names the callback that it is for.
This file doesn't import Lightning.
"""

# pyright: reportIncompatibleVariableOverride=false
# Saving has properties where footplate.ModelCheckpoint has attributes.

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from footplate import callbacks as ours
from footplate import checkpoint
from footplate.callbacks.model_checkpoint import format_name
from footplate.checkpoint.storage import Place, to_place
from footplate.compat.lightning._class_between import Between, between, is_lightnings, users_classes
from footplate.core.errors import ConfigError
from footplate.training.crash_checkpoint import crash_phase, savable

if TYPE_CHECKING:
    from footplate.callbacks.trainer_view import TrainerView
    from footplate.training.trainer import Trainer


def replace_methods(callback: Any) -> None:
    """Give a Lightning callback the methods that work here, if it needs any. A second call changes nothing.

    Raises:
        ConfigError: a subclass overrides a method of Lightning's that is never called here.
    """
    kind = type(callback)
    if isinstance(kind, Between):
        return
    name = next((base.__name__ for base in kind.__mro__ if is_lightnings(base) and base.__name__ in REPLACEMENTS), None)
    if name is None:
        return
    replacement = REPLACEMENTS[name]
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


class Unchanged:
    """Base of the replacements: all of Lightning's own methods, which don't read the weights.

    Attributes:
        runs_ours: True if Footplate's methods take over, so that Lightning's other methods are never called.
    """

    runs_ours = False
    sees_weights = False

    def take_over(self) -> None:
        """Set the attributes that the new methods need from those that Lightning's `__init__` has set."""


class Stopping(Unchanged):
    """For `EarlyStopping`: runs after the callbacks and the module whose values it reads."""

    order = 1

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = trainer.validates_once_per_epoch


# Attributes of Lightning's ModelCheckpoint that `Saving` has as properties.
_PROPERTIES = (
    "dirpath",
    "best_k_models",
    "best_model_score",
    "current_score",
    "last_model_path",
    "kth_best_model_path",
    "_last_checkpoint_saved",
)


class Saving(ours.ModelCheckpoint):
    """For `ModelCheckpoint`: footplate.ModelCheckpoint, which saves in the background, with Lightning's attributes."""

    runs_ours = True
    # Lightning's is a property without a setter.
    every_n_epochs: int = 0
    _shown_dirpath: str | None = None

    def take_over(self) -> None:
        original: Any = self
        if original.FILE_EXTENSION != checkpoint.SUFFIX:
            raise ConfigError(
                f'{type(self).__name__}.FILE_EXTENSION is "{original.FILE_EXTENSION}": checkpoints of Footplate end in '
                f'"{checkpoint.SUFFIX}", by which they are found again. Leave FILE_EXTENSION as it is.'
            )
        kept = {name: vars(self).pop(name, None) for name in _PROPERTIES}
        ours.ModelCheckpoint.__init__(
            self,
            dirpath=kept["dirpath"],
            filename=original.filename,
            monitor=original.monitor,
            verbose=original.verbose,
            save_last=original.save_last,
            save_top_k=original.save_top_k,
            save_weights_only=original.save_weights_only,
            mode=original.mode,
            auto_insert_metric_name=original.auto_insert_metric_name,
            every_n_train_steps=original._every_n_train_steps,
            train_time_interval=original._train_time_interval,
            every_n_epochs=original._every_n_epochs,
            save_on_train_epoch_end=original._save_on_train_epoch_end,
            enable_version_counter=original._enable_version_counter,
            save_on_exception=getattr(original, "save_on_exception", False),
        )

    @property
    def dirpath(self) -> Any:
        """The directory, as text."""
        return self._shown_dirpath

    @dirpath.setter
    def dirpath(self, path: str | Place | None) -> None:
        self._shown_dirpath = None if path is None else str(path)

    @property
    def last_model_path(self) -> str:
        """The path of `last.ckpt`; empty without `save_last` and before the first save."""
        return str(self._last_link) if self._last_link is not None else ""

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the kept checkpoints, when there are `save_top_k` of them; empty before."""
        if not self.best_k_models:
            return ""
        return list(self.best_k_models)[-1] if self.save_top_k == -1 else self._kept.superseded()

    @property
    def best_k_models(self) -> dict[str, Any]:
        """The scores of the kept checkpoints by path, as tensors; empty without `monitor`."""
        return {} if self.monitor is None else {path: _as_tensor(score) for path, score in self._kept_scores.items()}

    @property
    def best_model_score(self) -> Any:
        """The best score, as a tensor."""
        return self._shown_best

    @best_model_score.setter
    def best_model_score(self, score: float | None) -> None:
        self._shown_best = _as_tensor(score)

    @property
    def current_score(self) -> Any:
        """The latest score, as a tensor."""
        return self._shown_current

    @current_score.setter
    def current_score(self, score: float | None) -> None:
        self._shown_current = _as_tensor(score)

    @property
    def _last_checkpoint_saved(self) -> str:
        return self._latest

    def _links(self, trainer: TrainerView) -> tuple[Place | None, Place | None]:
        lightnings: Any = self
        if not self.save_last:
            return None, None
        name = format_name(lightnings.CHECKPOINT_NAME_LAST, self._values(trainer), self.auto_insert_metric_name)
        return self._directory / f"{name}{checkpoint.SUFFIX}", None

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths of the kept checkpoints and their scores."""
        import yaml

        path = self._directory / "best_k_models.yaml" if filepath is None else to_place(filepath)
        if not isinstance(path, Path):
            raise ConfigError(f"ModelCheckpoint.to_yaml({str(path)!r}): expected a path on a local disk.")
        path.write_text(yaml.safe_dump({saved: float(score) for saved, score in self.best_k_models.items()}))


def _as_tensor(score: float | None) -> Any:
    return None if score is None else torch.tensor(float(score), dtype=torch.float64)


class SavingOnException(Unchanged):
    """For `OnExceptionCheckpoint`: keeps its checkpoint after an exception.

    Lightning doesn't call `teardown` after an exception. We do, and Lightning's `teardown` would delete the checkpoint.
    """

    order = 2
    _has_failed = False

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._has_failed = True
        can_save = (
            trainer.training_in_progress
            and not trainer.group.is_distributed
            and crash_phase(trainer.run) == "between steps"
        )
        if can_save or savable(trainer.run, exception):
            trainer.save_checkpoint(self.ckpt_path)  # type: ignore[attr-defined]

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._has_failed = False

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if not self._has_failed and trainer.world.rank == 0:
            checkpoint.delete(self.ckpt_path)  # type: ignore[attr-defined]


class Rates(Unchanged):
    """For `LearningRateMonitor`: its names and values, in our rows. It reads them before each step that is reported."""

    # A callback that may read the weights gets its hook before every step, also if one call makes several steps.
    sees_weights = True

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.loggers:
            super().on_train_start(trainer, *args, **kwargs)  # type: ignore[misc]

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        monitor: Any = self
        if trainer.loggers and monitor.logging_interval != "epoch" and trainer.logs_next_step:
            trainer.log_now(monitor._extract_stats(trainer, "step" if monitor.logging_interval is None else "any"))

    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        monitor: Any = self
        if trainer.loggers and monitor.logging_interval != "step":
            trainer.log_now(monitor._extract_stats(trainer, "epoch" if monitor.logging_interval is None else "any"))


class DeviceStats(Unchanged):
    """For `DeviceStatsMonitor`: Lightning's figures, in our rows."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Accept a trainer without loggers, which Lightning refuses: the figures are then only in `callback_metrics`."""

    def _get_and_log_device_stats(self, trainer: Trainer, key: str) -> None:
        monitor: Any = self
        device, on_host = trainer.device, trainer.device.type == "cpu"
        due = trainer.logs_this_step if key == "on_train_batch_end" else trainer.logs_next_step
        if not due or (monitor._cpu_stats is False and on_host):
            return

        stats: dict[str, Any] = {}
        if device.type == "cuda":
            stats |= torch.cuda.memory_stats(device)
        elif not on_host:
            stats |= trainer.accelerator.stats(device)
        if on_host or monitor._cpu_stats:
            stats |= sys.modules["lightning.pytorch.accelerators.cpu"].get_cpu_stats()
        prefix = f"{type(self).__qualname__}.{key}"
        trainer.log_now({f"{prefix}/{name}": float(value) for name, value in stats.items()})


class Bar(Unchanged):
    """For the progress bars, which read one number from Lightning's loop."""

    @property
    def total_val_batches_current_epoch(self) -> int | float:
        """The number of validation batches of the epoch in progress."""
        trainer = self.trainer  # type: ignore[attr-defined]
        every = trainer.check_val_every_n_epoch
        due = every is None or (trainer.current_epoch + 1) % every == 0
        return sum(trainer.num_val_batches) if due else 0

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        """The values that the bar shows; with Lightning's `v_num` only if every logger has a version."""
        if all(hasattr(logger, "version") for logger in trainer.loggers):
            return super().get_metrics(trainer, pl_module)  # type: ignore[misc]
        return dict(trainer.progress_bar_metrics)


class Summary(Unchanged):
    """For `ModelSummary`: Lightning's table for a LightningModule, ours for a `footplate.Module`."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if hasattr(pl_module, "_trainer"):
            super().on_fit_start(trainer, pl_module)  # type: ignore[misc]
        elif self._max_depth:  # type: ignore[attr-defined]
            ours.ModelSummary(self._max_depth).on_fit_start(trainer, pl_module)  # type: ignore[attr-defined]

    def _summary(self, trainer: Trainer, pl_module: Any) -> Any:
        # Without a trainer, Lightning's table doesn't read the plugins of Lightning's trainer.
        attached_trainer, pl_module._trainer = pl_module._trainer, None
        try:
            return super()._summary(trainer, pl_module)  # type: ignore[misc]
        finally:
            pl_module._trainer = attached_trainer


class Accumulating(ours.GradientAccumulationScheduler):
    """For `GradientAccumulationScheduler`: ours."""

    runs_ours = True

    def take_over(self) -> None:
        ours.GradientAccumulationScheduler.__init__(self, self.scheduling)


class Averaging(ours.StochasticWeightAveraging):
    """For `StochasticWeightAveraging`: ours."""

    runs_ours = True

    def take_over(self) -> None:
        names = ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy", "avg_fn", "device")
        arguments = {name: vars(self)[f"_{name}"] for name in names}
        ours.StochasticWeightAveraging.__init__(self, **arguments)


REPLACEMENTS: dict[str, Any] = {
    "EarlyStopping": Stopping,
    "ModelCheckpoint": Saving,
    "OnExceptionCheckpoint": SavingOnException,
    "LearningRateMonitor": Rates,
    "DeviceStatsMonitor": DeviceStats,
    "ModelSummary": Summary,
    "Timer": Unchanged,
    "ProgressBar": Bar,
    "GradientAccumulationScheduler": Accumulating,
    "StochasticWeightAveraging": Averaging,
}
