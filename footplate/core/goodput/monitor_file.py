"""`monitor.jsonl`, the record that a trainer writes into its run's directory, as sessions of training.

Rank 0 appends a line for each report, over all attempts of a run. A session is one call of `fit` in one process: a `start`
row, `window` rows, and an `end` row unless the process was killed.

    {"kind": "start", "time": 1764060000.0, "step": 0, "world_size": 2, "setup_s": 1.3}
    {"kind": "window", "time": 1764060004.1, "step": 50, "batches": 50, "wall_s": 4.1, "seconds": {"input": 0.4, …}}
    {"kind": "end", "time": 1764060010.0, "step": 120, "status": "finished"}

A start row may also have `job` and `attempt`, the id of the job and the number of its attempt, `process_s`, the seconds
since its process began, `total_steps`, the steps of the whole training, and `checkpoints`, the places of checkpoints that
aren't in the run's directory.

The reader tolerates a damaged file. A killed process leaves half a line, and the next attempt's first row may follow on the
same line. Rows that can't be read are counted and left out. If a start row is missing, a step that is lower than the
one before it begins a session.

A long run has millions of windows. A session that has `MOST` windows gets half as many, each twice as long.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from footplate.core.goodput.causes import OF_WINDOW, Cause

NAME = "monitor.jsonl"
MOST = 20_000
# A longer line is no row.
_LONGEST = 1 << 20
_CHUNK = 1 << 20
# The shortest pause that keeps two windows from being merged.
_APART_S = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a session, between two reports.

    Attributes:
        time: its end, in seconds since the epoch.
        wall_s: its duration.
        first_step: optimizer steps before it.
        step: optimizer steps after it.
        seconds: its duration by cause. The sum is `wall_s`.
    """

    time: float
    wall_s: float
    first_step: int
    step: int
    seconds: Mapping[Cause, float]


@dataclass(slots=True)
class Session:
    """A call of `fit` in one process.

    Attributes:
        time: when it began to train, in seconds since the epoch.
        step: the step from which it continued; 0 for a new training.
        world_size: the number of ranks.
        setup_s: seconds from the call of `fit` until `time`.
        process_s: seconds from the beginning of the process until `time`; None if unknown.
        attempt: the number of the job's attempt; None if unknown.
        windows: its reports, in order.
        ended: when the call ended; None if it was killed, or still runs.
        status: "finished", "interrupted" or "failed"; empty if it was killed, or still runs.
    """

    time: float
    step: int
    world_size: int = 1
    setup_s: float = 0.0
    process_s: float | None = None
    attempt: int | None = None
    windows: list[Window] = field(default_factory=list)
    ended: float | None = None
    status: str = ""

    @property
    def began(self) -> float:
        """The time of the call of `fit`."""
        return self.time - self.setup_s

    @property
    def last(self) -> float:
        """The time of the last row."""
        times = [self.time, *(window.time for window in self.windows[-1:])]
        return max([*times, self.ended] if self.ended is not None else times)

    @property
    def last_step(self) -> int:
        """The last step that a window reported."""
        return self.windows[-1].step if self.windows else self.step


class RowsFile:
    """Reads the rows of a file, and later only the lines that were added. Threads may share it.

    A last line without its end isn't read. It may still be written. A subclass keeps what it needs of the rows.

    Args:
        path: the file. It may not exist yet.

    Attributes:
        damaged: the number of lines that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._lock = threading.Lock()

    def take(self, row: Mapping[str, Any]) -> bool:
        """Keep what is needed of a row. Returns False if it can't be read."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget all rows: the file was replaced, or can't be read."""
        self._identity, self._offset, self.damaged = None, 0, 0

    def update(self) -> None:
        """Read the new rows. Call it with the lock."""
        try:
            self._read()
        except OSError:
            self.forget()

    def _read(self) -> None:
        with self.path.open("rb") as file:
            status = self.path.stat()
            identity = (status.st_dev, status.st_ino)
            # Another file has this name now, or the file was cut.
            if identity != self._identity or status.st_size < self._offset:
                self.forget()
                self._identity = identity
            file.seek(self._offset)
            for line in _complete_lines(file):
                self._offset += len(line)
                row = _row(line)
                if row is None or not self.take(row):
                    self.damaged += bool(line.strip())


class MonitorFile(RowsFile):
    """Reads the sessions of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._sessions: list[Session] = []

    def sessions(self) -> list[Session]:
        """Return the sessions so far; none if the file is missing or can't be read."""
        with self._lock:
            self.update()
            return [replace(session, windows=[*session.windows]) for session in self._sessions]

    def take(self, row: Mapping[str, Any]) -> bool:
        return _add(self._sessions, row)

    def forget(self) -> None:
        super().forget()
        self._sessions = []


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file, and the number of complete lines that can't be read. Without a file, there are none."""
    rows: list[dict[str, Any]] = []
    damaged = 0
    try:
        with path.open("rb") as file:
            for line in _complete_lines(file):
                row = _row(line)
                if row is None:
                    damaged += bool(line.strip())
                else:
                    rows.append(row)
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    return rows, damaged


def read_sessions(rows: Iterable[Mapping[str, Any]]) -> list[Session]:
    """Make sessions of rows that are parsed already. Rows that can't be read are left out."""
    sessions: list[Session] = []
    for row in rows:
        _add(sessions, row)
    return sessions


def _complete_lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(_CHUNK):
        # A line that is too long comes in parts, and none of them is a row.
        if not line.endswith(b"\n") and len(line) < _CHUNK:
            return
        yield line


def _row(line: bytes) -> dict[str, Any] | None:
    if len(line) > _LONGEST:
        return None
    # A killed process left the first half of a row, and the next attempt wrote a row behind it.
    for text in (line, line[max(0, line.rfind(b'{"kind"')) :]):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            return row
    return None


def _add(sessions: list[Session], row: Mapping[str, Any]) -> bool:
    """Add a row to the sessions. Returns False if it can't be read."""
    kind = row.get("kind")
    if kind not in ("start", "window", "end"):
        # Other kinds repeat the windows, or are about something else.
        return isinstance(kind, str)
    time, step = number_of(row.get("time"), -math.inf), count_of(row.get("step"))
    if time is None or step is None:
        return False
    if kind == "start":
        sessions.append(_session(row, time, step))
        return True
    if kind == "window":
        return _add_window(sessions, row, time, step)
    if not sessions or sessions[-1].ended is not None:
        return False
    status = row.get("status")
    sessions[-1].ended = time
    sessions[-1].status = status if status in ("finished", "interrupted", "failed") else "failed"
    return True


def _session(row: Mapping[str, Any], time: float, step: int) -> Session:
    return Session(
        time,
        step,
        world_size=max(1, count_of(row.get("world_size")) or 1),
        setup_s=number_of(row.get("setup_s")) or 0.0,
        process_s=number_of(row.get("process_s")),
        attempt=count_of(row.get("attempt")),
    )


def _add_window(sessions: list[Session], row: Mapping[str, Any], time: float, step: int) -> bool:
    wall_s, parts = number_of(row.get("wall_s")), row.get("seconds")
    if wall_s is None:
        return False
    if not sessions or sessions[-1].ended is not None or step < sessions[-1].last_step:
        # The start row is missing.
        world_size = sessions[-1].world_size if sessions else 1
        first_step = max(0, step - (count_of(row.get("batches")) or 0))
        sessions.append(Session(time - wall_s, first_step, world_size))
    session = sessions[-1]
    seconds = _by_cause(parts if isinstance(parts, dict) else {}, wall_s)
    session.windows.append(Window(time, wall_s, session.last_step, step, seconds))
    if len(session.windows) >= MOST:
        session.windows[:] = _merged(session.windows)
    return True


def _by_cause(parts: Mapping[str, Any], wall_s: float) -> dict[Cause, float]:
    """Sum the parts of a window by the ledger's causes. The rest is unknown."""
    seconds: dict[Cause, float] = {}
    for name, value in parts.items():
        part = number_of(value)
        if part:
            cause = OF_WINDOW.get(name, Cause.UNKNOWN)
            seconds[cause] = seconds.get(cause, 0.0) + part
    total = math.fsum(seconds.values())
    # The parts and the duration are rounded.
    if total > wall_s:
        return {cause: part * (wall_s / total) for cause, part in seconds.items()}
    if wall_s - total > 1e-9:
        seconds[Cause.UNKNOWN] = seconds.get(Cause.UNKNOWN, 0.0) + wall_s - total
    return seconds


def _merged(windows: list[Window]) -> list[Window]:
    """Merge each window at an even index with the next one, unless there is a pause between them."""
    merged: list[Window] = []
    pending: Window | None = None
    for window in windows:
        if pending is None:
            pending = window
        elif abs(window.time - window.wall_s - pending.time) > _APART_S:
            merged.append(pending)
            pending = window
        else:
            causes = {**pending.seconds, **window.seconds}
            seconds = {cause: pending.seconds.get(cause, 0.0) + window.seconds.get(cause, 0.0) for cause in causes}
            wall_s = pending.wall_s + window.wall_s
            merged.append(Window(window.time, wall_s, pending.first_step, window.step, seconds))
            pending = None
    return [*merged, pending] if pending is not None else merged


def number_of(value: Any, least: float = 0.0) -> float | None:
    """Return a value of a row as a finite number; None if it isn't one, or is less than `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= least else None


def count_of(value: Any) -> int | None:
    """Return a value of a row as a whole number; None if it isn't a number."""
    number = number_of(value)
    return None if number is None else int(number)
