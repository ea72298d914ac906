"""Log for how much of the time training stands still for want of a batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from footplate.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class DataWaitMonitor(Callback):
    """Send `data_wait` to the loggers: the share (0 … 1) of the time since the last report in which the device had nothing
    to do, since the next batch was not there.

    Near 0, the data keeps up; near 1, a faster device would gain nothing. It goes with the metrics of a step, and with
    those of an epoch; validation doesn't count. With several processes it is that of the first. On CUDA, a wait at whose
    end the GPU still has work isn't counted; any other counts whole, with what the GPU had left to do at its beginning.
    """

    sees_weights = False

    def __init__(self) -> None:
        self._since = self._paused = 0.0  # s, monotonic
        self._waited = 0.0  # s, when it was logged last
        self._batches = -1

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        trainer.data_wait_s = 0.0
        self._waited, self._batches, self._since = 0.0, trainer.progress.batches, time.perf_counter()

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.logs_this_step:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.progress.batches != self._batches:
            self._log(trainer)

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._since += time.perf_counter() - self._paused

    def _log(self, trainer: TrainerView) -> None:
        now, waited = time.perf_counter(), trainer.data_wait_s or 0.0
        trainer.log_now({"data_wait": (waited - self._waited) / max(now - self._since, 1e-9)})
        self._since, self._waited, self._batches = now, waited, trainer.progress.batches
