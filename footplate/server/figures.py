"""What runs have recorded, as curves: the metrics of a `CSV` logger, and how busy the job kept its machine.

A trainer leaves `metrics.csv` in its run's directory, which is the job's unless the program says otherwise; Lightning's
CSV logger one of the same form a few directories below. They are looked for below the job's directory, `DEPTH` levels
deep; files that are older than the job are another's. Nothing that isn't a number is read of them.

`usage.csv` is the supervisor's (`jobs/backends/local/usage.py`).

A curve of more than `POINTS` points is thinned: of each stretch the least and the greatest value stay, so a spike does
too.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from footplate.jobs.backends.local import machine
from footplate.jobs.backends.local.usage import NAME as USAGE
from footplate.jobs.execution import BUCKETS
from footplate.jobs.home import Home
from footplate.jobs.record import Job
from footplate.jobs.redaction import Mask
from footplate.server.models import Figure, Figures, Series

POINTS = 600
DEPTH = 4
LARGEST = 32 * 2**20  # bytes of a file; of a larger one, the end
_FILES = 8
_DIRECTORIES = 2_000
_STAGES = ("train_", "val_", "validation_", "test_", "train/", "val/", "test/")
_X = ("step", "epoch", "time")
_UNMEASURED = "Nothing has been measured of the devices yet: that begins a second after the processes do."
_ELSEWHERE = "Devices are measured on this machine alone, and the job's processes are elsewhere."

Points = list[tuple[float, float | None]]


def figures(job: Job, home: Home, mask: Mask) -> Figures:
    """All that has been recorded of a job."""
    if job.host != machine.host():
        note = f"The job runs on {job.host}: what it has recorded is there."
        return Figures(training=[], training_note=note, devices=[], devices_note=note)
    training, note = _training(job, mask)
    devices = _devices(job, home)
    return Figures(
        training=training,
        training_note=mask.text(note),
        devices=devices,
        devices_note="" if devices else _UNMEASURED if job.backend == "local" else _ELSEWHERE,
    )


def _training(job: Job, mask: Mask) -> tuple[list[Figure], str]:
    where = job.plan.get("job_dir")
    if not where:
        return [], "The job has no job directory, in which metrics would be looked for."
    if where.startswith(BUCKETS):
        return [], f"The job's directory is {where}: metrics are looked for on this machine alone."
    drawn: list[Figure] = []
    for path in islice(sorted(_metrics_files(Path(where), job.created)), _FILES):
        below = path.parent.relative_to(where).as_posix()
        drawn += of_metrics(mask.text(_text(path)), "" if below == "." else mask.text(below))
    if not drawn:
        return [], f"No metrics.csv of this job in {where} yet. A Trainer writes one as soon as it logs something."
    return drawn, ""


def of_metrics(text: str, run: str = "") -> list[Figure]:
    """The curves of a metrics.csv; metrics that differ in their stage alone, as train_loss and val_loss, share a figure."""
    header, rows = _table(text)
    if "step" not in header:
        return []
    at = header.index("step")
    together: dict[str, list[Series]] = {}
    for column, name in enumerate(header):
        if name in _X or not name:
            continue
        points = [(x, _number(row[column])) for row in rows if row[column] and (x := _number(row[at])) is not None]
        if points:
            together.setdefault(_subject(name), []).append(_series(name, points))
    order = sorted(together, key=lambda name: ("loss" not in name.lower(), len(together[name]) == 1, name))
    return [
        Figure(title=f"{name} · {run}" if run else name, unit="", x="step", series=together[name]) for name in order
    ]


def of_usage(text: str, began: float) -> dict[tuple[str, str], tuple[str, Points]]:
    """The curves of a usage.csv, by figure and name: the unit, and the points, in seconds since `began`."""
    header, rows = _table(text)
    if header[:1] != ["time"]:
        return {}
    found: dict[tuple[str, str], tuple[str, Points]] = {}
    for column, name in enumerate(header[1:], start=1):
        device, _, what = name.partition("_")
        key, unit = {
            "cpus": (("Processor", "cores"), "cores"),
            "memory_bytes": (("Memory", "memory"), "bytes"),
        }.get(name, (("GPU use" if what == "busy" else "GPU memory", device), "share" if what == "busy" else "bytes"))
        points = [(x - began, _number(row[column])) for row in rows if (x := _number(row[0])) is not None]
        found[key] = (unit, points)
    return found


def _devices(job: Job, home: Home) -> list[Figure]:
    """Figures of all attempts, one after the other along the same time."""
    curves: dict[tuple[str, str], tuple[str, Points]] = {}
    began: float | None = None
    for attempt in range(1, job.attempt + 1):
        path = home.attempt(job.name, attempt) / USAGE
        if not path.exists():
            continue
        text = _text(path)
        rows = _table(text)[1]
        began = began if began is not None else (_number(rows[0][0]) if rows else None)
        for key, (unit, points) in of_usage(text, began or 0.0).items():
            before = curves.setdefault(key, (unit, []))[1]
            if before and points:
                before.append((points[0][0], None))  # between two attempts nothing ran: the curve is cut there
            before.extend(points)
    titles = list(dict.fromkeys(title for title, _ in curves))
    return [
        Figure(
            title=title,
            unit=next(unit for (one, _), (unit, _) in curves.items() if one == title),  # pyright: ignore[reportArgumentType]
            x="seconds",
            series=[_series(name, points) for (one, name), (_, points) in curves.items() if one == title],
        )
        for title in titles
    ]


def thin(points: Points, most: int = POINTS) -> Points:
    """At most about `most` points, with the least and the greatest of each stretch of them.

    >>> thin([(0, 1.0), (1, 9.0), (2, 2.0), (3, 0.0)], most=2)
    [(1, 9.0), (3, 0.0)]
    """
    if len(points) <= most:
        return points
    length = math.ceil(len(points) / max(1, most // 2))
    kept: Points = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        chosen = set([point for point in stretch if point[1] is None][:1])
        numbers = [point for point in stretch if point[1] is not None]
        if numbers:
            chosen |= {min(numbers, key=lambda one: one[1]), max(numbers, key=lambda one: one[1])}  # pyright: ignore
        kept += sorted(chosen, key=stretch.index)
    return kept


def _series(name: str, points: Points) -> Series:
    kept = thin(points)
    return Series(name=name, x=[x for x, _ in kept], y=[y for _, y in kept])


def _subject(name: str) -> str:
    """What a metric is about, whatever stage it is of."""
    lower = name.lower()
    stage = next((one for one in _STAGES if lower.startswith(one)), "")
    return name[len(stage) :].removesuffix("_step").removesuffix("_epoch") or name


def _metrics_files(root: Path, since: float) -> Iterator[Path]:
    """Every metrics.csv at most so deep below a directory that is of a later time, without following links."""
    looked = 0
    level = [root]
    for _ in range(DEPTH):
        below: list[Path] = []
        for directory in level:
            looked += 1
            if looked > _DIRECTORIES:
                return
            try:
                entries = sorted(os.scandir(directory), key=lambda one: one.name)
            except OSError:
                continue
            for entry in entries:
                if entry.name == "metrics.csv" and _is_of(entry, since):
                    yield directory / entry.name
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    below.append(directory / entry.name)
        level = below


def _is_of(entry: os.DirEntry[str], since: float) -> bool:
    with suppress(FileNotFoundError):
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime >= since
    return False


def _text(path: Path) -> str:
    """A file of numbers; of one that is too large its head and its end; nothing of one that can't be read."""
    try:
        file = path.open("rb")
    except OSError:  # deleted meanwhile, or somebody else's
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
    """Header and rows, without a last line that has no end, or rows that are not like the header."""
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
