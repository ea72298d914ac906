"""A supervisor for a trial, asked of the fork server of its tuning."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from footplate.launch import wire

SOCKET = "fork_server.sock"
# A fork takes milliseconds. A pass must not wait for a fork server that is stopped.
PATIENCE_S = 5.0


@dataclass(frozen=True)
class ForkedSupervisor:
    """A process that will supervise the job that it gets.

    Attributes:
        pid: its process id.
    """

    pid: int
    _connection: socket.socket

    def assign(self, name: str, environment: Mapping[str, str]) -> None:
        """Give the process its job. If it has died meanwhile, the next reconcile pass finds that.

        Args:
            name: the job's name.
            environment: all variables of the supervisor.
        """
        with self._connection, suppress(OSError):
            wire.send(self._connection, {"name": name, "environment": dict(environment)})


def request_supervisor(folder: Path) -> ForkedSupervisor | None:
    """Ask for a process that waits for its job; return None if there is no fork server, or if it refuses.

    Args:
        folder: the folder of the tuning's job.
    """
    connection = _connect(folder)
    if connection is None:
        return None
    connection.settimeout(PATIENCE_S)
    received = None
    with suppress(OSError):
        received = wire.receive(connection)
    if received is None:
        connection.close()
        return None
    return ForkedSupervisor(received[0]["pid"], connection)


def _connect(folder: Path) -> socket.socket | None:
    if not (folder / SOCKET).exists():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            # The address of a socket is shorter than the path of a folder may be.
            connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
        finally:
            os.close(directory)
    except OSError:
        connection.close()
        return None
    return connection
