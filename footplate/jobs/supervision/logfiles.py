"""The output of a process in files: `master-0.log`, and when that is full, `master-0.log.1`, `.2`, …

A full file is never renamed or truncated, so a reader that follows the files reads everything once. When the next file
exists, the one before it is complete. The files stay until the job is deleted.

`FOOTPLATE_LOG_MB` limits the output that is kept of one process. Beyond the limit, the beginning and the end are kept: half
of the files stay, and of the rest the oldest is deleted when a new one begins. `master-0.log.cut` then contains the number
of deleted bytes as a line of text, and a reader returns that line in place of the deleted output.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.jobs.redaction import StreamMask

log = logging.getLogger(__name__)

VARIABLE = "FOOTPLATE_LOG_MB"
DEFAULT_MB = 2048
# Size limit of a log file, in bytes.
FULL = 64 * 2**20
# Bytes to read at once: a log may be larger than memory.
PIECE = 1 << 20
# At least two files of the beginning, and two of the end.
_FEWEST = 4
_CUT = re.compile(rb"\d+")
_LINE_END = re.compile(rb"\r\n|\n|\r")


def part(first: Path, number: int) -> Path:
    """The path of a file in the series that begins with `first`."""
    return first.with_name(f"{first.name}.{number}") if number else first


def cut_note(first: Path) -> Path:
    """The file with the number of bytes that were deleted from the series that begins with `first`."""
    return first.with_name(f"{first.name}.cut")


def numbers(first: Path) -> list[int]:
    """The numbers of a series' existing files, in order."""
    suffixes = [path.name.removeprefix(first.name) for path in first.parent.glob(f"{first.name}*") if path.exists()]
    return sorted(int(suffix[1:] or 0) for suffix in suffixes if suffix == "" or suffix[1:].isdigit())


def size(first: Path) -> int:
    """The bytes that were written to a series of files, including those that were deleted since."""
    return _deleted(first) + sum(part(first, number).stat().st_size for number in numbers(first))


def limit() -> int:
    """The bytes of output to keep of a process.

    Raises:
        ConfigError: `FOOTPLATE_LOG_MB` isn't a number of MB.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT_MB)
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{VARIABLE}={text}: expected the MB of output to keep of each process, such as 2048.")
    return int(text) * 2**20


class Writer:
    """Writes the output of one process, after existing output.

    Attributes:
        size: the bytes that were written, including those that were deleted since.

    Args:
        first: the first file.
        full: the size of a full file, in bytes; smaller if `most` requires that.
        stream_mask: hides secrets in the output.
        most: the bytes to keep, approximately; by default `limit()`.
    """

    def __init__(
        self, first: Path, full: int = FULL, stream_mask: StreamMask | None = None, most: int | None = None
    ) -> None:
        most = limit() if most is None else most
        self._first = first
        self._full = max(1, min(full, most // _FEWEST))
        self._files = max(_FEWEST, most // self._full)
        self._stream_mask = stream_mask or StreamMask()
        self.size, self._deleted = size(first), _deleted(first)
        self._number = max(numbers(first), default=0)
        self._file = part(first, self._number).open("ab", buffering=0)
        self._broken = False
        # The end of the output: the last words of the process.
        self.last = _end(part(first, self._number))

    def write(self, data: bytes) -> None:
        """Keep a piece of output."""
        self._keep(self._stream_mask.feed(data))

    def end(self) -> None:
        """Keep what the mask has held back, at the end of the output."""
        self._keep(self._stream_mask.end())

    def last_line(self) -> str:
        """The last line that isn't blank."""
        lines = [line.strip() for line in self.last.decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def close(self) -> None:
        """Close the file."""
        self.end()
        self._file.close()

    def _keep(self, data: bytes) -> None:
        # An empty piece must not begin another file.
        if not data:
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
        except OSError as error:
            # The disk is full, say. The program goes on, and its output is kept again when there is room.
            if not self._broken:
                log.warning("%s: %s; output is lost until this is repaired", self._first, error.strerror)
            self._broken = True

    def _cut(self) -> None:
        """Delete the oldest files between the beginning and the end, if there are too many. The note is written first."""
        head = self._files // 2
        for number in [
            number for number in numbers(self._first) if head <= number <= self._number - (self._files - head)
        ]:
            path = part(self._first, number)
            self._deleted += path.stat().st_size
            draft = self._first.with_name(f".{self._first.name}.cut")
            draft.write_text(
                f"[Footplate] {self._deleted} bytes of output are cut here: {VARIABLE} sets how much is kept.\n"
            )
            draft.replace(cut_note(self._first))
            path.unlink()


def _deleted(first: Path) -> int:
    """The bytes that were deleted from a series."""
    try:
        match = _CUT.search(cut_note(first).read_bytes())
    except FileNotFoundError:
        return 0
    return int(match[0]) if match else 0


def _end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read()


class Reader:
    """Reads a series of files while they grow."""

    def __init__(self, first: Path) -> None:
        self._first = first
        self._number = 0
        self._at = 0

    def go_back(self, lines: int) -> int:
        """Go to the start of the last complete lines, and read only from there on.

        Args:
            lines: the number of lines.

        Returns:
            The number of lines that exist, at most `lines`. Text after the last line end doesn't count.
        """
        # The line end before the first of these lines counts, too.
        missing, following = lines + 1, b""
        for number in reversed(numbers(self._first) or [0]):
            with part(self._first, number).open("rb") as file:
                stop = file.seek(0, os.SEEK_END)
                while stop:
                    start = max(0, stop - PIECE)
                    file.seek(start)
                    data = file.read(stop - start)
                    ends = [match.end() for match in _LINE_END.finditer(data)]
                    # The two characters are one line end, with the boundary between them.
                    if data.endswith(b"\r") and following == b"\n":
                        ends.pop()
                    if len(ends) >= missing:
                        self._number, self._at = number, start + ends[-missing]
                        return lines
                    missing -= len(ends)
                    stop, following = start, data[:1]
        self._number, self._at = 0, 0
        return lines + 1 - missing

    def read(self) -> bytes:
        """The next piece; empty if nothing more has been written yet, or the files are deleted."""
        while True:
            # Look for the next file before reading: if it exists, this file is complete.
            following, lost = self._following(), False
            try:
                with part(self._first, self._number).open("rb") as file:
                    file.seek(self._at)
                    data = file.read(PIECE)
                    self._at = file.tell()
            except FileNotFoundError:
                # The job or this file was deleted.
                data, lost = b"", True
            if data or following is None:
                return data
            lost = lost or following != self._number + 1
            self._number, self._at = following, 0
            if lost:
                return self._note()

    def _following(self) -> int | None:
        """The number of the file after this one; None if there is none."""
        if part(self._first, self._number + 1).exists():
            return self._number + 1
        if not cut_note(self._first).exists():
            return None
        return next((number for number in numbers(self._first) if number > self._number), None)

    def _note(self) -> bytes:
        """The line in place of deleted output, on a line of its own."""
        try:
            return b"\n" + cut_note(self._first).read_bytes()
        except FileNotFoundError:
            return b""
