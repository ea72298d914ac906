"""The trial of a tuning that a trainer runs in (`footplate/jobs/tuning`), read from the variables of the trial's processes.

`FOOTPLATE_TRIAL_METRIC` names the metric that is tuned, and `FOOTPLATE_TRIAL_REPORTS` a file for its values. A trainer
writes each value of the metric that its loggers get, whatever these loggers are:

    {"step": 20, "logged": ["train_loss"]}     the metrics of the first rows, until the metric is among them
    {"step": 40, "value": 0.81}
    {"step": 30, "value": null}                it continues from a checkpoint of step 30
    {"step": 60, "checkpoint": "/runs/…"}      a checkpoint of step 60 is complete, and training goes on from there
    {"step": 0, "training": "begins"}          a training begins at its first step
    {"step": 90, "training": "ends"}           a training has reached its end

A trial may begin from the checkpoint of another training. A value at the step of that checkpoint is one of that training,
and isn't reported.

Each attempt has its own file. So a value that a rolled-back attempt logged is known to be rolled back.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from footplate.checkpoint import examine
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
        # The step up to which another training has trained.
        self._origin: int | None = None
        self._has_trained: Callable[[], bool] = bool
        # The metrics that were logged so far, until the tuned one is among them.
        self._logged: set[str] | None = set()

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        if self._resumed is not None:
            self._add({"step": self._resumed, "value": None})
            self._step, self._resumed = self._resumed, None
        else:
            self._add({"step": self._step, "training": "begins"})

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Do nothing: the results are added to the file."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        self._step = self._step if step is None else step
        if self._origin is not None and self._step <= self._origin:
            return
        if self._metric in metrics:
            value = float(metrics[self._metric])
            # JSON has no NaN; `float` reads its text.
            self._add({"step": self._step, "value": value if math.isfinite(value) else str(value)})
            self._logged = None
        elif self._logged is not None and not self._logged.issuperset(metrics):
            self._logged.update(metrics)
            self._add({"step": self._step, "logged": sorted(metrics)})

    def log_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        """Write where a checkpoint is, from which another trial may begin. Called in the thread that has written it."""
        meta, fault = examine(path)
        # If training has ended only since that checkpoint, the next one isn't missed: there is none.
        if not fault and not meta.get("weights_only") and not self._has_trained():
            self._add({"step": meta["global_step"], "checkpoint": str(path.absolute())})

    def log_model(self, trainer: Any) -> None:
        """Write that the training has reached its end. From then on, its tuning lets the program end by itself."""
        self._add({"step": self._step, "training": "ends"})

    def state_dict(self) -> dict[str, Any]:
        """The step of the latest row, and that of the checkpoint from which the trial began."""
        return {"step": self._step, "origin": self._origin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step up to which the values of earlier attempts count."""
        self._resumed = int(state["step"])
        self._origin = state.get("origin")

    def watch(self, has_trained: Callable[[], bool]) -> None:
        """Take the function that returns True if no batch is left to train."""
        self._has_trained = has_trained

    def begin_at(self, step: int) -> None:
        """Begin at a step that another training has made."""
        self._step = self._origin = step

    def _add(self, line: dict[str, Any]) -> None:
        try:
            append_whole(self._path, (json.dumps(line) + "\n").encode())
        except OSError as error:
            log.warning("The result of this trial can't be written to %s: %s", self._path, error)


def trial_loggers() -> list[Logger]:
    """The logger of a trainer in a trial; none elsewhere."""
    path, metric = os.environ.get("FOOTPLATE_TRIAL_REPORTS"), os.environ.get("FOOTPLATE_TRIAL_METRIC")
    return [TrialReports(Path(path), metric)] if path and metric else []
