"""SIGTERM and SIGINT while a launch runs: noted, and heeded by the supervisor's loop."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Interrupts:
    """While entered, collects SIGTERM and SIGINT in `received` and calls `wake`. Does nothing outside the main thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: deque[signal.Signals] = deque()
        self._wake = wake
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number))
        self._wake()
