"""The end of background threads: they are joined, and a thread that doesn't end is named in a warning.

Nothing is joined during a garbage collection. An iterator that was dropped in the middle may be collected at any place in
any thread, also where that thread holds a lock of `threading` itself. To join a thread needs the same lock. Threads that
were asked to end do so by themselves.
"""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)

WARN_AFTER_S = 30.0


_collector: int | None = None


def _note_collection(phase: str, info: dict[str, Any]) -> None:
    global _collector
    _collector = threading.get_ident() if phase == "start" else None


gc.callbacks.append(_note_collection)


def collecting() -> bool:
    """Return True if this thread is in a garbage collection."""
    return _collector == threading.get_ident()


def shut_down(pool: ThreadPoolExecutor) -> None:
    """Cancel what a pool hasn't begun, and wait for its threads, but not during a garbage collection."""
    pool.shutdown(wait=not collecting(), cancel_futures=True)


def join(thread: threading.Thread, timeout_s: float, doing: str) -> bool:
    """Wait for a thread. Warn if it still runs after `timeout_s`. Return True if it is known to have ended.

    Args:
        thread: the thread, which was asked to end.
        timeout_s: how long to wait.
        doing: what may keep it busy, for the warning.
    """
    if collecting():
        return False
    thread.join(timeout_s)
    if thread.is_alive():
        log.warning("The thread %s still runs %g s after it was asked to end: %s.", thread.name, timeout_s, doing)
    return not thread.is_alive()


def join_however_long(thread: threading.Thread, doing: str) -> None:
    """Wait without a limit for a thread that must end before anything else may go on. Warn after half a minute."""
    if not collecting() and not join(thread, WARN_AFTER_S, doing):
        thread.join()
