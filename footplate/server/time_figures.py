"""The monitor's record of a job's training as figures: its time by cause, its speed, its advice, and the time left.

A trainer writes `monitor.jsonl` into its run's directory (`core/goodput/monitor_file.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from footplate.core.goodput import NAME
from footplate.core.goodput.time_record import CAUSES, Part, Snapshot, TimeRecord
from footplate.jobs.goodput import runs_of
from footplate.jobs.record import Job
from footplate.jobs.redaction import Mask
from footplate.jobs.run_files import files_below
from footplate.jobs.states import State
from footplate.server.models import Figure, Series

_FILES = 8
_READERS = 64
_LABELS = {
    "optimizer": "optimizer step",
    "step": "rest of the step",
    "transfer": "transfer to the device",
    "input": "waiting for input",
    "checkpoint": "checkpoints",
    "callbacks": "hooks and callbacks",
}
_RATES = (("Samples per second", "samples"), ("Tokens per second", "tokens"), ("FLOPs per second", "flops"))


@dataclass(frozen=True)
class TimeFigures:
    """The figures of the records of a job. `note` explains why there are none.

    Attributes:
        records: the record of each run, with the run's directory below the job's.
        note: why there is no record.
    """

    records: tuple[tuple[str, Snapshot], ...]
    note: str

    @property
    def began(self) -> float | None:
        """The time at which the first training began, in seconds since the epoch."""
        return min((record.began for _, record in self.records if record.began is not None), default=None)

    def figures(self, began: float, mask: Mask) -> list[Figure]:
        """Make the figures, in seconds since `began`."""
        return [figure for run, record in self.records for figure in of_record(record, began, mask.text(run))]

    def advice(self, mask: Mask) -> list[str]:
        """The advice of all runs."""
        several = len(self.records) > 1
        return [
            mask.text(f"{run or '.'}: {text}" if several else text)
            for run, record in self.records
            for text in record.advice
        ]

    def remaining_s(self, job: Job, now: float) -> float | None:
        """The seconds until the training ends. None if the job doesn't run, or if several runs hide which is the last."""
        if job.state != State.RUNNING or len(self.records) != 1:
            return None
        return self.records[0][1].remaining_s(now)


def time_figures(job: Job) -> TimeFigures:
    """Read the records of a job's runs."""
    root, why = runs_of(job)
    if root is None:
        return TimeFigures((), why)
    records = []
    for path in islice(sorted(files_below(root, NAME, job.created)), _FILES):
        run = path.parent.relative_to(root).as_posix()
        record = _reader(path, job.created).snapshot()
        if record.parts or record.began is not None:
            records.append(("" if run == "." else run, record))
    note = f"There is no {NAME} of this job in {root} yet. A Trainer writes it about once a second while it trains."
    return TimeFigures(tuple(records), "" if any(record.parts for _, record in records) else note)


@functools.lru_cache(_READERS)
def _reader(path: Path, since: float) -> TimeRecord:
    # The page asks again and again: only new lines are read.
    return TimeRecord(path, since)


def of_record(record: Snapshot, began: float, run: str = "") -> list[Figure]:
    """Make the figures of a record: the time by cause as areas, and rates as curves."""
    parts = record.parts
    if not parts:
        return []
    suffix = f" · {run}" if run else ""
    totals = {cause: math.fsum(part.seconds.get(cause, 0.0) for part in parts) for cause in CAUSES}
    points = _points(parts)
    x = [round(time - began, 3) for time, _ in points]
    areas = [
        Series(
            name=_LABELS.get(cause, cause),
            x=x,
            y=[None if part is None else round(part.seconds.get(cause, 0.0) / part.wall_s, 5) for _, part in points],
            total=total,
            colour=CAUSES.index(cause),
        )
        for cause, total in totals.items()
        if total > 0.0
    ]
    made = [Figure(title=f"Time by cause{suffix}", kind="stacked", unit="share", x="seconds", series=areas)]
    for title, name in _RATES:
        values = [None if part is None else _rate(part, name) for _, part in points]
        if any(value is not None for value in values):
            series = Series(name=title.split()[0].lower() + "/s", x=x, y=values)
            made.append(Figure(title=f"{title}{suffix}", unit="rate", x="seconds", series=[series]))
    return made


def _rate(part: Part, name: str) -> float | None:
    value = getattr(part, name)
    return None if value is None else value / part.wall_s


def _points(parts: tuple[Part, ...]) -> list[tuple[float, Part | None]]:
    """Return the points of all curves: the end of each part, and the beginning of each session, with a gap before it."""
    points: list[tuple[float, Part | None]] = [(parts[0].ended - parts[0].wall_s, parts[0]), (parts[0].ended, parts[0])]
    for before, part in pairwise(parts):
        if part.session != before.session:
            start = max(before.ended, part.ended - part.wall_s)
            points += [(start, None), (start, part)]
        points.append((part.ended, part))
    return points
