"""SIGTERM and SIGINT while a launch runs: noted, and heeded by the supervisor's loop."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable

from footplate.core.signals import heard


class Interrupts:
    """While entered, collects SIGTERM and SIGINT in `received` and calls `wake`. Does nothing outside the main thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: deque[signal.Signals] = deque()
        self._wake = wake
        self._hearing = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        self._hearing.enter_context(heard(self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._hearing.close()

    def _note(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number))
        self._wake()
