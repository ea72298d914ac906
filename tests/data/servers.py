"""Servers on loopback: object storage, and a proxy before it that counts requests and makes them fail."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from footplate.data.remote.location import locate


def upload(uri: str, directory: Path) -> None:
    """Copy a directory to object storage."""
    location = locate(uri)
    for path in directory.rglob("*"):
        if path.is_file():
            target = f"{location.path}/{path.relative_to(directory)}"
            with location.filesystem.open_output_stream(target) as stream:
                stream.write(path.read_bytes())


class LoopbackServer:
    """A server that a test plays. Each request is passed to `answer`, in a thread of its own.

    Attributes:
        url: its address.
    """

    def __init__(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # A header that waits for its acknowledgement would take 40 ms.
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def pass_on(self) -> None:
                server.answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one request."""
        raise NotImplementedError


class Proxy(LoopbackServer):
    """Passes requests on to a server, and fails on request.

    Attributes:
        reads: (path, first byte, last byte) of each ranged GET that was answered in full.
        connections: the client's port of each request. Two requests of one port came over one connection.
        fail: called with the number of each ranged GET, from 0: None, "busy" (503) or "cut" (half of the body).
    """

    def __init__(self, target: str) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.connections: list[int] = []
        self.fail: Callable[[int], str | None] = lambda number: None
        self._gets = 0
        self._lock = threading.Lock()
        self._host = target.removeprefix("http://")
        super().__init__()

    @property
    def read_bytes(self) -> int:
        """The number of bytes that ranged reads have returned."""
        return sum(last - first + 1 for _, first, last in self.reads)

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.connections.append(request.client_address[1])
        match = re.fullmatch(
            r"bytes=(\d+)-(\d+)", request.headers.get("Range") or request.headers.get("x-ms-range") or ""
        )
        how = None
        if match and request.command == "GET":
            with self._lock:
                how, self._gets = self.fail(self._gets), self._gets + 1
        if how == "busy":
            request.send_response(503)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        connection = http.client.HTTPConnection(self._host)
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        data = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else str(len(data))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        if how == "cut":
            request.wfile.write(data[: len(data) // 2])
            request.close_connection = True
            return
        # Count before the client has the response, since the test may look then.
        if match and request.command == "GET":
            with self._lock:
                self.reads.append((request.path.partition("?")[0], int(match[1]), int(match[2])))
        request.wfile.write(data)
