"""The trial of a tuning that a trainer runs in (`footplate/jobs/tuning`), read from the variables of the trial's processes.

`FOOTPLATE_TRIAL_METRIC` names the metric that is tuned, and `FOOTPLATE_TRIAL_REPORTS` a file for its values. A trainer
writes each value of the metric that its loggers get, whatever these loggers are:

    {"step": 20, "logged": ["train_loss"]}     the metrics of the first rows, until the metric is among them
    {"step": 40, "value": 0.81}
    {"step": 30, "value": null}                it continues from a checkpoint of step 30

Each attempt has its own file. So a value that a rolled-back attempt logged is known to be rolled back.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from footplate.tracking.base import Logger
from footplate.tracking.file_moves import append_whole

log = logging.getLogger(__name__)


class TrialReports(Logger):
    """Writes the values of the metric that a tuning optimises.

    Args:
        path: the file.
        metric: the metric's name.
    """

    name = "trial"
    logs_times = False

    def __init__(self, path: Path, metric: str) -> None:
        self._path = path
        self._metric = metric
        self._step = 0
        self._resumed: int | None = None
        # The metrics that were logged so far, until the tuned one is among them.
        self._logged: set[str] | None = set()

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        if self._resumed is not None:
            self._add({"step": self._resumed, "value": None})
            self._step, self._resumed = self._resumed, None

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Do nothing: the results are added to the file."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        self._step = self._step if step is None else step
        if self._metric in metrics:
            value = float(metrics[self._metric])
            # JSON has no NaN; `float` reads its text.
            self._add({"step": self._step, "value": value if math.isfinite(value) else str(value)})
            self._logged = None
        elif self._logged is not None and not self._logged.issuperset(metrics):
            self._logged.update(metrics)
            self._add({"step": self._step, "logged": sorted(metrics)})

    def state_dict(self) -> dict[str, Any]:
        """The step of the latest row."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step up to which the values of earlier attempts count."""
        self._resumed = int(state["step"])

    def _add(self, line: dict[str, Any]) -> None:
        try:
            append_whole(self._path, (json.dumps(line) + "\n").encode())
        except OSError as error:
            log.warning("The result of this trial can't be written to %s: %s", self._path, error)


def trial_loggers() -> list[Logger]:
    """The logger of a trainer in a trial; none elsewhere."""
    path, metric = os.environ.get("FOOTPLATE_TRIAL_REPORTS"), os.environ.get("FOOTPLATE_TRIAL_METRIC")
    return [TrialReports(Path(path), metric)] if path and metric else []
