"""The measurements of a trial's metric, from the files that its attempts wrote.

    attempt-N/reports.jsonl    by a Footplate trainer: each value of the metric that it logs (`training/trial.py`)
    attempt-N/hypertune.jsonl  by `cloudml-hypertune`: the last 100 values that the program reported

If an attempt has both, the second counts, since the program reports on purpose.

A later attempt continues from a checkpoint, so what an earlier attempt reported after that checkpoint doesn't count any
more. A trainer records the step from which it continues. For another program, that is the step of its next report. Inside
an attempt, a step that is smaller than the one before begins another training, such as the next fold: then the earlier
training doesn't count.

The result of a trial is its last measurement, not its best, as on AI Platform and Vertex AI (LAST_MEASUREMENT).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from footplate.jobs.home import Home

TRAINER, HYPERTUNE = "reports.jsonl", "hypertune.jsonl"

Measurement = tuple[float, float]
"""The step and the value of a report."""


@dataclass(frozen=True)
class Reports:
    """The reports of one attempt.

    Attributes:
        events: measurements, and the steps from which trainers continued.
        names: the metrics that a trainer logged instead, if it never logged the metric.
        is_whole: False if `cloudml-hypertune` wrote them, which keeps the last 100.
    """

    events: Sequence[Measurement | float] = ()
    names: frozenset[str] = field(default_factory=frozenset)
    is_whole: bool = True


@dataclass(frozen=True)
class Measurements:
    """The measurements of a trial.

    Attributes:
        series: in order.
        names: other metrics that its trainers logged.
        is_whole: False if earlier ones may be missing.
    """

    series: tuple[Measurement, ...]
    names: tuple[str, ...]
    is_whole: bool


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
        series(each.events for each in reports), tuple(sorted(names)), all(each.is_whole for each in reports)
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


def read_reports(folder: Path, metric: str) -> Reports:
    """Read the reports of an attempt from its folder."""
    reported = [
        (step, value)
        for line in _lines(folder / HYPERTUNE)
        if (step := _number(line.get("global_step", 0))) is not None
        and (value := _number(line.get(metric))) is not None
    ]
    if reported:
        return Reports(reported, is_whole=False)
    events: list[Measurement | float] = []
    names: set[str] = set()
    for line in _lines(folder / TRAINER):
        step, value = _number(line.get("step")), _number(line.get("value"))
        if isinstance(line.get("logged"), list):
            names.update(map(str, line["logged"]))
        elif step is not None:
            events.append(step if value is None else (step, value))
    return Reports(events, frozenset(names))


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
