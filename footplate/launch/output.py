"""The output of workers, shown to the user line by line with the rank before each line, and kept whole in files.

`Show` chooses the ranks whose lines are shown. Files get all lines. A line for the driver (`worker.log_to_driver`) is
always shown.

A line is passed on when it is complete. A carriage return completes a line, too, so that a progress bar for a terminal
stays readable. Rank 0's output for a terminal is passed on unchanged (`terminal.py`). Before a line of another rank, the
line with the cursor is cleared; the progress bar draws it again.
"""

from __future__ import annotations

import codecs
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import IO, Literal

from footplate.launch import terminal
from footplate.launch.worker import FOR_DRIVER
from footplate.launch.worker_group import Stream, Wrote

log = logging.getLogger(__name__)

Show = Literal["all", "rank_0", "log_callback_only"]

# Length limit of a line. A longer line is cut.
MAX_CHARACTERS = 1 << 16
CLEAR_LINE = "\r\x1b[K"

# A piece may end between "\r" and its "\n".
_END = re.compile(r"\r\n|\n|\r(?!\Z)")


class Lines:
    """Cuts a stream of bytes into lines, each with its end."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        text = self._rest + self._decode.decode(data)
        ends = [match.end() for match in _END.finditer(text)]
        lines = [text[start:end] for start, end in pairwise([0, *ends])]
        self._rest = text[ends[-1] :] if ends else text
        if len(self._rest) > MAX_CHARACTERS:
            lines += self.end()
        return lines

    def end(self) -> list[str]:
        """Return the last, incomplete line."""
        text, self._rest = self._rest + self._decode.decode(b"", final=True), ""
        return [text if text.endswith("\r") else text + "\n"] if text else []


class Output:
    """The output of all ranks, for one attempt after another.

    Args:
        log_dir: the directory for each rank's whole output, in `attempt-0/rank-0.log` and so on; None to keep none.
        show: the lines to show: of `"all"` ranks, each with its rank; of `"rank_0"`, unchanged; or with
            `"log_callback_only"` only messages for the driver.
    """

    def __init__(self, log_dir: Path | None, show: Show = "all") -> None:
        self._log_dir = log_dir
        self._show_what = show
        self._logs: dict[int, IO[bytes]] = {}
        self._lines: dict[tuple[int, Stream], Lines] = {}
        # True while the terminal's cursor is inside a line of rank 0.
        self._inside_line = False

    def terminals(self) -> frozenset[Stream]:
        """The streams of rank 0 that are to be a terminal."""
        return frozenset() if self._show_what == "log_callback_only" else terminal.terminals()

    def begin(self, attempt: int, world_size: int) -> None:
        """Open the files of an attempt."""
        self.close()
        if self._log_dir is not None:
            directory = self._log_dir / f"attempt-{attempt}"
            directory.mkdir(parents=True, exist_ok=True)
            files = {rank: directory / f"rank-{rank}.log" for rank in range(world_size)}
            self._logs = {rank: file.open("ab", buffering=0) for rank, file in files.items()}

    def take(self, piece: Wrote) -> None:
        """Keep a piece of output, and show its lines."""
        self.keep(piece.rank, piece.data)
        if piece.raw:
            self._inside_line = not piece.data.endswith(b"\n")
            stream = getattr(sys, piece.stream)
            # A terminal's stream has a buffer of bytes.
            stream.buffer.write(piece.data.replace(FOR_DRIVER.encode(), b""))
            stream.flush()
            return
        lines = self._lines.setdefault((piece.rank, piece.stream), Lines())
        self._show(piece.rank, piece.stream, lines.feed(piece.data))

    def keep(self, rank: int, data: bytes) -> None:
        """Write into a rank's file, and show nothing."""
        if rank not in self._logs:
            return
        try:
            self._logs[rank].write(data.replace(FOR_DRIVER.encode(), b""))
        except OSError as error:
            # The disk may be full, for instance. The output is still shown.
            file = self._logs.pop(rank)
            file.close()
            log.warning("the output of rank %d is no longer kept in %s: %s", rank, file.name, error)

    def end(self, rank: int) -> None:
        """Show the incomplete lines of a rank that has ended."""
        for (writer, stream), lines in self._lines.items():
            if writer == rank:
                self._show(rank, stream, lines.end())

    def close(self) -> None:
        """Close the files of the attempt."""
        for log in self._logs.values():
            log.close()
        self._logs, self._lines = {}, {}

    def _show(self, rank: int, stream: Stream, lines: list[str]) -> None:
        whole = self._show_what == "all" or (self._show_what == "rank_0" and rank == 0)
        shown = [line.removeprefix(FOR_DRIVER) for line in lines if whole or line.startswith(FOR_DRIVER)]
        if not shown:
            return
        clear, self._inside_line = CLEAR_LINE if self._inside_line else "", False
        before = "" if self._show_what == "rank_0" and rank == 0 else f"[rank {rank}] "
        _write(stream, clear + "".join(before + line for line in shown))


def _write(stream: Stream, text: str) -> None:
    """Write to Python's own stream. In a notebook, no other one reaches the user."""
    out = getattr(sys, stream)
    if out is None:
        return
    try:
        out.write(text)
    except UnicodeEncodeError:
        # The terminal's encoding isn't UTF-8.
        out.write(text.encode(out.encoding or "ascii", "backslashreplace").decode(out.encoding or "ascii"))
    out.flush()
