"""What a process writes, kept in files: `master-0.log`, and when that is full, `master-0.log.1`, `.2`, …

A full file is never renamed or cut, so a reader that follows it reads everything once: when the next file is there, this
one is complete. The files stay until the job is deleted.

What is kept of one process is bounded, by `FOOTPLATE_LOG_MB`. Beyond that, the beginning and the end are kept: half of the
files stay, and of the others the oldest is deleted when a new one begins. `master-0.log.cut` then says how much was
deleted, and a reader returns that line in its place.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.jobs.redaction import Veil

log = logging.getLogger(__name__)

VARIABLE = "FOOTPLATE_LOG_MB"
DEFAULT_MB = 2048
FULL = 64 * 2**20  # bytes
PIECE = 1 << 20  # bytes read at once: a log may be larger than memory
_FEWEST = 4  # files: two of the beginning, two of the end
_CUT = re.compile(rb"\d+")
_LINE_END = re.compile(rb"\r\n|\n|\r")


def part(first: Path, number: int) -> Path:
    """A file of the row that begins with `first`."""
    return first.with_name(f"{first.name}.{number}") if number else first


def cut_note(first: Path) -> Path:
    """The file that says how much was deleted of the row that begins with `first`."""
    return first.with_name(f"{first.name}.cut")


def numbers(first: Path) -> list[int]:
    """The numbers of the files of a row that are there, in order."""
    found = [one.name.removeprefix(first.name) for one in first.parent.glob(f"{first.name}*") if one.exists()]
    return sorted(int(one[1:] or 0) for one in found if one == "" or one[1:].isdigit())


def size(first: Path) -> int:
    """The bytes that were written to a row of files, also those that were deleted since."""
    return _deleted(first) + sum(part(first, number).stat().st_size for number in numbers(first))


def limit() -> int:
    """How many bytes are kept of what a process writes.

    Raises:
        ConfigError: `FOOTPLATE_LOG_MB` is no number of MB.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT_MB)
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{VARIABLE}={text}: expected how many MB of output are kept of each process, such as 2048.")
    return int(text) * 2**20


class Writer:
    """Writes one process's output, after what is there already.

    Attributes:
        size: bytes that were written, also those that were deleted since.

    Args:
        first: the first file.
        full: the bytes after which the next one begins; fewer if that is needed to stay below `most`.
        veil: what takes secrets out of it.
        most: the bytes that are kept, about; by default those of `limit`.
    """

    def __init__(self, first: Path, full: int = FULL, veil: Veil | None = None, most: int | None = None) -> None:
        most = limit() if most is None else most
        self._first = first
        self._full = max(1, min(full, most // _FEWEST))
        self._files = max(_FEWEST, most // self._full)
        self._veil = veil or Veil()
        self.size, self._deleted = size(first), _deleted(first)
        self._number = max(numbers(first), default=0)
        self._file = part(first, self._number).open("ab", buffering=0)
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
                self._cut()
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._broken = False
        except OSError as error:  # a full disk: the program goes on, and what it says is kept again when there is room
            if not self._broken:
                log.warning("%s: %s; what is written now is lost", self._first, error.strerror)
            self._broken = True

    def _cut(self) -> None:
        """Delete the oldest files between the beginning and the end, if there are too many. The note comes first."""
        head = self._files // 2
        for number in [one for one in numbers(self._first) if head <= one <= self._number - (self._files - head)]:
            path = part(self._first, number)
            self._deleted += path.stat().st_size
            draft = self._first.with_name(f".{self._first.name}.cut")
            draft.write_text(
                f"[Footplate] {self._deleted} bytes of output are cut here: {VARIABLE} says how much of it is kept.\n"
            )
            draft.replace(cut_note(self._first))
            path.unlink()


def _deleted(first: Path) -> int:
    """The bytes that were deleted of a row."""
    try:
        found = _CUT.search(cut_note(first).read_bytes())
    except FileNotFoundError:
        return 0
    return int(found[0]) if found else 0


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
        missing, following = lines + 1, b""  # the line end before the first wanted line counts, too
        for number in reversed(numbers(self._first) or [0]):
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
            following, lost = self._following(), False  # looked for first: if there is one, this file is complete
            try:
                with part(self._first, self._number).open("rb") as file:
                    file.seek(self._at)
                    data = file.read(PIECE)
                    self._at = file.tell()
            except FileNotFoundError:  # the job is deleted, or this file was cut
                data, lost = b"", True
            if data or following is None:
                return data
            lost = lost or following != self._number + 1
            self._number, self._at = following, 0
            if lost:
                return self._note()

    def _following(self) -> int | None:
        """The number of the file after this one; None while there is none."""
        if part(self._first, self._number + 1).exists():
            return self._number + 1
        if not cut_note(self._first).exists():
            return None
        return next((number for number in numbers(self._first) if number > self._number), None)

    def _note(self) -> bytes:
        """The line that stands in place of what was cut, after the end of the line that was cut off."""
        try:
            return b"\n" + cut_note(self._first).read_bytes()
        except FileNotFoundError:
            return b""
