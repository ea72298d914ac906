"""Messages between the supervisor and the fork server: frames (`core/net/framing.py`), with file descriptors beside them.

The two ends are a pair of sockets that one process made for its child. So there is no stranger, and no handshake.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from footplate.core.net.framing import HEADER_BYTES, encode_frame, receive_frame

MAX_FDS = 8


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message. The kernel duplicates the descriptors for the receiver.

    Raises:
        OSError: the other end has gone.
    """
    frame = encode_frame(message)
    if fds:
        # The descriptors go with the header, which the receiver reads by itself.
        socket.send_fds(connection, [frame[:HEADER_BYTES]], fds)
        frame = frame[HEADER_BYTES:]
    connection.sendall(frame)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message and its descriptors, which the caller closes. Return None if the other end has gone."""
    try:
        start, fds, _, _ = socket.recv_fds(connection, HEADER_BYTES, MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        frame = receive_frame(connection, start=start) if start else None
    except ConnectionError:
        return None
    return None if frame is None else (frame.message, list(fds))
