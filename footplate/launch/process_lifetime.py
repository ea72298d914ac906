"""Processes that must not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

# The number of PR_SET_PDEATHSIG in linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Longest wait for a killed process that the kernel can't end at once.
_WAIT_S = 5.0


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent ends. Does nothing where the kernel can't (not Linux).

    More precisely, the kernel sends it when the *thread* ends that started this process. If the parent, with the id
    `parent`, has ended already, this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def kill_group(leader: int) -> None:
    """Kill a process that leads a group, and what it has started, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_marked(name: str, value: str) -> None:
    """Kill all processes but this one that were started with a variable of this value, and wait until they are gone.

    Children inherit the variable, so this also finds a process that has left its group and session. It doesn't find a
    process whose environment was cleared, or that belongs to another user.
    """
    deadline = time.monotonic() + _WAIT_S
    while [pid for pid in _pids() if _kill_if_marked(pid, name, value)] and time.monotonic() < deadline:
        time.sleep(0.01)


def _pids() -> list[int]:
    if sys.platform == "linux":
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    else:
        import psutil

        pids = psutil.pids()
    return [pid for pid in pids if pid != os.getpid()]


def _kill_if_marked(pid: int, name: str, value: str) -> bool:
    """Kill a process if it has the variable; return True if it had."""
    if sys.platform != "linux":
        import psutil

        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get(name) == value:
                process.kill()
                return True
        return False
    marker = os.fsencode(f"{name}={value}")
    with contextlib.suppress(OSError):
        if marker not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        # From here on, the number can't come to mean another process.
        process = os.pidfd_open(pid)
        try:
            if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return True
        finally:
            os.close(process)
    return False
