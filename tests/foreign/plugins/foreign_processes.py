"""Finds and ends processes by a mark in their environment, which they keep in sessions and groups of their own.

The runner marks each inner run, the recorder ends what a case that timed out has left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "FOREIGN_RUN"


def marked(mark: str) -> set[int]:
    """The processes whose mark begins so, except this one."""
    wanted = f"{MARK}={mark}".encode()
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            environment = (process / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in environment):
                found.add(int(process.name))
    return found - {os.getpid()}


def end(mark: str, spared: set[int] = frozenset(), limit_s: float = 10.0) -> set[int]:
    """End the processes with a mark, and what they start meanwhile; return those that were there."""
    ended: set[int] = set()
    until = time.monotonic() + limit_s
    while (remaining := marked(mark) - spared) and time.monotonic() < until:
        for process in remaining - ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        ended |= remaining
        time.sleep(0.02)
    return ended
