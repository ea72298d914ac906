"""Signals: a handler only notes that one came; the loop looks between steps and ends in an orderly way.

SIGTERM (a preempted machine, a scheduler) and the first SIGINT (Ctrl-C): finish the step, save, exit with 143 or raise
KeyboardInterrupt. A second SIGINT stops at once. A cloud's notice (see `notice.py`) counts as SIGTERM.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

EXIT_CODE = {signal.SIGTERM: 143}


class Signals:
    """While entered, notes SIGTERM and SIGINT in `received`, and in `reason` what came. Only the main thread hears them."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.reason = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self.received, self.reason = None, ""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def terminate(self, reason: str) -> None:
        """Count as SIGTERM something that is not a signal; callable from any thread."""
        self.reason, self.received = reason, signal.SIGTERM

    def agree(self, number: signal.Signals) -> None:
        """Take what has come on some rank for what has come here."""
        self.received = number
        self.reason = self.reason or number.name

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self.reason = self.received.name

    def end(self) -> BaseException:
        """What the run ends with."""
        if self.received == signal.SIGINT:
            return KeyboardInterrupt()
        assert self.received is not None
        return SystemExit(EXIT_CODE[self.received])
