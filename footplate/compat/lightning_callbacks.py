"""Lightning's callbacks on our trainer.

Most of them, and those that people write, only use hooks and public attributes of the trainer: they run as they are.
Those that we have ourselves (EarlyStopping, ModelCheckpoint, …) lean on Lightning's loops: ours take their place, and the
user's object and ours share one `__dict__`, so that `checkpoint.best_model_path` can still be read from the user's.
Those that drive Lightning's own loops are refused, each with what to use instead.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from footplate import callbacks as ours
from footplate.data.sharing import share_rows
from footplate.errors import ConfigError
from footplate.parallel.world import World

if TYPE_CHECKING:
    from footplate.trainer import Trainer

REFUSED_CALLBACKS = {
    "DeviceStatsMonitor": "it reads Lightning's own logger connector. In a callback of yours, "
    "trainer.accelerator.stats(trainer.device) has the figures",
    "ThroughputMonitor": "it reads Lightning's own loops. The progress display shows batches per second",
    "OnExceptionCheckpoint": "it deletes its checkpoint when the trainer is torn down, which here is after an exception "
    'too. Use ModelCheckpoint(every_n_train_steps=…) and continue with ckpt_path="last"',
}

_NAMES = {
    "EarlyStopping": (
        "monitor", "min_delta", "patience", "verbose", "mode", "strict", "check_finite", "stopping_threshold",
        "divergence_threshold",
    ),
    "LearningRateMonitor": ("logging_interval", "log_momentum", "log_weight_decay"),
}  # fmt: skip


def is_lightning(thing: Any) -> bool:
    """Whether an object's class is, or inherits from, one of Lightning's own base classes."""
    return bool(_lineage(thing))


def _lineage(thing: Any) -> list[str]:
    """The names of the Lightning classes among an object's class and its bases, nearest first."""
    homes = ("lightning.", "pytorch_lightning.")
    return [base.__name__ for base in type(thing).__mro__ if base.__module__.startswith(homes)]


def translate_callbacks(callbacks: list[Any]) -> list[Any]:
    """Lightning's own callbacks as ours where ours do the same; others as they are.

    Raises:
        ConfigError: one that can only work inside Lightning's loops.
    """
    translated = [_translate(callback) if is_lightning(callback) else callback for callback in callbacks]
    if any("BasePredictionWriter" in _lineage(callback) for callback in callbacks):
        translated.insert(0, PredictionCollector())
    return translated


def _translate(callback: Any) -> Any:
    name = type(callback).__name__
    lineage = _lineage(callback)
    for base in lineage:
        if base in REFUSED_CALLBACKS:
            raise ConfigError(f"Lightning's {name} can't run here: {REFUSED_CALLBACKS[base]}.")
    replaced = next((base for base in lineage if base in TRANSLATED), None)
    if replaced is None:
        return callback
    kind, arguments = TRANSLATED[replaced]
    if lineage[0] != replaced or type(callback).__name__ != replaced:
        raise ConfigError(
            f"{name} inherits from Lightning's {replaced}, which works on Lightning's own loops. "
            f"Inherit from footplate.{kind.__name__} instead; its hooks and arguments are the same."
        )
    return _sharing(kind(**arguments(callback)), callback)


def _sharing(translated: Any, callback: Any) -> Any:
    """Let the user's object show what ours learns: the two have one `__dict__` from here on."""
    if isinstance(translated, ours.Timer):  # its methods read what only Lightning's own class keeps
        for name in ("time_elapsed", "time_remaining"):
            setattr(callback, name, getattr(translated, name))
        return translated
    translated.__dict__ = callback.__dict__ = {**vars(callback), **vars(translated)}
    return translated


def _early_stopping(callback: Any) -> dict[str, Any]:
    names = _NAMES["EarlyStopping"]
    at_epoch_end = callback._check_on_train_epoch_end
    return {**{name: getattr(callback, name) for name in names}, "check_on_train_epoch_end": at_epoch_end}


def _lr_monitor(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _NAMES["LearningRateMonitor"]}


def _model_checkpoint(callback: Any) -> dict[str, Any]:
    return {
        "dirpath": callback.dirpath,
        "filename": callback.filename,
        "monitor": callback.monitor,
        "verbose": callback.verbose,
        "save_last": callback.save_last,
        "save_top_k": callback.save_top_k,
        "save_weights_only": callback.save_weights_only,
        "mode": callback.mode,
        "auto_insert_metric_name": callback.auto_insert_metric_name,
        "every_n_train_steps": callback._every_n_train_steps or None,
        "train_time_interval": callback._train_time_interval,
        "every_n_epochs": callback._every_n_epochs or None,
        "save_on_train_epoch_end": callback._save_on_train_epoch_end,
        "enable_version_counter": callback._enable_version_counter,
    }


def _timer(callback: Any) -> dict[str, Any]:
    duration = None if callback._duration is None else timedelta(seconds=callback._duration)
    interval = str(getattr(callback._interval, "value", callback._interval))
    return {"duration": duration, "interval": interval, "verbose": callback._verbose}


def _nothing(callback: Any) -> dict[str, Any]:
    return {}


def _summary(callback: Any) -> dict[str, Any]:
    return {"max_depth": callback._max_depth}


def _accumulation(callback: Any) -> dict[str, Any]:
    return {"scheduling": callback.scheduling}


def _swa(callback: Any) -> dict[str, Any]:
    names = ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy", "avg_fn", "device")
    return {name: getattr(callback, f"_{name}") for name in names}


TRANSLATED: dict[str, tuple[type, Any]] = {
    "GradientAccumulationScheduler": (ours.GradientAccumulationScheduler, _accumulation),
    "StochasticWeightAveraging": (ours.StochasticWeightAveraging, _swa),
    "EarlyStopping": (ours.EarlyStopping, _early_stopping),
    "LearningRateMonitor": (ours.LearningRateMonitor, _lr_monitor),
    "ModelCheckpoint": (ours.ModelCheckpoint, _model_checkpoint),
    "Timer": (ours.Timer, _timer),
    "TQDMProgressBar": (ours.ProgressBar, _nothing),
    "RichProgressBar": (ours.ProgressBar, _nothing),
    "ProgressBar": (ours.ProgressBar, _nothing),
    "ModelSummary": (ours.ModelSummary, _summary),
    "RichModelSummary": (ours.ModelSummary, _summary),
}


class PredictionCollector(ours.Callback):
    """What Lightning's `BasePredictionWriter` asks the prediction loop for: predictions, and the rows they are of.

    Attributes:
        predictions: of every batch so far; a list for each loader when there are several.
        current_batch_indices: the rows of the present batch, where the loader goes through them in order; else none.
        epoch_batch_indices: those of every batch so far, for each loader.
    """

    sees_weights = False

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        loaders = trainer.predict_dataloaders
        loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
        self._orders = [_order(loader, trainer.world) for loader in loaders]
        self._found: list[list[Any]] = [[] for _ in loaders]
        self.epoch_batch_indices: list[list[list[int]]] = [[] for _ in loaders]
        self.current_batch_indices: list[int] = []

    @property
    def predictions(self) -> list[Any]:
        return self._found[0] if len(self._found) == 1 else self._found

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        order = self._orders[dataloader_idx]
        self.current_batch_indices = order[batch_idx] if batch_idx < len(order) else []
        self.epoch_batch_indices[dataloader_idx].append(self.current_batch_indices)
        self._found[dataloader_idx].append(outputs)


def _order(loader: Any, world: World) -> list[list[int]]:
    """The rows of each batch of this rank of a torch DataLoader that goes through its set in order; else nothing."""
    from torch.utils.data import BatchSampler, SequentialSampler

    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(getattr(sampler, "sampler", None), SequentialSampler):
        return []
    if world.size == 1:
        return [list(rows) for rows in sampler]  # type: ignore[union-attr]
    if type(sampler) is not BatchSampler:
        return []
    order, size = list(sampler.sampler), sampler.batch_size * world.size
    return [one.rows for one in share_rows(order, size, sampler.drop_last, world.rank, world.size) if one.weight]
