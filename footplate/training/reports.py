"""Reports: the latest metrics of a run, and the rows that loggers receive.

Metrics come in through `publish`, `step` and `log_now`, and wait in one row. `send` hands the row to the loggers, so that
everything that belongs to one step is one row of their record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from footplate.core.device_scalar import DeviceScalar
from footplate.tracking.base import Logger
from footplate.training.metrics import READ_AFTER, MetricLog, Values, to_floats

log = logging.getLogger(__name__)


class Reports:
    """The latest metrics of a run.

    Attributes:
        callback: every metric by name, for callbacks and schedulers.
        logged: what loggers received last, by name.
        progress: what the progress display shows.
        not_finite: "the training loss" and the first step at which it was NaN or infinite. None while it is finite.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.callback: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.progress: dict[str, float] = {}
        self.not_finite: tuple[str, int] | None = None
        self._loggers = loggers
        self._row: dict[str, float] = {}
        self._losses: list[tuple[torch.Tensor | DeviceScalar, int]] = []

    def publish(self, values: Values, log: bool = True) -> None:
        """Add reduced metrics. With `log=False`, loggers don't receive them."""
        self.callback.update(values.callback)
        self.progress.update(values.progress)
        if log:
            self._row.update(values.logger)

    def step(self, metrics: MetricLog) -> None:
        """Read the latest value of every metric that is reported by step."""
        values = metrics.step_values(sync=True)
        self._row.update(values.logger)
        self.callback.update(values.callback)
        self.progress.update(values.progress)

    def log_now(self, values: dict[str, float]) -> None:
        """Add host floats that a callback has measured."""
        self._row.update(values)
        self.callback.update(values)

    def send(self, step: int, epoch: int) -> None:
        """Hand the collected row to the loggers."""
        if not self._row:
            return
        self.logged.update(self._row)
        for logger in self._loggers:
            logger.log_metrics(dict(self._row), step, epoch)
        self._row.clear()

    def note_loss(self, output: Any, step: int) -> None:
        """Keep the loss of a training step until the next read from the device."""
        loss = output if type(output) is torch.Tensor else output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, DeviceScalar) or (isinstance(loss, torch.Tensor) and loss.ndim == 0):
            self._losses.append((loss, step))
            if len(self._losses) >= READ_AFTER:
                self.check_finite()

    def check_finite(self) -> None:
        """Read the losses since the last check, and record the first that is NaN or infinite."""
        losses, self._losses = self._losses, []
        values = to_floats(loss for loss, _ in losses)
        if math.isfinite(sum(values)):
            return
        first = next((step for value, (_, step) in zip(values, losses, strict=True) if not math.isfinite(value)), None)
        if first is not None and self.not_finite is None:
            self.not_finite = ("the training loss", first)
            log.warning("The training loss became NaN or infinite, first at step %d.", first)

    def forget(self) -> None:
        """Forget all values. Those of the sanity check are not reported."""
        for kept in (self.callback, self.logged, self.progress, self._row):
            kept.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `callback` as tensors, the form of `trainer.callback_metrics`."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.callback.items()}


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that are finite, which JSON can hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
