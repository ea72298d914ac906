"""Signals: a handler only notes that one came; the loop looks between steps and ends in an orderly way.

SIGTERM (a preempted machine, a scheduler) and the first SIGINT (Ctrl-C): finish the step, save, exit with 143 or raise
KeyboardInterrupt. A second SIGINT stops at once. A cloud's notice (see `training/preemption.py`) counts as SIGTERM.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = {signal.SIGTERM: 143}


@contextlib.contextmanager
def heard(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While entered, `note` is called with SIGTERM and SIGINT; only in the main thread, which alone can hear them."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class Signals:
    """While entered, notes SIGTERM and SIGINT in `received`, and in `reason` what came. Only the main thread hears them."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.reason = ""
        self._hearing = contextlib.ExitStack()

    def __enter__(self) -> Signals:
        self._hearing.enter_context(heard(self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._hearing.close()

    def forget(self) -> None:
        """Begin anew: what ended one run is not to end the next."""
        self.received, self.reason = None, ""

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
