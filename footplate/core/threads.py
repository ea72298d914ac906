"""The end of background threads: they are joined, and one that doesn't end is named."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger(__name__)

TELL_S = 30.0  # after which a wait without an end is worth a warning


def join(thread: threading.Thread, timeout_s: float, doing: str) -> bool:
    """Wait for a thread; warn if it still runs after `timeout_s`. Returns whether it has ended.

    Args:
        thread: which was asked to end.
        timeout_s: how long to wait.
        doing: what it may be busy with, for the warning.
    """
    thread.join(timeout_s)
    if thread.is_alive():
        log.warning("The thread %s still runs %g s after it was asked to end: %s.", thread.name, timeout_s, doing)
    return not thread.is_alive()


def join_however_long(thread: threading.Thread, doing: str) -> None:
    """Wait for a thread that must have ended before anything else may go on; warn after half a minute."""
    if not join(thread, TELL_S, doing):
        thread.join()
