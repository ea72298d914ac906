"""Signals: the handler only notes a signal. The training loop reads the note between two steps and ends in order.

After SIGTERM (a preempted machine, a scheduler) or the first SIGINT (Ctrl-C), the loop finishes the step and saves. Then it
exits with 143, or raises KeyboardInterrupt. A second SIGINT stops at once. A cloud's preemption notice
(`training/preemption`) counts as SIGTERM.
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
    """Call `note` with SIGTERM and SIGINT inside a `with` block. Works in the main thread only, as Python's signals do."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class Signals:
    """Inside a `with` block, notes SIGTERM and SIGINT in `received`, and the reason in `reason`. Main thread only."""

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
        """Forget the signal, so that it doesn't end the next run too."""
        self.received, self.reason = None, ""

    def terminate(self, reason: str) -> None:
        """Note something that counts as SIGTERM but isn't a signal. Any thread may call it."""
        self.reason, self.received = reason, signal.SIGTERM

    def agree(self, number: signal.Signals) -> None:
        """Note a signal that another rank has received."""
        self.received = number
        self.reason = self.reason or number.name

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self.reason = self.received.name

    def end(self) -> BaseException:
        """Return the exception that ends the run."""
        if self.received == signal.SIGINT:
            return KeyboardInterrupt()
        assert self.received is not None
        return SystemExit(EXIT_CODE[self.received])
