"""How a wait for other processes is ended from a signal handler or another thread."""

from __future__ import annotations

import contextlib
import selectors
import socket


class Bell:
    """Rung, it has its selector return; the data of the selector's keys are functions without arguments."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._heard, self._rung = socket.socketpair()
        for end in (self._heard, self._rung):
            end.setblocking(False)
        selector.register(self._heard, selectors.EVENT_READ, self._hear)

    def ring(self) -> None:
        """May be called from a signal handler, and when the bell is closed."""
        with contextlib.suppress(OSError):
            self._rung.send(b"!")

    def close(self) -> None:
        """To be called when the selector is closed."""
        self._heard.close()
        self._rung.close()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard.recv(4096)
