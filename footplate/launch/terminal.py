"""A pseudo-terminal between rank 0 and the terminal that the user looks at.

Rank 0 then takes its output for a terminal's and may draw a progress bar, while the supervisor sees all that it writes, and
keeps the other ranks' lines out of the bar.
"""

from __future__ import annotations

import contextlib
import os
import sys

from footplate.launch.crew import Stream


def terminals() -> frozenset[Stream]:
    """Which of this process's output streams are terminals now. None in a notebook, in a pipe, under a test runner."""
    names: tuple[Stream, ...] = ("stdout", "stderr")
    return frozenset(name for name in names if _descriptor(name) is not None)


def open_pair(stream: Stream) -> tuple[int, int]:
    """Our end, and the end that a worker writes to, which passes bytes on as they are and has the terminal's size."""
    import tty

    ours, theirs = os.openpty()
    tty.setraw(theirs)
    match_size(ours, stream)
    return ours, theirs


def match_size(ours: int, stream: Stream) -> None:
    """Give the pseudo-terminal the present size of the real one."""
    import termios

    real = _descriptor(stream)
    if real is not None:
        with contextlib.suppress(termios.error, OSError):
            size = termios.tcgetwinsize(real)
            if size != termios.tcgetwinsize(ours):
                termios.tcsetwinsize(ours, size)


def _descriptor(name: Stream) -> int | None:
    """The descriptor of a stream that is a terminal, else None."""
    with contextlib.suppress(Exception):  # whatever stands in for a file in a notebook
        fd = getattr(sys, name).fileno()
        return fd if os.isatty(fd) else None
    return None
