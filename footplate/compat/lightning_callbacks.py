"""Lightning's callbacks on our trainer.

Most of them, and those that people write, only use hooks and public attributes of the trainer: they run as they are.
Some of Lightning's own read its loops here and there: `lightning_classes.py` replaces those methods.
Those that drive Lightning's own loops are refused, each with what to use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate import callbacks as ours
from footplate.compat.lightning_classes import replace_methods
from footplate.core.errors import ConfigError
from footplate.data.order.sharding import share_rows
from footplate.distributed.world import World

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

REFUSED_CALLBACKS = {
    "ThroughputMonitor": "it reads Lightning's own loops. The progress display shows batches per second",
}


def is_lightning(thing: Any) -> bool:
    """Whether an object's class is, or inherits from, one of Lightning's own base classes."""
    return bool(_lineage(thing))


def _lineage(thing: Any) -> list[str]:
    """The names of the Lightning classes among an object's class and its bases, nearest first."""
    homes = ("lightning.", "pytorch_lightning.")
    return [base.__name__ for base in type(thing).__mro__ if base.__module__.startswith(homes)]


def translate_callbacks(callbacks: list[Any]) -> list[Any]:
    """Lightning's callbacks, able to run here: the same objects.

    Raises:
        ConfigError: one that can only work inside Lightning's loops.
    """
    translated = [_prepare(callback) if is_lightning(callback) else callback for callback in callbacks]
    writers = [callback for callback in callbacks if "BasePredictionWriter" in _lineage(callback)]
    if writers:
        translated.insert(0, PredictionCollector(any(writer.interval.on_epoch for writer in writers)))
    return translated


def _prepare(callback: Any) -> Any:
    for base in _lineage(callback):
        if base in REFUSED_CALLBACKS:
            raise ConfigError(f"Lightning's {type(callback).__name__} can't run here: {REFUSED_CALLBACKS[base]}.")
    replace_methods(callback)
    return callback


class PredictionCollector(ours.Callback):
    """What Lightning's `BasePredictionWriter` asks the prediction loop for: predictions, and the rows they are of.

    Args:
        keeps_indices: whether a writer will want `epoch_batch_indices`.

    Attributes:
        predictions: of every batch so far; a list for each loader when there are several.
        current_batch_indices: the rows of the present batch, where the loader goes through them in order; else none.
        epoch_batch_indices: those of every batch so far, for each loader; empty if no writer wants them.
    """

    sees_weights = False

    def __init__(self, keeps_indices: bool) -> None:
        self._keeps_indices = keeps_indices

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
        if self._keeps_indices:
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
