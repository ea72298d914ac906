"""The end of background threads: they are joined, and a thread that doesn't end is named in a warning."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger(__name__)

WARN_AFTER_S = 30.0


def join(thread: threading.Thread, timeout_s: float, doing: str) -> bool:
    """Wait for a thread. Warn if it still runs after `timeout_s`. Return True if it has ended.

    Args:
        thread: the thread, which was asked to end.
        timeout_s: how long to wait.
        doing: what may keep it busy, for the warning.
    """
    thread.join(timeout_s)
    if thread.is_alive():
        log.warning("The thread %s still runs %g s after it was asked to end: %s.", thread.name, timeout_s, doing)
    return not thread.is_alive()


def join_however_long(thread: threading.Thread, doing: str) -> None:
    """Wait without a limit for a thread that must end before anything else may go on. Warn after half a minute."""
    if not join(thread, WARN_AFTER_S, doing):
        thread.join()
