"""What a process writes, kept in files: `master-0.log`, and when that is full, `master-0.log.1`, `.2`, …

A full file is never renamed or cut, so whoever reads it while it grows misses nothing and reads nothing twice: when
the next file is there, this one is complete. All of them stay until the job is deleted.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from footplate.jobs.masking import Veil

log = logging.getLogger(__name__)

FULL = 64 * 2**20  # bytes
PIECE = 1 << 20  # bytes read at once: a log may be larger than memory
_LINE_END = re.compile(rb"\r\n|\n|\r")


def part(first: Path, number: int) -> Path:
    """A file of the row that begins with `first`."""
    return first.with_name(f"{first.name}.{number}") if number else first


class Writer:
    """Writes one process's output, after what is there already.

    Attributes:
        size: bytes of all files.

    Args:
        first: the first file.
        full: the bytes after which the next one begins.
        veil: what takes secrets out of it.
    """

    def __init__(self, first: Path, full: int = FULL, veil: Veil | None = None) -> None:
        self._first = first
        self._full = full
        self._veil = veil or Veil()
        self._number = 0
        while part(first, self._number + 1).exists():
            self._number += 1
        self._file = part(first, self._number).open("ab", buffering=0)
        self.size = sum(part(first, number).stat().st_size for number in range(self._number + 1))
        self._broken = False
        self.last = _end(part(first, self._number))  # the end of what was written: what the process said last

    def write(self, data: bytes) -> None:
        """Keep a piece."""
        self._keep(self._veil.feed(data))

    def end(self) -> None:
        """Nothing more will come: keep what the veil has held back."""
        self._keep(self._veil.end())

    def last_line(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.last.decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def close(self) -> None:
        """End the file."""
        self.end()
        self._file.close()

    def _keep(self, data: bytes) -> None:
        if not data:  # it mustn't begin another file
            return
        self.size += len(data)
        self.last = (self.last + data)[-4096:]
        try:
            if self._file.tell() >= self._full:
                following = part(self._first, self._number + 1).open("ab", buffering=0)
                self._file.close()
                self._file, self._number = following, self._number + 1
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._broken = False
        except OSError as error:  # a full disk: the program goes on, and what it says is kept again when there is room
            if not self._broken:
                log.warning("%s: %s; what is written now is lost", self._first, error.strerror)
            self._broken = True


def _end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read()


class Reader:
    """Reads a row of files while they grow."""

    def __init__(self, first: Path) -> None:
        self._first = first
        self._number = 0
        self._at = 0

    def go_back(self, lines: int) -> int:
        """Stand before the last complete lines of what there is, and read only those from then on.

        Args:
            lines: how many lines are wanted.

        Returns:
            How many lines there are, at most `lines`. Text after the last line end doesn't count.
        """
        last = 0
        while part(self._first, last + 1).exists():
            last += 1
        missing, following = lines + 1, b""  # the line end before the first wanted line counts, too
        for number in range(last, -1, -1):
            with part(self._first, number).open("rb") as file:
                stop = file.seek(0, os.SEEK_END)
                while stop:
                    start = max(0, stop - PIECE)
                    file.seek(start)
                    data = file.read(stop - start)
                    ends = [found.end() for found in _LINE_END.finditer(data)]
                    if data.endswith(b"\r") and following == b"\n":  # one line end on both sides of the cut
                        ends.pop()
                    if len(ends) >= missing:
                        self._number, self._at = number, start + ends[-missing]
                        return lines
                    missing -= len(ends)
                    stop, following = start, data[:1]
        self._number, self._at = 0, 0
        return lines + 1 - missing

    def read(self) -> bytes:
        """The next piece; empty when nothing more has been written yet, or the files are deleted."""
        while True:
            next_is_there = part(self._first, self._number + 1).exists()  # looked for first: then this one is complete
            try:
                with part(self._first, self._number).open("rb") as file:
                    file.seek(self._at)
                    data = file.read(PIECE)
                    self._at = file.tell()
            except FileNotFoundError:
                return b""
            if data or not next_is_there:
                return data
            self._number, self._at = self._number + 1, 0
