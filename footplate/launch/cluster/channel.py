"""A TCP connection that carries messages, and parcels piece by piece between them.

A frame is two lengths, a message in JSON, and bytes that go with it. A parcel, which may be larger than the memory that one
wants to spend on sending it, goes as frames of at most `PIECE` bytes, and is whole in a parcel of its own at the other end
before the message that announces it is handed over. Messages overtake parcels, so that signs of life don't wait for a
gigabyte; one that must not is sent `behind` it.

Nothing here blocks: `send` and `post` put something into the queue, `flush` sends as much as the network takes, `receive`
gives what has come. A machine that has gone without a word is found by the kernel: `SILENCE_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from footplate.launch import parcel

PIECE = 1 << 18  # bytes of a parcel in one frame
LONGEST = 1 << 24  # bytes of a frame from somebody who is trusted
LONGEST_FROM_A_STRANGER = 1 << 13
BURST = 16  # pieces that are sent or received before the owner can do something else
CLOGGED = 1 << 22  # bytes in the queue, above which its owner should add nothing that can wait
SILENCE_S = 30

_LENGTHS = struct.Struct("!II")


class Gone(ConnectionError):
    """The other end is no more, or is not what it should be."""


@dataclass(frozen=True)
class Message:
    """What has come: a message, the bytes that go with it, or the descriptor of a parcel, which is the receiver's now."""

    head: dict[str, Any]
    data: bytes = b""
    parcel: int | None = None


@dataclass
class _Post:
    """A parcel on its way out, and the frames that are to go behind it; the first is its own announcement."""

    key: str
    fd: int
    size: int
    behind: list[bytes]
    sent: int = 0


@dataclass
class Channel:
    """One end of a connection. It owns the socket.

    Attributes:
        trusted: whether the other end has shown that it belongs to us; a stranger's frames must be short.
    """

    connection: socket.socket
    trusted: bool = False
    _queue: deque[memoryview] = field(default_factory=deque)
    _queued: int = 0
    _posts: deque[_Post] = field(default_factory=deque)
    _buffer: bytearray = field(default_factory=bytearray)
    _parcels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        notice_silence(self.connection)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.connection.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._queue or self._posts)

    @property
    def clogged(self) -> bool:
        """Whether more waits to be sent than should."""
        return self._queued > CLOGGED

    def send(self, head: dict[str, Any], data: bytes = b"", behind: str | None = None) -> None:
        """Queue a message; with `behind`, after the parcel posted with that key, if it is still under way."""
        frame = _frame(head, data)
        post = next((post for post in self._posts if post.key == behind), None)
        if post is not None:
            post.behind.append(frame)
        else:
            self._put(frame)

    def post(self, key: str, fd: int, head: dict[str, Any]) -> None:
        """Queue the content of a parcel, and the message that hands it over. The descriptor may be closed at once."""
        announcement = _frame({**head, "parcel": key}, b"")
        self._posts.append(_Post(key, os.dup(fd), os.fstat(fd).st_size, [announcement]))

    def flush(self) -> None:
        """Send what the network takes now, or a part of that if it takes much.

        Raises:
            Gone: the other end is no more.
        """
        try:
            for _ in range(BURST):
                if not self._queue and self._posts:
                    self._next_piece()
                if not self._queue:
                    return
                sent = self.connection.send(self._queue[0])
                self._queued -= sent
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone(str(error)) from error

    def receive(self) -> Iterator[Message]:
        """What has come, or a part of it if that is much.

        Raises:
            Gone: nothing will come any more; what came before has been given.
        """
        yield from self._frames()
        for _ in range(BURST):
            try:
                data = self.connection.recv(PIECE)
            except BlockingIOError:
                return
            except OSError as error:
                raise Gone(str(error)) from error
            if not data:
                raise Gone("its connection was closed")
            self._buffer += data
            yield from self._frames()

    def close(self) -> None:
        """Close the connection and forget what was under way."""
        self.connection.close()
        for fd in (*self._parcels.values(), *(post.fd for post in self._posts)):
            os.close(fd)
        self._parcels = {}
        self._posts.clear()
        self._queue.clear()

    def parcel(self, key: str) -> int:
        """The descriptor of the parcel that what is posted with this key is collected in."""
        if key not in self._parcels:
            self._parcels[key] = parcel.empty()
        return self._parcels[key]

    def _put(self, frame: bytes) -> None:
        self._queue.append(memoryview(frame))
        self._queued += len(frame)

    def _next_piece(self) -> None:
        """Queue a piece of the parcel whose turn it is; of the last one, also what was to go behind it."""
        post = self._posts.popleft()
        piece = os.pread(post.fd, PIECE, post.sent)
        post.sent += len(piece)
        if piece:
            self._put(_frame({"piece": post.key}, piece))
        if piece and post.sent < post.size:
            self._posts.append(post)
            return
        os.close(post.fd)
        for frame in post.behind:
            self._put(frame)

    def _frames(self) -> Iterator[Message]:
        while len(self._buffer) >= _LENGTHS.size:
            head_size, data_size = _LENGTHS.unpack_from(self._buffer)
            end = _LENGTHS.size + head_size + data_size
            if end > (LONGEST if self.trusted else LONGEST_FROM_A_STRANGER):
                raise Gone(f"it sent a frame of {end} bytes")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTHS.size : end])
            del self._buffer[:end]
            found = self._message(body[:head_size], body[head_size:])
            if found is not None:
                yield found

    def _message(self, text: bytes, data: bytes) -> Message | None:
        try:
            head = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Gone("it sent something else than our messages") from error
        if not isinstance(head, dict):
            raise Gone("it sent something else than our messages")
        if not self.trusted:
            return Message(head)
        if "piece" in head:
            _write(self.parcel(head["piece"]), data)
            return None
        if "parcel" in head:
            fd = self.parcel(head["parcel"])
            return Message(head, parcel=self._parcels.pop(head["parcel"], fd))
        return Message(head, data)


def notice_silence(connection: socket.socket) -> None:
    """Have the kernel break a connection to a machine that answers nothing for about `SILENCE_S` seconds.

    It is the other kernel that answers, so a process that is suspended keeps its connections.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {"TCP_KEEPIDLE": SILENCE_S // 3, "TCP_KEEPINTVL": SILENCE_S // 6, "TCP_KEEPCNT": 4}
    if sys.platform == "linux":
        options["TCP_USER_TIMEOUT"] = SILENCE_S * 1000  # milliseconds, for what was sent and isn't acknowledged
    for name, value in options.items():
        with contextlib.suppress(AttributeError, OSError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _frame(head: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(data)) + text + data


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
