"""Connections to machines that have gone silent, which the kernel breaks after some seconds.

A machine without power, or behind a broken link, doesn't close its connections. By default, the kernel waits a quarter of
an hour for an answer to bytes that it has sent, and without limit if it only waits for bytes. With keepalive and a time
limit it asks the other machine's kernel, and then breaks the connection. A suspended process keeps its connections, because
its kernel answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

SILENCE_S = 30
# Between ranks. It is longer, so that a launch notices a lost machine before the ranks of the other machines fail.
RANKS_SILENCE_S = 60


def detect_silence(connection: socket.socket, silence_s: int = SILENCE_S) -> None:
    """Have the kernel break a connection to a machine that answers nothing for about `silence_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": silence_s // 3, "TCP_KEEPINTVL": silence_s // 6, "TCP_KEEPCNT": 4}
    if sys.platform == "linux":
        # Milliseconds for the peer to acknowledge bytes that were sent.
        options["TCP_USER_TIMEOUT"] = silence_s * 1000
    for name, value in options.items():
        with contextlib.suppress(AttributeError, OSError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def detect_silence_of_ranks() -> Iterator[None]:
    """Detect silence on all connections to other machines that are made within the block, by gloo and torch's store.

    Neither has an option for it. The options of a socket belong to all of its descriptors, so this sets them on copies of
    the process's new descriptors. Only Linux lists these.
    """
    before = _sockets().keys()
    yield
    for inode, descriptor in _sockets().items():
        if inode not in before:
            # It may be closed meanwhile.
            with contextlib.suppress(OSError):
                _watch(descriptor)


def _sockets() -> dict[str, int]:
    """A descriptor of each socket of this process, by the socket's name in `/proc`."""
    sockets = {}
    with contextlib.suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:"):
                    sockets[target] = int(link.name)
    return sockets


def _watch(descriptor: int) -> None:
    blocking = os.get_blocking(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        # With `socket.setdefaulttimeout`, a new socket object doesn't block, nor does then the descriptor.
        os.set_blocking(descriptor, blocking)
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            peer = connection.getpeername()[0].partition("%")[0]
            if not ipaddress.ip_address(peer).is_loopback:
                detect_silence(connection, RANKS_SILENCE_S)
