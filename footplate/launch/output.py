"""What workers write, shown to the user: line by line, with the rank before each line, and kept whole in files.

Which ranks' lines are shown is chosen (`Show`); files get all. A line that a worker means for whoever made the launch
(`worker.log_to_driver`) is always shown.

A line is passed on when it is complete; a carriage return completes one, too, so that a progress bar that was written for a
terminal stays readable. What rank 0 writes to a terminal is passed on as it is (`terminal.py`); a line of another rank then
first clears the line that the cursor is in, which the progress bar draws again.
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
from footplate.launch.crew import Stream, Wrote
from footplate.launch.worker import TOLD

log = logging.getLogger(__name__)

Show = Literal["all", "rank_0", "log_callback_only"]

LONGEST_LINE = 1 << 16  # characters without an end, after which a line is cut
CLEAR_LINE = "\r\x1b[K"

_END = re.compile(r"\r\n|\n|\r(?!\Z)")  # the end of a piece may part "\r" from its "\n"


class Lines:
    """Cuts a stream of bytes into lines, each with its end."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        text = self._rest + self._decode.decode(data)
        ends = [found.end() for found in _END.finditer(text)]
        lines = [text[start:end] for start, end in pairwise([0, *ends])]
        self._rest = text[ends[-1] :] if ends else text
        if len(self._rest) > LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[str]:
        """The last line, which nothing completes any more."""
        text, self._rest = self._rest + self._decode.decode(b"", final=True), ""
        return [text if text.endswith("\r") else text + "\n"] if text else []


class Output:
    """The output of all ranks of an attempt after another.

    Args:
        log_dir: where each rank's output is kept whole, in `attempt-0/rank-0.log` and so on; None to keep none.
        show: `"all"` ranks' lines, each with its rank; `"rank_0"`'s as they are; only what is logged for the driver.
    """

    def __init__(self, log_dir: Path | None, show: Show = "all") -> None:
        self._log_dir = log_dir
        self._show_what = show
        self._logs: dict[int, IO[bytes]] = {}
        self._lines: dict[tuple[int, Stream], Lines] = {}
        self._inside_line = False  # whether a terminal's cursor stands in a line of rank 0

    def terminals(self) -> frozenset[Stream]:
        """Which of rank 0's streams are to be a terminal."""
        return frozenset() if self._show_what == "log_callback_only" else terminal.terminals()

    def begin(self, attempt: int, world_size: int) -> None:
        """Open the files of an attempt."""
        self.close()
        if self._log_dir is not None:
            place = self._log_dir / f"attempt-{attempt}"
            place.mkdir(parents=True, exist_ok=True)
            self._logs = {rank: (place / f"rank-{rank}.log").open("ab", buffering=0) for rank in range(world_size)}

    def take(self, piece: Wrote) -> None:
        """Pass a piece on."""
        self.keep(piece.rank, piece.data)
        if piece.raw:
            self._inside_line = not piece.data.endswith(b"\n")
            stream = getattr(sys, piece.stream)
            stream.buffer.write(piece.data.replace(TOLD.encode(), b""))  # a terminal, so one with bytes beneath
            stream.flush()
            return
        lines = self._lines.setdefault((piece.rank, piece.stream), Lines())
        self._show(piece.rank, piece.stream, lines.feed(piece.data))

    def keep(self, rank: int, data: bytes) -> None:
        """Write into a rank's file only."""
        if rank not in self._logs:
            return
        try:
            self._logs[rank].write(data.replace(TOLD.encode(), b""))
        except OSError as error:  # a full disk: what can't be kept is still shown
            file = self._logs.pop(rank)
            file.close()
            log.warning("the output of rank %d is no longer kept in %s: %s", rank, file.name, error)

    def end(self, rank: int) -> None:
        """A rank has ended: pass on the lines that it left incomplete."""
        for (of, stream), lines in self._lines.items():
            if of == rank:
                self._show(rank, stream, lines.end())

    def close(self) -> None:
        """Close the files of the attempt."""
        for log in self._logs.values():
            log.close()
        self._logs, self._lines = {}, {}

    def _show(self, rank: int, stream: Stream, lines: list[str]) -> None:
        whole = self._show_what == "all" or (self._show_what == "rank_0" and rank == 0)
        shown = [line.removeprefix(TOLD) for line in lines if whole or line.startswith(TOLD)]
        if not shown:
            return
        clear, self._inside_line = CLEAR_LINE if self._inside_line else "", False
        before = "" if self._show_what == "rank_0" and rank == 0 else f"[rank {rank}] "
        _write(stream, clear + "".join(before + line for line in shown))


def _write(stream: Stream, text: str) -> None:
    """Through Python's own stream, which in a notebook is the only way to the user."""
    out = getattr(sys, stream)
    if out is None:
        return
    try:
        out.write(text)
    except UnicodeEncodeError:  # a terminal that isn't UTF-8
        out.write(text.encode(out.encoding or "ascii", "backslashreplace").decode(out.encoding or "ascii"))
    out.flush()
