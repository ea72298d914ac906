"""Waiting for several descriptors at once, with a selector whose keys have functions as their data.

The function of a key is called, without arguments, when its descriptor is ready. A signal handler or another thread ends
the wait with a `Waker`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket


def dispatch_ready(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Wait until a descriptor is ready, at most `timeout_s`, and call the functions of those that are.

    If one of these functions unregisters another descriptor, the function of that one isn't called any more, even if its
    number was given to another descriptor meanwhile.
    """
    for key, _ in selector.select(timeout_s):
        if selector.get_map().get(key.fd) is key:
            key.data()


class Waker:
    """Ends the wait of its selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        selector.register(self._receiver, selectors.EVENT_READ, self._drain)

    def wake(self) -> None:
        """End the wait. A signal handler may call this, also after `close`."""
        with contextlib.suppress(OSError):
            self._sender.send(b"!")

    def close(self) -> None:
        """Close both ends. Call this when the selector is closed."""
        self._receiver.close()
        self._sender.close()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)
