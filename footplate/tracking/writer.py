"""Background writing for loggers: `put` appends to a queue, and a thread delivers the records in order.

    writer = BackgroundWriter("csv", deliver)     # deliver(records) is called in the thread, about once a second
    writer.put(record)                            # from the training loop
    writer.flush(1.0)                             # wait at most 1 s until all earlier records are delivered
    writer.close(5.0)

If `deliver` raises, it gets the same records again, with increasing delays, until it succeeds. New records wait behind
them. So `deliver` must have no partial effect when it raises.
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
# The most records in the queue. Beyond that, the oldest are dropped, so that training doesn't run out of memory.
MOST_WAITING = 200_000


class BackgroundWriter:
    """A queue, and a thread that delivers its records.

    Args:
        name: the name of the output, for the thread's name and for warnings.
        deliver: writes a non-empty list of records, or raises and writes none.
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
        """Queue a record. Don't change it afterwards. Never blocks and never raises."""
        self._queue.append(record)

    def flush(self, timeout_s: float) -> bool:
        """Deliver now, and wait at most `timeout_s`. Return True if all earlier records are delivered."""
        reached = threading.Event()
        self._queue.append(_Marker(reached))
        self._wake.set()
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush, then end the thread. It is joined unless `deliver` hangs. Return the result of `flush`."""
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
        """Deliver `batch`, which a failure left, then all queued records. Records that fail stay in `batch`."""
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
        """Move records from the queue into `batch`, up to the next marker; return the marker."""
        while self._queue:
            record = self._queue.popleft()
            if isinstance(record, _Marker):
                return record
            batch.append(record)
        return None

    def _report_failure(self, error: Exception) -> None:
        if not self._failing:
            log.warning("%s can't be written (%s). Training continues, and the write is retried.", self._name, error)
        elif len(self._queue) == MOST_WAITING:
            log.warning("%s still can't be written (%s). The oldest records are dropped.", self._name, error)
        self._failing = True


class _Marker:
    """A position in the queue. `reached` is set when all records before it are delivered."""

    def __init__(self, reached: threading.Event) -> None:
        self.reached = reached
