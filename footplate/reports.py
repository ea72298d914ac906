"""Reports: what is known of the metrics at this moment, and what the loggers are told.

Reduced and read values come in through `publish`, `step` and `log_now`, wait in one row, and leave for the loggers
together (`send`), so that what belongs to one step is one row of the record.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from footplate.metrics import MetricLog, Values, to_floats
from footplate.tracking.base import Logger

log = logging.getLogger(__name__)


class Reports:
    """The latest metrics of a run.

    Attributes:
        callback: every metric by name, for callbacks and schedulers.
        logged: what loggers were told last, by name.
        progress: what the progress display shows.
        outputs: what training steps returned since the losses were last read.
        not_finite: "the training loss" and the first step at which it was NaN or infinite; None as long as all is well.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.callback: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.progress: dict[str, float] = {}
        self.not_finite: tuple[str, int] | None = None
        self._loggers = loggers
        self._row: dict[str, float] = {}
        self.outputs: list[Any] = []

    def publish(self, values: Values, log: bool = True) -> None:
        """Take in reduced metrics; `log=False` keeps them from the loggers."""
        self.callback.update(values.callback)
        self.progress.update(values.progress)
        if log:
            self._row.update(values.logger)

    def step(self, metrics: MetricLog) -> None:
        """Read the latest value of what is reported by step."""
        values = metrics.step_values()
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

    def check_finite(self, global_step: int, batches_per_step: int) -> None:
        """Read the losses since the last look, and note the first that is no number."""
        given = [output["loss"] if type(output) is dict else output for output in self.outputs]
        losses = to_floats(given, "the training loss")
        self.outputs.clear()
        if self.not_finite is not None or all(map(math.isfinite, losses)):
            return
        after = len(losses) - 1 - next(i for i, value in enumerate(losses) if not math.isfinite(value))
        step = max(1, global_step - after // batches_per_step)
        self.not_finite = ("the training loss", step)
        log.warning("The training loss became NaN or infinite, first at step %d.", step)

    def forget(self) -> None:
        """Forget all values: those of the sanity check are nobody's business."""
        for kept in (self.callback, self.logged, self.progress, self._row):
            kept.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """`callback` as tensors, which is what callbacks written for Lightning expect."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.callback.items()}
