"""Waiting for many at once: a selector whose keys' data are functions without arguments, called when theirs is ready.

A `Bell` is what a signal handler or another thread can end the wait by.
"""

from __future__ import annotations

import contextlib
import selectors
import socket


def heed(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Wait until something is ready, or so long, and call what is to be called then.

    What one of them has unregistered is not called any more, even if its descriptor was given to another in between.
    """
    for key, _ in selector.select(timeout_s):
        if selector.get_map().get(key.fd) is key:
            key.data()


class Bell:
    """Rung, it ends the wait of its selector."""

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
