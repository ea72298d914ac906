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
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger, Status
from footplate.tracking.file_moves import append_whole, move_aside, replace_text
from footplate.tracking.parameters import plain
from footplate.tracking.writer import BackgroundWriter

FLUSH_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 10.0


class CSV(Logger):
    """Write metrics to a CSV file and hyper-parameters to `hparams.json` beside it.

    Args:
        path: the file; `metrics.csv` in the run's directory by default.
    """

    name = "csv"

    def __init__(self, path: str | Path | None = None) -> None:
        self._given_path = path
        self._resumed: dict[str, Any] | None = None
        # The file of the last record.
        self._finalized: Path | None = None
        self._writer: BackgroundWriter | None = None
        self._rows = 0
        self._step = 0

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start or continue the file. Raises ConfigError if it can't be written."""
        path, resumed = self._path(run_dir), self._resumed

        def prepare() -> MetricsFile:
            if resumed is not None:
                table = MetricsFile.reopen(path, resumed["rows"], resumed["step"])
            elif path == self._finalized:
                table = MetricsFile.open(path)
            else:
                move_aside(path)
                move_aside(_hparams_path(path))
                table = MetricsFile.create(path)
            _write_hparams(path, hparams)
            return table

        self._begin(path, prepare)
        self._step = resumed["step"] if resumed else 0

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Open the existing file, or start one. Raises ConfigError if it can't be written."""
        path = self._path(run_dir)

        def prepare() -> MetricsFile:
            table = MetricsFile.open(path)
            if not _hparams_path(path).exists():
                _write_hparams(path, hparams)
            return table

        self._begin(path, prepare)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Write a row."""
        if self._writer is not None:
            self._rows += 1
            self._step = self._step if step is None else step
            self._writer.put({"step": self._step, "epoch": epoch, **metrics})

    def finalize(self, status: Status) -> None:
        """Write the remaining rows. If the same logger is set up again, it continues its file."""
        if self._writer is not None:
            self._writer.close(CLOSE_TIMEOUT_S)
            self._writer = None

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush(FLUSH_TIMEOUT_S)

    def state_dict(self) -> dict[str, Any]:
        """The number of rows and the last step of the flushed file."""
        return {"rows": self._rows, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The position to which `setup` truncates the file."""
        self._resumed = state

    def _path(self, run_dir: Path) -> Path:
        return Path(self._given_path) if self._given_path else run_dir / "metrics.csv"

    def _begin(self, path: Path, prepare: Callable[[], MetricsFile]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            table = prepare()
        except OSError as error:
            raise ConfigError(
                f"The CSV logger can't write {path}: {error}. Choose another default_root_dir."
            ) from error
        self._resumed, self._finalized = None, path
        self._rows = table.rows
        self._writer = BackgroundWriter("metrics.csv", table.append)


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


def _hparams_path(path: Path) -> Path:
    return path.with_name("hparams.json")


def _write_hparams(path: Path, hparams: dict[str, Any]) -> None:
    replace_text(_hparams_path(path), json.dumps(plain(hparams), indent=2) + "\n")


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
