"""Time limits for clients that begin a request and don't finish it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from footplate.server import guard
from footplate.server.deadlines import HeadDeadline
from footplate.server.guard import Guard

LIMIT_S = 0.75
HEAD = b"POST /api/jobs HTTP/1.1\r\nHost: localhost\r\nX-Footplate: 1\r\nContent-Length: 4\r\n\r\n"


class Quick(HeadDeadline):
    head_s = LIMIT_S


async def app(scope, receive, send):
    """Answers GET after one and a half limits, and POST with the length of its body."""
    body = b"late"
    if scope["method"] == "POST":
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message.get("more_body", False)
        body = str(size).encode()
    else:
        await asyncio.sleep(1.5 * LIMIT_S)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(guard, "BODY_S", LIMIT_S)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Guard(app), http=Quick, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join()


@contextlib.contextmanager
def sent(address: tuple[str, int], data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        yield connection


def answer(connection: socket.socket) -> bytes:
    """The body of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return b"".join(connection.recv(1) for _ in range(length))


def all_of(connection: socket.socket) -> bytes:
    """All data until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_a_client_that_says_nothing_is_given_up(address):
    with sent(address, b"") as connection:
        assert all_of(connection) == b""


def test_half_a_head_is_given_up_even_if_a_byte_comes_now_and_then(address):
    with sent(address, b"GET / HTTP/1.1\r\nHost: local") as connection:
        end = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b"h")
                time.sleep(LIMIT_S / 8)
        assert time.monotonic() < end


@pytest.mark.parametrize("path", [b"/api/jobs", b"/api/packages"])
def test_half_a_body_is_answered_with_408(address, path):
    with sent(address, HEAD.replace(b"/api/jobs", path) + b"12") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_body_has_its_time_as_a_whole_and_a_package_for_each_piece(address):
    with sent(address, HEAD) as body, sent(address, HEAD.replace(b"/api/jobs", b"/api/packages")) as package:
        for piece in (b"1", b"2", b"3", b"4"):
            time.sleep(LIMIT_S / 3)
            package.sendall(piece)
            with contextlib.suppress(ConnectionError):  # refused by now
                body.sendall(piece)
        assert answer(package) == b"4"
        assert body.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_second_request_has_its_own_time(address):
    with sent(address, HEAD + b"1234") as connection:
        assert answer(connection) == b"4"
        connection.sendall(HEAD[:20])
        assert all_of(connection) == b""


def test_an_answer_may_take_longer_than_a_request(address):
    with sent(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert answer(connection) == b"late"
        connection.sendall(HEAD + b"1234")  # on the same connection
        assert answer(connection) == b"4"
