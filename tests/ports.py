"""Ports for servers that tests start. A port belongs to the test until its process ends.

A port that was free a moment ago may be taken: the kernel gives it to the next process that asks for any port, even for an
outgoing connection. So a socket stays bound to the port and doesn't listen. Then the kernel gives the port to no other
process, but a server that asks for it by number gets it, because servers allow addresses to be reused (SO_REUSEADDR).

The socket is bound to all addresses. Otherwise another process could get the port on one of the others, and a server that
listens on all of them, such as torch's store, would not get it.
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
    held.bind(("", number))
    _held.append(held)
    return held.getsockname()[1]
