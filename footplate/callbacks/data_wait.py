"""Log the share of time in which training waits for data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from footplate.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class DataWaitMonitor(Callback):
    """Log `data_wait`: the share (0 … 1) of the time in which the device waited for data.

    The share is of the time since the last report. The device waits if it is idle until the next batch comes.

    Near 0, the data keeps up. Near 1, a faster device gains nothing. The value is logged with the metrics of a step and of
    an epoch. Validation doesn't count. With several processes, it is the value of the first process. On CUDA, a wait
    doesn't count if the GPU still has work when the wait ends. Every other wait counts fully, including the time in which
    the GPU finished earlier work.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, callbacks=[fp.DataWaitMonitor()])
        >>> trainer.fit(model, train)
        >>> 0 <= trainer.logged_metrics["data_wait"] <= 1
        True
    """

    sees_weights = False

    def __init__(self) -> None:
        # Times in seconds, monotonic: of the last report, and of the start of validation.
        self._since = self._paused = 0.0
        # Seconds waited up to the last report.
        self._waited = 0.0
        self._batches = -1

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._waited, self._batches, self._since = trainer.data_wait_s, trainer.progress.batches, time.perf_counter()

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
        now, waited = time.perf_counter(), trainer.data_wait_s
        trainer.log_now({"data_wait": (waited - self._waited) / max(now - self._since, 1e-9)})
        self._since, self._waited, self._batches = now, waited, trainer.progress.batches
