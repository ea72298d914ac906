"""Finds and kills processes by a mark in their environment. They keep the mark in new sessions and process groups.

The runner marks each inner run. The recorder kills the processes that a case has left behind when it timed out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "FOREIGN_RUN"


def marked(mark: str) -> set[int]:
    """The processes whose mark begins with `mark`, except this one."""
    wanted = f"{MARK}={mark}".encode()
    processes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in environment):
                processes.add(int(process.name))
    return processes - {os.getpid()}


def end(mark: str, spared: set[int] = frozenset(), limit_s: float = 10.0) -> set[int]:
    """Kill the processes with a mark, including those that they start meanwhile. Return the killed processes."""
    ended: set[int] = set()
    until = time.monotonic() + limit_s
    while (remaining := marked(mark) - spared) and time.monotonic() < until:
        for process in remaining - ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        ended |= remaining
        time.sleep(0.02)
    return ended
