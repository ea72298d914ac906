"""Progress of a computation that may take hours: a bar in a terminal, and lines at intervals anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_S = 10.0


class RowGroupProgress:
    """Shows how many row groups are done, on standard error.

    Args:
        name: what is computed.
        total: the number of row groups.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done, self._rows = name, total, 0, 0
        self._began = time.monotonic()
        self._due = self._began + _LINE_S
        self._bar: Progress | None = None

    def __enter__(self) -> RowGroupProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(file=sys.stderr), transient=True)
            self._bar.add_task(self._name, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, rows: int) -> None:
        """Count a row group.

        Args:
            rows: its number of rows.
        """
        self._done += 1
        self._rows += rows
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + _LINE_S
            self.say(f"{self._done} of {self._total} row groups, {self._rows} rows")

    def end(self) -> None:
        """Say what was done."""
        seconds = time.monotonic() - self._began
        self.say(f"{self._total} row groups, {self._rows} rows, in {seconds:.1f} s")

    def say(self, text: str) -> None:
        """Write a line."""
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
