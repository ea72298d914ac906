"""When to ask the next time: later and later, until something happens."""

from __future__ import annotations

import time


class Pace:
    """One kind of question.

    Attributes:
        due: when it is to be asked, on the monotonic clock.

    Args:
        bounds: the shortest and the longest time between two of them, in seconds.
    """

    def __init__(self, bounds: tuple[float, float]) -> None:
        self._bounds = bounds
        self._delay_s = bounds[0]
        self.due = 0.0

    def quicken(self, within_s: float | None = None) -> None:
        """Something has happened: ask within so many seconds, or else the shortest time."""
        self._delay_s = self._bounds[0]
        self.due = time.monotonic() + (self._delay_s if within_s is None else within_s)

    def later(self, factor: float = 1.3) -> None:
        """Nothing has; each time it is so many times as long until the next question."""
        self.due = time.monotonic() + self._delay_s
        self._delay_s = min(self._delay_s * factor, self._bounds[1])
