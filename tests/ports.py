"""Loopback ports for servers that tests start. A port belongs to the test until its process ends.

A port that was free a moment ago may be taken: the kernel gives it to the next process that asks for any port, even for an
outgoing connection. So a socket stays bound to the port and doesn't listen. Then the kernel gives the port to no other
process, but a server that asks for it by number gets it, because servers allow addresses to be reused (SO_REUSEADDR).
"""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port(number: int = 0) -> int:
    """Reserve a port on which nothing listens, or the port with the given number.

    Raises:
        OSError: another process has this port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", number))
    _held.append(held)
    return held.getsockname()[1]
