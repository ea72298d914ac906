"""Messages between the supervisor and the nursery: JSON with its length before it, and file descriptors beside it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_FDS = 8


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message; the descriptors are duplicated for the receiver.

    Raises:
        OSError: the other end is gone.
    """
    body = json.dumps(message).encode()
    if fds:
        socket.send_fds(connection, [_LENGTH.pack(len(body))], fds)
        connection.sendall(body)
    else:
        connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which the caller closes; None when the other end is gone."""
    try:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        head += _exactly(connection, _LENGTH.size - len(head)) if head else b""
        if not head:
            return None
        return json.loads(_exactly(connection, _LENGTH.unpack(head)[0])), list(fds)
    except (ConnectionError, EOFError):
        return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
