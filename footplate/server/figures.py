"""Recorded figures as curves: the metrics of a `CSV` logger, and the job's use of its machine.

A trainer writes `metrics.csv` into its run's directory, which by default is the job directory. Lightning's CSV logger
writes a file of the same form some directories below (`jobs/run_files.py`). Only numbers are read from these files.

The supervisor writes `usage.csv` (`jobs/backends/local/usage.py`).

A curve of more than `POINTS` points is thinned: the least and the greatest value of each section stay, so spikes stay
visible.
"""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from footplate.jobs.backends.local import machine
from footplate.jobs.backends.local.usage import NAME as USAGE
from footplate.jobs.execution import BUCKETS
from footplate.jobs.home import Home
from footplate.jobs.record import Job
from footplate.jobs.redaction import Mask
from footplate.jobs.run_files import files_below
from footplate.server.models import Figure, Figures, Series
from footplate.server.time_figures import time_figures

POINTS = 600
METRICS = "metrics.csv"

# Of a file with more bytes, only the header and the end are read.
LARGEST = 32 * 2**20
_FILES = 8
_STAGES = ("train_", "val_", "validation_", "test_", "train/", "val/", "test/")
_X = ("step", "epoch", "time")
_UNMEASURED = "There are no measurements of the devices yet. They begin a second after the processes."
_ELSEWHERE = "Only devices of this machine are measured, and the job's processes run elsewhere."

Points = list[tuple[float, float | None]]


def figures(job: Job, home: Home, mask: Mask) -> Figures:
    """Collect all recorded figures of a job."""
    if job.host != machine.host():
        note = f"The job runs on {job.host}, and its figures are recorded there."
        return Figures(
            training=[], training_note=note, time=[], time_note=note, advice=[], remaining_seconds=None,
            devices=[], devices_note=note,
        )  # fmt: skip
    training, note = _training(job, mask)
    times = time_figures(job)
    devices, began = _devices(job, home, times.began)
    return Figures(
        training=training,
        training_note=mask.text(note),
        time=times.figures(began, mask),
        time_note=mask.text(times.note),
        advice=times.advice(mask),
        remaining_seconds=times.remaining_s(job, time.time()),
        devices=devices,
        devices_note="" if devices else _UNMEASURED if job.backend == "local" else _ELSEWHERE,
    )


def _training(job: Job, mask: Mask) -> tuple[list[Figure], str]:
    job_dir = job.plan.get("job_dir")
    if not job_dir:
        return [], "The job has no job directory, so there are no metrics to find."
    if job_dir.startswith(BUCKETS):
        return [], f"The job directory is {job_dir}. Metrics are read only from directories of this machine."
    figures: list[Figure] = []
    for path in islice(sorted(files_below(Path(job_dir), METRICS, job.created)), _FILES):
        run = path.parent.relative_to(job_dir).as_posix()
        figures += of_metrics(mask.text(_text(path)), "" if run == "." else mask.text(run))
    if not figures:
        return (
            [],
            f"There is no metrics.csv of this job in {job_dir} yet. A Trainer writes it when it first logs a metric.",
        )
    return figures, ""


def of_metrics(text: str, run: str = "") -> list[Figure]:
    """Make figures of a metrics.csv. Metrics that differ only in their stage (train_loss, val_loss) share a figure."""
    header, rows = _table(text)
    if "step" not in header:
        return []
    step = header.index("step")
    groups: dict[str, list[Series]] = {}
    for column, name in enumerate(header):
        if name in _X or not name:
            continue
        points = [(x, _number(row[column])) for row in rows if row[column] and (x := _number(row[step])) is not None]
        if points:
            groups.setdefault(_without_stage(name), []).append(_series(name, points))

    # Losses come first, then figures with several curves.
    order = sorted(groups, key=lambda name: ("loss" not in name.lower(), len(groups[name]) == 1, name))
    return [Figure(title=f"{name} · {run}" if run else name, unit="", x="step", series=groups[name]) for name in order]


def of_usage(text: str, began: float) -> dict[tuple[str, str], tuple[str, Points]]:
    """Make curves of a usage.csv, by figure and name: the unit, and the points, in seconds since `began`."""
    header, rows = _table(text)
    if header[:1] != ["time"]:
        return {}
    curves: dict[tuple[str, str], tuple[str, Points]] = {}
    for column, name in enumerate(header[1:], start=1):
        device, _, quantity = name.partition("_")
        key, unit = {
            "cpus": (("Processor", "cores"), "cores"),
            "memory_bytes": (("Memory", "memory"), "bytes"),
        }.get(
            name,
            (("GPU use" if quantity == "busy" else "GPU memory", device), "share" if quantity == "busy" else "bytes"),
        )
        points = [(x - began, _number(row[column])) for row in rows if (x := _number(row[0])) is not None]
        curves[key] = (unit, points)
    return curves


def _devices(job: Job, home: Home, trained: float | None) -> tuple[list[Figure], float]:
    """Make figures of all attempts, one after the other on the same time axis, and return its zero in epoch seconds.

    Args:
        job: the job.
        home: the home of the jobs.
        trained: when the first training began, in seconds since the epoch; None if there is no record of it.
    """
    curves: dict[tuple[str, str], tuple[str, Points]] = {}
    began: float | None = None
    for attempt in range(1, job.attempt + 1):
        path = home.attempt(job.name, attempt) / USAGE
        if not path.exists():
            continue
        text = _text(path)
        rows = _table(text)[1]
        if began is None:
            first = [] if not rows else [value for value in (_number(rows[0][0]), trained) if value is not None]
            began = min(first, default=None)
        for key, (unit, points) in of_usage(text, began or 0.0).items():
            curve = curves.setdefault(key, (unit, []))[1]

            # No process ran between two attempts, so the curve has a gap there.
            if curve and points:
                curve.append((points[0][0], None))
            curve.extend(points)

    drawn: dict[str, list[Series]] = {}
    units: dict[str, Any] = {}
    for (title, name), (unit, points) in curves.items():
        drawn.setdefault(title, []).append(_series(name, points))
        units.setdefault(title, unit)
    figures = [Figure(title=title, unit=units[title], x="seconds", series=series) for title, series in drawn.items()]
    return figures, trained or 0.0 if began is None else began


def thin(points: Points, most: int = POINTS) -> Points:
    """Thin a curve to about `most` points: the least and the greatest value of each section.

    >>> thin([(0, 1.0), (1, 9.0), (2, 2.0), (3, 0.0)], most=2)
    [(1, 9.0), (3, 0.0)]
    """
    if len(points) <= most:
        return points
    length = math.ceil(len(points) / max(1, most // 2))
    kept: Points = []
    for start in range(0, len(points), length):
        section = points[start : start + length]
        chosen = set([point for point in section if point[1] is None][:1])
        numbers = [point for point in section if point[1] is not None]
        if numbers:
            # No value is None here, which pyright can't see.
            chosen |= {min(numbers, key=_value), max(numbers, key=_value)}
        kept += sorted(chosen, key=section.index)
    return kept


def _value(point: tuple[float, float | None]) -> Any:
    return point[1]


def _series(name: str, points: Points) -> Series:
    kept = thin(points)
    return Series(name=name, x=[x for x, _ in kept], y=[y for _, y in kept])


def _without_stage(name: str) -> str:
    """Remove the stage from a metric's name."""
    lower = name.lower()
    stage = next((prefix for prefix in _STAGES if lower.startswith(prefix)), "")
    return name[len(stage) :].removesuffix("_step").removesuffix("_epoch") or name


def _text(path: Path) -> str:
    """Read a file of numbers: the header and the end if it is too large, and nothing if it can't be read."""
    # The job may have deleted the file, or another user may own it.
    try:
        file = path.open("rb")
    except OSError:
        return ""
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= LARGEST:
            return file.read().decode("utf-8", "replace")
        head = file.readline(1 << 16)
        file.seek(size - LARGEST)
        file.readline()
        return (head + file.read()).decode("utf-8", "replace")


def _table(text: str) -> tuple[list[str], list[Sequence[str]]]:
    """Parse header and rows, without an incomplete last line, and without rows of another length than the header."""
    try:
        header, *rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))) or [[]]
    except csv.Error:
        return [], []
    return header, [row for row in rows if len(row) == len(header)]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
