"""The base of loggers that write one file in the run's directory. A subclass names its file and its `RowFile`.

A thread appends rows to the file. A resumed run first truncates the file to the rows that its checkpoint counted. A new run
renames older files. `trainer.validate()` and `trainer.test()` add their results to the existing file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from footplate.core.errors import ConfigError
from footplate.tracking.base import Logger, Status
from footplate.tracking.file_moves import move_aside, replace_text
from footplate.tracking.parameters import plain
from footplate.tracking.writer import BackgroundWriter

FLUSH_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 10.0


class RowFile(Protocol):
    """A file that grows by rows. `append` is called in another thread than the rest, and raises only OSError."""

    rows: int

    @classmethod
    def create(cls, path: Path) -> Any:
        """Create a file with no rows."""
        ...

    @classmethod
    def open(cls, path: Path) -> Any:
        """Open an existing file with all complete rows, or create one."""
        ...

    @classmethod
    def reopen(cls, path: Path, rows: int, step: int) -> Any:
        """Truncate an existing file to its first `rows` rows, and drop rows at the end with a step after `step`."""
        ...

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add rows. If it raises OSError, nothing was added."""
        ...


class FileLogger(Logger):
    """Base class: the file and the position of its record.

    Attributes:
        title: the logger's name in messages.
        file_name: the name of the file in the run's directory.
        hparams_name: the name of the file of hyper-parameters beside it.
        row_file: the kind of file.

    Args:
        path: the file; `file_name` in the run's directory by default.
    """

    title: str
    file_name: str
    hparams_name: str
    row_file: type[RowFile]

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

        def prepare() -> RowFile:
            if resumed is not None:
                table = self.row_file.reopen(path, resumed["rows"], resumed["step"])
            elif path == self._finalized:
                table = self.row_file.open(path)
            else:
                self.move_aside(path)
                table = self.row_file.create(path)
            self._write_hparams(path, hparams)
            return table

        self._begin(path, prepare)
        self._step = resumed["step"] if resumed else 0

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Open the existing file, or start one. Raises ConfigError if it can't be written."""
        path = self._path(run_dir)

        def prepare() -> RowFile:
            table = self.row_file.open(path)
            if not self._hparams_path(path).exists():
                self._write_hparams(path, hparams)
            return table

        self._begin(path, prepare)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Write a row."""
        if self._writer is not None:
            self._step = self._step if step is None else step
            self.put({"step": self._step, "epoch": epoch, **metrics})

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

    def put(self, row: dict[str, Any]) -> None:
        """Queue a row of an open record."""
        if self._writer is not None:
            self._rows += 1
            self._writer.put(row)

    def move_aside(self, path: Path) -> None:
        """Rename the files of an older record."""
        move_aside(path)
        move_aside(self._hparams_path(path))

    def write_rows(self, table: RowFile, path: Path, rows: list[dict[str, Any]]) -> None:
        """Write rows, in the writer's thread."""
        table.append(rows)

    def _path(self, run_dir: Path) -> Path:
        return Path(self._given_path) if self._given_path else run_dir / self.file_name

    def _hparams_path(self, path: Path) -> Path:
        return path.with_name(self.hparams_name)

    def _write_hparams(self, path: Path, hparams: dict[str, Any]) -> None:
        replace_text(self._hparams_path(path), json.dumps(plain(hparams), indent=2) + "\n")

    def _begin(self, path: Path, prepare: Callable[[], RowFile]) -> None:
        # An older file is renamed. A directory, such as the run's own, must not be.
        if path.is_dir():
            raise ConfigError(
                f"The {self.title} logger can't write {path}: it is a directory. Give the path of a file, such as "
                f"{str(path / self.file_name)!r}."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            table = prepare()
        except OSError as error:
            raise ConfigError(
                f"The {self.title} logger can't write {path}: {error}. Choose another default_root_dir."
            ) from error
        self._resumed, self._finalized = None, path
        self._rows = table.rows
        self._writer = BackgroundWriter(path.name, lambda rows: self.write_rows(table, path, rows))
