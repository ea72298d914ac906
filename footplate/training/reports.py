"""Reports: what is known of the metrics at this moment, and what the loggers are told.

Reduced and read values come in through `publish`, `step` and `log_now`, wait in one row, and leave for the loggers
together (`send`), so that what belongs to one step is one row of the record.
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
        logged: what loggers were told last, by name.
        progress: what the progress display shows.
        not_finite: "the training loss" and the first step at which it was NaN or infinite; None as long as all is well.
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
        """Take in reduced metrics; `log=False` keeps them from the loggers."""
        self.callback.update(values.callback)
        self.progress.update(values.progress)
        if log:
            self._row.update(values.logger)

    def step(self, metrics: MetricLog) -> None:
        """Read the latest value of what is reported by step."""
        values = metrics.step_values(sync=True)
        self._row.update(values.logger)
        self.callback.update(values.callback)
        self.progress.update(values.progress)

    def log_now(self, values: dict[str, float]) -> None:
        """Take in host floats that a callback has measured itself."""
        self._row.update(values)
        self.callback.update(values)

    def send(self, step: int, epoch: int) -> None:
        """Hand the row that has gathered to the loggers."""
        if not self._row:
            return
        self.logged.update(self._row)
        for logger in self._loggers:
            logger.log_metrics(dict(self._row), step, epoch)
        self._row.clear()

    def note_loss(self, output: Any, step: int) -> None:
        """Keep the loss that a training step returned, until losses are read next."""
        loss = output if type(output) is torch.Tensor else output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, DeviceScalar) or (isinstance(loss, torch.Tensor) and loss.ndim == 0):
            self._losses.append((loss, step))
            if len(self._losses) >= READ_AFTER:
                self.check_finite()

    def check_finite(self) -> None:
        """Read the losses since the last look, and note the first that is no number."""
        losses, self._losses = self._losses, []
        values = to_floats(loss for loss, _ in losses)
        if math.isfinite(sum(values)):
            return
        first = next((step for value, (_, step) in zip(values, losses, strict=True) if not math.isfinite(value)), None)
        if first is not None and self.not_finite is None:
            self.not_finite = ("the training loss", first)
            log.warning("The training loss became NaN or infinite, first at step %d.", first)

    def forget(self) -> None:
        """Forget all values: those of the sanity check are nobody's business."""
        for kept in (self.callback, self.logged, self.progress, self._row):
            kept.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """`callback` as tensors, which is what callbacks written for Lightning expect."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.callback.items()}


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are numbers, which JSON can hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
