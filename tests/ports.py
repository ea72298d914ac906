"""Ports of loopback for servers that tests start: each is the test's until its process ends.

A port that is merely found free may be anybody's a moment later: the kernel gives it to the next who asks for any, even to
a connection that goes out. So a socket stays bound to it, and doesn't listen: nobody is given the port then, while a server
that asks for it by its number gets it, as servers allow addresses to be used again (SO_REUSEADDR).
"""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port(number: int = 0) -> int:
    """A port that nobody listens on; of this number, if one is given.

    Raises:
        OSError: the number is somebody's.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", number))
    _held.append(held)
    return held.getsockname()[1]
