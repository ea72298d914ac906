"""Translation of Lightning's callbacks.

Most callbacks, Lightning's and users', only use hooks and public attributes of the trainer: they run unchanged. Some of
Lightning's own callbacks read Lightning's loops: `callback_classes.py` replaces those methods. Callbacks that drive
Lightning's loops are refused, with what to use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate import callbacks as ours
from footplate.compat.lightning._class_between import is_lightning, lightning_classes
from footplate.compat.lightning.callback_classes import replace_methods
from footplate.core.errors import ConfigError
from footplate.data.order.sharding import share_rows
from footplate.distributed.world import World

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

REFUSED_CALLBACKS = {
    "ThroughputMonitor": "it reads Lightning's own loops. The progress display shows batches per second",
}


def translate_callbacks(callbacks: list[Any]) -> list[Any]:
    """Make Lightning's callbacks able to run here. The objects stay the same; callbacks of others are left alone.

    Raises:
        ConfigError: a callback that only works inside Lightning's loops.
    """
    translated = [_prepare(callback) if is_lightning(callback) else callback for callback in callbacks]
    writers = [callback for callback in callbacks if "BasePredictionWriter" in lightning_classes(callback)]
    if writers:
        translated.insert(0, PredictionCollector(any(writer.interval.on_epoch for writer in writers)))
    return translated


def _prepare(callback: Any) -> Any:
    for base in lightning_classes(callback):
        if base in REFUSED_CALLBACKS:
            raise ConfigError(f"Lightning's {type(callback).__name__} can't run here: {REFUSED_CALLBACKS[base]}.")
    replace_methods(callback)
    return callback


class PredictionCollector(ours.Callback):
    """Collects predictions and their row numbers, which Lightning's `BasePredictionWriter` reads from a prediction loop.

    Args:
        keeps_indices: True if a writer reads `epoch_batch_indices`.

    Attributes:
        predictions: the predictions of every batch so far; with several loaders, a list for each.
        current_batch_indices: the row numbers of the present batch; empty unless the loader reads rows in order.
        epoch_batch_indices: the row numbers of every batch so far, for each loader; empty if no writer reads them.
    """

    sees_weights = False

    def __init__(self, keeps_indices: bool) -> None:
        self._keeps_indices = keeps_indices

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        loaders = trainer.predict_dataloaders
        loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
        self._orders = [_order(loader, trainer.run.data_world) for loader in loaders]
        self._outputs: list[list[Any]] = [[] for _ in loaders]
        self.epoch_batch_indices: list[list[list[int]]] = [[] for _ in loaders]
        self.current_batch_indices: list[int] = []

    @property
    def predictions(self) -> list[Any]:
        return self._outputs[0] if len(self._outputs) == 1 else self._outputs

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        order = self._orders[dataloader_idx]
        self.current_batch_indices = order[batch_idx] if batch_idx < len(order) else []
        if self._keeps_indices:
            self.epoch_batch_indices[dataloader_idx].append(self.current_batch_indices)
        self._outputs[dataloader_idx].append(outputs)


def _order(loader: Any, world: World) -> list[list[int]]:
    """The row numbers of each batch of this rank, for a torch DataLoader that reads its data set in order; else empty."""
    from torch.utils.data import BatchSampler, SequentialSampler

    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(getattr(sampler, "sampler", None), SequentialSampler):
        return []
    if world.size == 1:
        return [list(rows) for rows in sampler]  # type: ignore[union-attr]
    if type(sampler) is not BatchSampler:
        return []
    order, size = list(sampler.sampler), sampler.batch_size * world.size
    shares = share_rows(order, size, sampler.drop_last, world.rank, world.size)
    return [share.rows for share in shares if share.weight]
