"""The measurements of a trial's metric, from the files that its attempts wrote.

    attempt-N/reports.jsonl    by a Footplate trainer: each value of the metric that it logs (`training/trial.py`)
    attempt-N/hypertune.jsonl  by `cloudml-hypertune`: the last 100 values that the program reported

If an attempt has both, the second counts, since the program reports on purpose.

A later attempt continues from a checkpoint, so what an earlier attempt reported after that checkpoint doesn't count any
more. A trainer records the step from which it continues. For another program, that is the step of its next report. Inside
an attempt, a step that is smaller than the one before begins another training, such as the next fold: then the earlier
training doesn't count.

A trainer also records when a training begins and when it has reached its end. A tuning doesn't stop or pause a trial that
has trained to its end. That doesn't count any more if a later attempt continues from an earlier step, or trains again.

The result of a trial is its last measurement, not its best, as on AI Platform and Vertex AI (LAST_MEASUREMENT).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from footplate.jobs.home import Home
from footplate.jobs.tuning.report_lines import HYPERTUNE, TRAINER

Measurement = tuple[float, float]
"""The step and the value of a report."""

TrainingEvent = tuple[str, float]
"""A training "begins", "continues" or "ends" at a step."""


@dataclass(frozen=True)
class TrialCheckpoint:
    """A complete checkpoint of a trial. It may have been deleted since.

    Attributes:
        step: its step.
        path: its directory.
    """

    step: float
    path: Path


@dataclass(frozen=True)
class Reports:
    """The reports of one attempt.

    Attributes:
        events: measurements, and the steps from which trainers continued.
        names: the metrics that a trainer logged instead, if it never logged the metric.
        is_whole: False if `cloudml-hypertune` wrote them, which keeps the last 100.
        trainings: where trainings of a trainer begin, continue and end.
        checkpoint: the newest checkpoint of a trainer; None without one.
    """

    events: Sequence[Measurement | float] = ()
    names: frozenset[str] = field(default_factory=frozenset)
    is_whole: bool = True
    trainings: Sequence[TrainingEvent] = ()
    checkpoint: TrialCheckpoint | None = None


@dataclass(frozen=True)
class Measurements:
    """The measurements of a trial.

    Attributes:
        series: in order.
        names: other metrics that its trainers logged.
        is_whole: False if earlier ones may be missing.
        has_trained: a trainer has trained to its end, and no other training has begun.
        checkpoint: the newest checkpoint of a trainer; None without one.
    """

    series: tuple[Measurement, ...]
    names: tuple[str, ...]
    is_whole: bool
    has_trained: bool
    checkpoint: TrialCheckpoint | None


def measurements_of(home: Home, job: str, attempts: int, metric: str) -> Measurements:
    """Read the measurements of a trial.

    Args:
        home: the home of its job.
        job: the name of its job.
        attempts: the number of attempts so far.
        metric: the metric's name.
    """
    reports = [read_reports(home.attempt(job, number), metric) for number in range(1, attempts + 1)]
    names = frozenset().union(*(each.names for each in reports))
    return Measurements(
        series(each.events for each in reports),
        tuple(sorted(names)),
        all(each.is_whole for each in reports),
        has_trained(each.trainings for each in reports),
        next((each.checkpoint for each in reversed(reports) if each.checkpoint is not None), None),
    )


def series(attempts: Iterable[Sequence[Measurement | float]]) -> tuple[Measurement, ...]:
    """Join the events of attempts to one series of measurements, with increasing steps.

    >>> series([[(10.0, 0.5), (20.0, 0.6), (30.0, 0.9)], [20.0, (30.0, 0.7)]])
    ((10.0, 0.5), (20.0, 0.6), (30.0, 0.7))
    """
    result: list[Measurement] = []
    for events in attempts:
        is_first = True
        for event in events:
            if not isinstance(event, tuple):
                # A trainer continues from this step.
                result = [each for each in result if each[0] <= event]
            else:
                if is_first:
                    result = [each for each in result if each[0] < event[0]]
                elif result and event[0] < result[-1][0]:
                    result = []
                if result and result[-1][0] == event[0]:
                    # The evaluation at the end repeats the step of the training.
                    result.pop()
                result.append(event)
            is_first = False
    return tuple(result)


def has_trained(attempts: Iterable[Sequence[TrainingEvent]]) -> bool:
    """Return True if the last training has reached its end, and no later attempt has rolled that back.

    >>> has_trained([[("begins", 0.0), ("ends", 90.0)], [("continues", 90.0)]])
    True
    >>> has_trained([[("begins", 0.0), ("ends", 90.0)], [("continues", 60.0)]])
    False
    """
    ended_at: float | None = None
    for kind, step in itertools.chain.from_iterable(attempts):
        if kind == "ends":
            ended_at = step
        elif kind == "begins" or (ended_at is not None and step < ended_at):
            ended_at = None
    return ended_at is not None


def read_reports(folder: Path, metric: str) -> Reports:
    """Read the reports of an attempt from its folder."""
    reported = [
        (step, value)
        for line in _lines(folder / HYPERTUNE)
        if (step := _number(line.get("global_step", 0))) is not None
        and (value := _number(line.get(metric))) is not None
    ]
    events: list[Measurement | float] = []
    names: set[str] = set()
    trainings: list[TrainingEvent] = []
    checkpoint: TrialCheckpoint | None = None
    for line in _lines(folder / TRAINER):
        step, value = _number(line.get("step")), _number(line.get("value"))
        if isinstance(line.get("logged"), list):
            names.update(map(str, line["logged"]))
        elif step is not None and "checkpoint" in line:
            checkpoint = TrialCheckpoint(step, Path(str(line["checkpoint"])))
        elif step is not None and "training" in line:
            trainings.append((str(line["training"]), step))
        elif step is not None and value is None:
            trainings.append(("continues", step))
            events.append(step)
        elif step is not None and value is not None:
            events.append((step, value))
    if reported:
        return Reports(reported, is_whole=False, trainings=trainings, checkpoint=checkpoint)
    return Reports(events, frozenset(names), trainings=trainings, checkpoint=checkpoint)


def is_finite(measurement: Measurement) -> bool:
    """Return True if the value is neither NaN nor infinite."""
    return math.isfinite(measurement[1])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file of JSON objects. Its program may write it now, or may have been killed while it did."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n")[:-1]:
        with suppress(ValueError, RecursionError):
            if isinstance(parsed := json.loads(line), dict):
                yield parsed


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        return float(value)
    return None
