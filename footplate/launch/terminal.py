"""A pseudo-terminal between rank 0 and the user's terminal.

Rank 0 then writes to a terminal, and may draw a progress bar. The supervisor still sees all of its output, and keeps the
other ranks' lines out of the bar.
"""

from __future__ import annotations

import contextlib
import os
import sys

from footplate.launch.worker_group import Stream


def terminals() -> frozenset[Stream]:
    """The output streams of this process that are terminals now. None in a notebook, in a pipe, under a test runner."""
    names: tuple[Stream, ...] = ("stdout", "stderr")
    return frozenset(name for name in names if _descriptor(name) is not None)


def open_pair(stream: Stream) -> tuple[int, int]:
    """Open a pseudo-terminal; return our end, and the worker's.

    It passes bytes on unchanged, and has the size of the real terminal.
    """
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
    # The stream of a notebook isn't a file.
    with contextlib.suppress(Exception):
        fd = getattr(sys, name).fileno()
        return fd if os.isatty(fd) else None
    return None
