"""A job's output, from its beginning and while it goes on: all attempts, all processes, line by line.

    Follower(home, name).lines()    what has come since the last call

Lines of one process stay in order; those of several come as they are found.
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

_LOG = re.compile(r"(master|worker|parameter_server|evaluator)-(\d+)\.log|(prepare)\.log")


@dataclass(frozen=True)
class Line:
    """A line of output. `source` is who wrote it: `master-0`, or `prepare` for the installation of the package."""

    attempt: int
    source: str
    text: str


class Follower:
    """Reads a job's output as it grows.

    Args:
        home: where the job is.
        name: the job's.
    """

    def __init__(self, home: Home, name: str) -> None:
        self._folder = home.job(name)
        self._open: dict[Path, tuple[int, str, Reader, Lines]] = {}

    def skip_to_tail(self, count: int, attempt: int | None = None, source: str | None = None) -> None:
        """Skip what there is but for the last lines, without reading it.

        The next call of `lines` gives at least the last `count` lines, as many as there are.

        Args:
            count: how many lines.
            attempt: only lines of this attempt count; those of others may be skipped.
            source: only lines of this process count.
        """
        self._look()
        for of_attempt, of_source, reader, _ in reversed(self._open.values()):
            wanted = attempt in (None, of_attempt) and source in (None, of_source)
            with suppress(FileNotFoundError):  # the job is being deleted
                found = reader.go_back(count if wanted else 0)
                count -= found if wanted else 0

    def lines(self, last: bool = False) -> Iterator[Line]:
        """What has come since the last call.

        Args:
            last: nothing more will come, so that a line without an end is whole, too.
        """
        self._look()
        for attempt, source, reader, lines in self._open.values():
            while data := reader.read():
                for text in lines.feed(data):
                    yield Line(attempt, source, text)
            for text in lines.end() if last else ():
                yield Line(attempt, source, text)

    def _look(self) -> None:
        """Find what is there now, attempts in order, in each the preparation first, then the master."""
        for attempt in sorted(int(one.name.removeprefix("attempt-")) for one in self._folder.glob("attempt-*")):
            with suppress(FileNotFoundError):  # the job is being deleted
                self._look_into(attempt)

    def _look_into(self, attempt: int) -> None:
        names = [one.name for one in (self._folder / f"attempt-{attempt}").iterdir() if _LOG.fullmatch(one.name)]
        for name in sorted(names, key=_order):
            path = self._folder / f"attempt-{attempt}" / name
            if path not in self._open:
                self._open[path] = (attempt, name.removesuffix(".log"), Reader(path), Lines())


def _order(name: str) -> tuple[int, int]:
    found = _LOG.fullmatch(name)
    assert found is not None
    roles = ("prepare", "master", "worker", "parameter_server", "evaluator")
    return (roles.index(found[1] or found[3]), int(found[2] or 0))
