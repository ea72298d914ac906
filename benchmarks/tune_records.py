"""Records of the trials of `tune.py`, and the figures that follow from them.

All processes of a tuning append to one file, a line for each event. Each line is one write. The times are seconds since the
epoch, of one machine's clock.

    chosen      the tuner has decided to start the trial with certain hyperparameters
    given       the trial has a device: a process for it is being started, or a process that waits gets it
    began       the first line of the user's training function. A trial that was paused begins again
    score       the score after an epoch
    released    the trial has given its device back
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RECORDS = "records"

Event = Literal["chosen", "given", "began", "score", "released"]


@dataclass(frozen=True)
class Record:
    """An event of a trial. Only a score has a value."""

    trial: int
    event: Event
    at: float
    value: float = math.nan


def write(place: Path, trial: int, event: Event, value: float = math.nan, at: float | None = None) -> None:
    """Append a record to the file in a directory. By default, it happens now."""
    line = f"{trial} {event} {time.time() if at is None else at!r} {value!r}\n"
    file = os.open(place / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode())
    os.close(file)


def read(place: Path) -> list[Record]:
    """All records so far, in the order of their times."""
    file = place / RECORDS
    words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    records = [Record(int(trial), event, float(at), float(value)) for trial, event, at, value in words]  # type: ignore[arg-type]
    return sorted(records, key=lambda record: record.at)


def time_of_score(records: Sequence[Record], target: float) -> float | None:
    """The time when a trial first had a score; None if none had it."""
    return next((record.at for record in records if record.event == "score" and record.value >= target), None)


def figures(records: Sequence[Record], started: float, target: float) -> dict[str, float]:
    """The figures of a tuning until it reached a score, or until its end if it didn't.

    Args:
        records: of its trials.
        started: the time of its start.
        target: the score.
    """
    reached = time_of_score(records, target)
    until = records[-1].at if reached is None else reached
    before = [record for record in records if record.at <= until]
    return {
        "device_s": math.fsum(max(0.0, min(end, until) - begin) for begin, end in holds(records)),
        "wall_s": until - started,
        "trials": float(len({record.trial for record in before})),
        "epochs": float(sum(record.event == "score" for record in before)),
        "best": max((record.value for record in before if record.event == "score"), default=math.nan),
        "reached": float(reached is not None),
    }


def holds(records: Iterable[Record]) -> Iterator[tuple[float, float]]:
    """The times from which and until which trials held a device. A trial that never released it held it for ever."""
    given: dict[int, float] = {}
    for record in records:
        if record.event == "given":
            given[record.trial] = record.at
        elif record.event == "released" and record.trial in given:
            yield given.pop(record.trial), record.at
    yield from ((begin, math.inf) for begin in given.values())


def starts(records: Sequence[Record], after: int) -> list[float]:
    """Seconds from the decision to start a trial until the first line of its training function.

    Args:
        records: of the trials.
        after: leave out the first trials, as many as this.
    """
    chosen = {record.trial: record.at for record in records if record.event == "chosen"}
    began: dict[int, float] = {}
    for record in records:
        if record.event == "began":
            began.setdefault(record.trial, record.at)
    return [at - chosen[trial] for trial, at in began.items() if trial > after]
