"""A log of refused connections with a limited rate.

Anybody can connect to an open port, as often as they like. The first refusal is logged at once. Later ones are counted, and
the count is logged at most once in `EVERY_S`.
"""

from __future__ import annotations

import logging
import threading
import time

EVERY_S = 60.0


class RefusalLog:
    """Counts refused connections and logs them. It may be used from several threads.

    Args:
        log: where the lines go.
        reason: why connections are refused here.
    """

    def __init__(self, log: logging.Logger, reason: str) -> None:
        self._log = log
        self._reason = reason
        self._lock = threading.Lock()
        # The number of refusals since the last log line.
        self._count = 0
        self._latest = ""
        self._quiet_until = 0.0

    def add(self, peer: str) -> None:
        """Count a refused connection from this address."""
        with self._lock:
            self._count += 1
            self._latest = peer
        self.flush()

    def flush(self) -> None:
        """Log the count, if the last line is long enough ago. Call this from time to time."""
        now = time.monotonic()
        with self._lock:
            count, latest = self._count, self._latest
            if not count or now < self._quiet_until:
                return
            self._count, self._quiet_until = 0, now + EVERY_S

        if count == 1:
            self._log.warning("a connection from %s was refused: %s", latest, self._reason)
        else:
            self._log.warning("%d connections were refused, the last one from %s: %s", count, latest, self._reason)
