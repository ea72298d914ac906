"""A stranger on the wire between two machines, who reads everything and changes nothing."""

from __future__ import annotations

import contextlib
import socket
import threading


class Wiretap:
    """Passes connections on to an address of this machine, and keeps what goes over them.

    Args:
        port: of the address.

    Attributes:
        port: where to connect to instead.
        heard: all bytes, of both directions.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.heard = bytearray()
        threading.Thread(target=self._accept_all, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept_all(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
