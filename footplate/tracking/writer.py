"""Slow work off the training loop: `put` costs a list append, a thread of its own does the rest, in order.

    writer = BackgroundWriter("csv", deliver)     # deliver(records) is called in the thread, about once a second
    writer.put(record)                            # from the training loop
    writer.flush(1.0)                             # wait, but not for long, until all that was put is delivered
    writer.close(5.0)

When `deliver` raises, the very same records are given to it again, at growing intervals, until it succeeds; what is
put meanwhile waits behind them. So `deliver` must leave nothing half done when it raises.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from footplate.core.threads import join

log = logging.getLogger(__name__)

JOIN_S = 5.0
INTERVAL_S = 1.0
LONGEST_PAUSE_S = 30.0
MOST_WAITING = 200_000  # records; beyond them the oldest are dropped, since training must not run out of memory


class BackgroundWriter:
    """A queue and the thread that empties it into `deliver`.

    Args:
        name: what is written, for the thread's name and for warnings.
        deliver: takes a non-empty list of records; all of them or, raising, none.
    """

    def __init__(self, name: str, deliver: Callable[[list[Any]], None]) -> None:
        self._name = name
        self._deliver = deliver
        self._queue: deque[Any] = deque(maxlen=MOST_WAITING)
        self._wake = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=f"footplate-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Any) -> None:
        """Queue a record; the caller must not change it afterwards. Never blocks, never raises."""
        self._queue.append(record)

    def flush(self, timeout_s: float) -> bool:
        """Deliver now. Waits until all that was put before is delivered, at most `timeout_s`; tells whether it is."""
        reached = threading.Event()
        self._queue.append(_Marker(reached))
        self._wake.set()
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """`flush`, then end the thread, which is joined unless `deliver` hangs."""
        delivered = self.flush(timeout_s)
        self._closed = True
        self._wake.set()
        join(self._thread, JOIN_S, f"{self._name} is being written")
        return delivered

    def _run(self) -> None:
        batch: list[Any] = []
        pause_s = INTERVAL_S
        while not self._closed:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._closed:
                return
            try:
                self._empty_queue(batch)
            except Exception as error:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._report_failure(error)
            else:
                pause_s = INTERVAL_S
                self._failing = False

    def _empty_queue(self, batch: list[Any]) -> None:
        """Deliver `batch`, left by a failure, then all that is queued; what fails stays in `batch`."""
        while batch or self._queue:
            marker = None if batch else self._take(batch)
            if batch:
                try:
                    self._deliver(list(batch))
                except Exception:
                    if marker is not None:
                        self._queue.appendleft(marker)
                    raise
                batch.clear()
            if marker is not None:
                marker.reached.set()

    def _take(self, batch: list[Any]) -> _Marker | None:
        """Move the queue into `batch`, up to the next marker, which is returned."""
        while self._queue:
            record = self._queue.popleft()
            if isinstance(record, _Marker):
                return record
            batch.append(record)
        return None

    def _report_failure(self, error: Exception) -> None:
        if not self._failing:
            log.warning("%s can't be written (%s); training goes on and it is tried again.", self._name, error)
        elif len(self._queue) == MOST_WAITING:
            log.warning("%s still can't be written (%s); the oldest records are being dropped.", self._name, error)
        self._failing = True


class _Marker:
    """A place in the queue; `reached` is set when all before it is delivered."""

    def __init__(self, reached: threading.Event) -> None:
        self.reached = reached
