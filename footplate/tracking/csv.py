"""`CSV`: the metrics of a run as a plain file that any spreadsheet opens.

    step,epoch,train_loss,val_loss
    50,0,0.61,
    100,0,0.48,0.52

`metrics.csv` and `hparams.json` are in the run's directory. A new metric adds a column: the file is written to a new file
and renamed, so that no row is lost. A resumed run first truncates the file to the rows that its checkpoint counted. A new
run renames older files, to `metrics-1.csv`. `trainer.validate()` and `trainer.test()` add their results to the existing
file.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from footplate.tracking.file_logger import FileLogger
from footplate.tracking.file_moves import append_whole, move_aside, replace_text


class MetricsFile:
    """A CSV file of metrics that grows by rows and by columns."""

    def __init__(self, path: Path, columns: list[str], rows: int) -> None:
        self.path = path
        self.columns = columns
        self.rows = rows

    @classmethod
    def create(cls, path: Path) -> MetricsFile:
        """Create a file with a header and no rows."""
        table = cls(path, ["step", "epoch"], 0)
        replace_text(path, _lines([table.columns]))
        return table

    @classmethod
    def open(cls, path: Path) -> MetricsFile:
        """Open an existing file with all complete rows, or create one. A row that a crash cut off is dropped."""
        columns, rows = _read(path) if path.exists() else ([], [])
        if columns[:2] != ["step", "epoch"]:
            move_aside(path)
            return cls.create(path)
        replace_text(path, _lines([columns, *rows]))
        return cls(path, columns, len(rows))

    @classmethod
    def reopen(cls, path: Path, rows: int, step: int) -> MetricsFile:
        """Truncate an existing file to its first `rows` rows, and drop rows at the end with a step after `step`."""
        if not path.exists():
            return cls.create(path)
        columns, existing = _read(path)
        kept = existing[:rows]

        # If a flush timed out, the file had fewer rows than the checkpoint counted, and later rows follow.
        while kept and int(kept[-1][0]) > step:
            kept.pop()
        replace_text(path, _lines([columns, *kept]))
        return cls(path, columns, len(kept))

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add a column for each new name, then a row for each record. If it raises OSError, nothing was added."""
        new = [
            name for name in dict.fromkeys(name for record in records for name in record) if name not in self.columns
        ]
        if new:
            columns, existing = _read(self.path)
            replace_text(self.path, _lines([[*columns, *new], *([*row, *[""] * len(new)] for row in existing)]))
            self.columns = [*columns, *new]

        rows = [[_cell(record.get(name)) for name in self.columns] for record in records]
        append_whole(self.path, _lines(rows).encode())
        self.rows += len(rows)


def _cell(value: Any) -> str:
    return "" if value is None else repr(value)


def _lines(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Read the header and the rows, without an incomplete last line."""
    text = path.read_text(encoding="utf-8")
    header, *rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))) or [["step", "epoch"]]
    return header, [row for row in rows if len(row) == len(header)]


class CSV(FileLogger):
    """Write metrics to a CSV file and hyper-parameters to `hparams.json` beside it.

    Args:
        path: the file; `metrics.csv` in the run's directory by default.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, logger=fp.CSV("metrics/flowers.csv"))
        >>> trainer.fit(model, train)
    """

    name = "csv"
    logs_times = False
    title = "CSV"
    file_name = "metrics.csv"
    hparams_name = "hparams.json"
    row_file = MetricsFile
