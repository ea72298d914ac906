"""Processes that must not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent ends. Does nothing where the kernel can't (not Linux).

    More precisely, when the *thread* of the parent ends that started this process. If the parent, whose id is `parent`, has
    ended already, this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def kill_group(leader: int) -> None:
    """Kill a process that leads a group, and what it has started, as far as any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
