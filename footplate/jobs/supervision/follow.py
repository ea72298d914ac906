"""Read the output of a job while it grows: all attempts, all processes, line by line.

    Follower(home, name).lines()    the lines since the last call

Lines of one process stay in order. Lines of several processes are interleaved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from footplate.jobs.home import Home
from footplate.jobs.supervision.logfiles import Reader
from footplate.launch.output import Lines

_LOG = re.compile(r"(master|worker|parameter_server|evaluator)-(\d+)\.log|(prepare|tuning)\.log")


@dataclass(frozen=True)
class Line:
    """A line of output. `source` is its writer: `master-0`, `prepare` for the installation of the package, or `tuning`."""

    attempt: int
    source: str
    text: str


class Follower:
    """Reads a job's output as it grows.

    Args:
        home: the job's home.
        name: the job's name.
    """

    def __init__(self, home: Home, name: str) -> None:
        self._folder = home.job(name)
        self._open: dict[Path, tuple[int, str, Reader, Lines]] = {}

    def skip_to_tail(self, count: int, attempt: int | None = None, source: str | None = None) -> None:
        """Skip existing output except for the last lines, without reading it.

        The next call of `lines` returns at least the last `count` lines, if there are that many.

        Args:
            count: the number of lines.
            attempt: count only lines of this attempt; others may be skipped.
            source: count only lines of this process.
        """
        self._find_files()
        for of_attempt, of_source, reader, _ in reversed(self._open.values()):
            wanted = attempt in (None, of_attempt) and source in (None, of_source)
            # The job is being deleted.
            with suppress(FileNotFoundError):
                lines = reader.go_back(count if wanted else 0)
                count -= lines if wanted else 0

    def lines(self, last: bool = False) -> Iterator[Line]:
        """Yield the lines since the last call.

        Args:
            last: the output is complete, so text without a line end is a line, too.
        """
        self._find_files()
        for attempt, source, reader, lines in self._open.values():
            while data := reader.read():
                for text in lines.feed(data):
                    yield Line(attempt, source, text)
            for text in lines.end() if last else ():
                yield Line(attempt, source, text)

    def _find_files(self) -> None:
        """Find new files: attempts in order, in each first the preparation, then the master."""
        for attempt in sorted(int(path.name.removeprefix("attempt-")) for path in self._folder.glob("attempt-*")):
            # The job is being deleted.
            with suppress(FileNotFoundError):
                self._find_files_of(attempt)

    def _find_files_of(self, attempt: int) -> None:
        names = [path.name for path in (self._folder / f"attempt-{attempt}").iterdir() if _LOG.fullmatch(path.name)]
        for name in sorted(names, key=_order):
            path = self._folder / f"attempt-{attempt}" / name
            if path not in self._open:
                self._open[path] = (attempt, name.removesuffix(".log"), Reader(path), Lines())


def _order(name: str) -> tuple[int, int]:
    match = _LOG.fullmatch(name)
    assert match is not None
    roles = ("tuning", "prepare", "master", "worker", "parameter_server", "evaluator")
    return (roles.index(match[1] or match[3]), int(match[2] or 0))
