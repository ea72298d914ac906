"""The metrics of a run, from `metrics.csv` or `metrics.jsonl`: one series of steps and values for each name.

A file may be cut off, still growing, or damaged. A line that can't be read is left out and counted.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("metrics.csv", "metrics.jsonl")
_POSITION = ("step", "epoch", "time")


@dataclass(frozen=True)
class Series:
    """The values of a metric, in the order in which they were logged.

    Attributes:
        name: the metric.
        steps: (n,) float64, the optimizer step of each value.
        values: (n,) float64; may be NaN or infinite.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """The latest value."""
        return float(self.values[-1])

    @property
    def finite(self) -> np.ndarray:
        """The values that are finite."""
        return self.values[np.isfinite(self.values)]

    @property
    def first_not_finite(self) -> float | None:
        """The step of the first value that is NaN or infinite; None if there is none."""
        wrong = np.flatnonzero(~np.isfinite(self.values))
        return float(self.steps[wrong[0]]) if len(wrong) else None


@dataclass(frozen=True)
class Metrics:
    """The metrics of a run.

    Attributes:
        series: by name, in the order of the file.
        rows: the number of rows.
        faulty: the number of lines that could not be read.
        file: the file; None if the run has none.
    """

    series: Mapping[str, Series] = field(default_factory=dict)
    rows: int = 0
    faulty: int = 0
    file: Path | None = None


def read_metrics(directory: Path) -> Metrics:
    """Read the first of `NAMES` that a run's directory has. Without one, there are no metrics."""
    for name in NAMES:
        path = directory / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            rows = _csv_rows(text) if path.suffix == ".csv" else _json_rows(text)
            return _collect(rows, path)
    return Metrics()


def _csv_rows(text: str) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a CSV file; None for a line that can't be read."""
    # Only the header may have line breaks in its cells. A stray quote must not swallow the lines after it.
    reader = csv.reader(io.StringIO(text))
    try:
        header = next(reader)
    except (StopIteration, csv.Error):
        return
    lines = text.splitlines(keepends=True)[reader.line_num :]
    for line in lines:
        cells = line.rstrip("\r\n").split(",")
        if len(cells) == len(header) and line.endswith("\n"):
            yield {name: cell for name, cell in zip(header, cells, strict=True) if cell}
        elif line.strip():
            yield None


def _json_rows(text: str) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a file of JSON lines; None for a line that can't be read."""
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            yield None
            continue
        yield row if isinstance(row, dict) else None


def _collect(rows: Iterable[dict[str, Any] | None], path: Path) -> Metrics:
    points: dict[str, tuple[list[float], list[float]]] = {}
    count = faulty = 0
    for row in rows:
        step = _number(row.get("step")) if row else None
        if row is None or step is None or not math.isfinite(step):
            faulty += 1
            continue
        count += 1
        damaged = False
        for name, cell in row.items():
            if name in _POSITION or cell is None:
                continue
            value = _number(cell)
            if value is None:
                # JSON lines also hold texts and references to files.
                damaged |= path.suffix == ".csv"
                continue
            steps, values = points.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
        faulty += damaged
    series = {name: Series(name, np.array(steps), np.array(values)) for name, (steps, values) in points.items()}
    return Metrics(series, count, faulty, path)


def _number(cell: Any) -> float | None:
    if isinstance(cell, (bool, dict, list)):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
