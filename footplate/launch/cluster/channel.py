"""A TCP connection between the driver and an agent, which carries messages, and payloads piece by piece between them.

A frame (`core/net/framing.py`) is a message and bytes that go with it. A payload may be larger than the memory that you
want to spend on sending it. So it goes as frames of at most `PIECE_BYTES`. The other end collects them in a payload of
its own, and hands over the message that announces the payload only when all of it has arrived. Messages overtake
payloads, so signs of life don't wait for a gigabyte. A message that must not overtake one is sent with `behind`.

Nothing here blocks:

- `send` and `send_payload` put something into the queue.
- `flush` sends as much as the network takes.
- `receive` gives what has arrived.

The kernel notices that a machine has gone silent (`core/net/silence.py`). With TLS (`core/net/tls.py`), `begin_tls`
encrypts what follows in both directions.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from footplate.core.net.framing import MAX_STRANGER_BYTES, Frame, FrameDecoder, FramingError, encode_frame
from footplate.core.net.silence import detect_silence
from footplate.launch import payload

if TYPE_CHECKING:
    from footplate.core.net.tls import TlsStream

# Size of a payload's piece in a frame.
PIECE_BYTES = 1 << 18
# Size limit of a frame from a peer that has proved the token.
MAX_TRUSTED_BYTES = 1 << 24
# Number of pieces that are sent or received before the owner can do something else.
BURST = 16
# Length of the queue above which the owner should add nothing that can wait.
CLOGGED_BYTES = 1 << 22


class ChannelClosedError(ConnectionError):
    """The other end has gone, or breaks the protocol."""


@dataclass(frozen=True)
class Message:
    """A message that has arrived, with the bytes that go with it, or with the descriptor of a payload.

    The receiver owns the descriptor.
    """

    head: dict[str, Any]
    data: bytes = b""
    payload_fd: int | None = None


@dataclass
class _Outgoing:
    """A payload on its way out, and the frames to send behind it; the first of these announces it."""

    key: str
    fd: int
    size: int
    behind: list[bytes]
    sent: int = 0


class Channel:
    """One end of a connection. It owns the socket.

    Args:
        connection: the socket.
        trusted: see the attribute.

    Attributes:
        trusted: whether the other end has proved the token. The frames of a stranger must be short.
    """

    def __init__(self, connection: socket.socket, trusted: bool = False) -> None:
        self.connection = connection
        self._decoder = FrameDecoder()
        self._tls: TlsStream | None = None
        self.trusted = trusted
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._outgoing: deque[_Outgoing] = deque()
        # The file descriptors of payloads that are being received, by key.
        self._incoming: dict[str, int] = {}
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        detect_silence(connection)

    @property
    def trusted(self) -> bool:
        return self._trusted

    @trusted.setter
    def trusted(self, trusted: bool) -> None:
        self._trusted = trusted
        self._decoder.max_bytes = MAX_TRUSTED_BYTES if trusted else MAX_STRANGER_BYTES

    def begin_tls(self, stream: TlsStream) -> None:
        """Encrypt everything from now on. Nothing else may have arrived from the other end."""
        self._tls = stream
        self._enqueue(b"")

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.connection.fileno()

    @property
    def pending(self) -> bool:
        """True if something waits to be sent."""
        return bool(self._queue or self._outgoing)

    @property
    def clogged(self) -> bool:
        """True if so much waits to be sent that the owner should add nothing that can wait."""
        return self._queued_bytes > CLOGGED_BYTES

    def send(self, head: dict[str, Any], data: bytes = b"", behind: str | None = None) -> None:
        """Queue a message. With `behind`, it follows the payload of that key, if that is still being sent."""
        frame = encode_frame(head, data)
        outgoing = next((outgoing for outgoing in self._outgoing if outgoing.key == behind), None)
        if outgoing is not None:
            outgoing.behind.append(frame)
        else:
            self._enqueue(frame)

    def send_payload(self, key: str, fd: int, head: dict[str, Any]) -> None:
        """Queue the content of a payload, and the message that announces it. You may close the descriptor at once."""
        announcement = encode_frame({**head, "payload": key})
        self._outgoing.append(_Outgoing(key, os.dup(fd), os.fstat(fd).st_size, [announcement]))

    def flush(self) -> None:
        """Send what the network takes now, or a part of that if it takes much.

        Raises:
            ChannelClosedError: the other end has gone.
        """
        try:
            for _ in range(BURST):
                if not self._queue and self._outgoing:
                    self._enqueue_next_piece()
                if not self._queue:
                    return
                sent = self.connection.send(self._queue[0])
                self._queued_bytes -= sent
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived, or some of them if there are many.

        Raises:
            ChannelClosedError: no other message will arrive. All earlier ones were yielded.
        """
        yield from self._messages()
        for _ in range(BURST):
            try:
                data = self.connection.recv(PIECE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data:
                raise ChannelClosedError("its connection was closed")
            self._decoder.feed(data if self._tls is None else self._decrypted(data, self._tls))
            yield from self._messages()

    def close(self) -> None:
        """Close the connection, and drop what is still in transit."""
        self.connection.close()
        for fd in (*self._incoming.values(), *(outgoing.fd for outgoing in self._outgoing)):
            os.close(fd)
        self._incoming = {}
        self._outgoing.clear()
        self._queue.clear()

    def incoming_payload(self, key: str) -> int:
        """The descriptor of the payload in which the pieces with this key are collected."""
        if key not in self._incoming:
            self._incoming[key] = payload.create()
        return self._incoming[key]

    def _enqueue(self, frame: bytes) -> None:
        if self._tls is not None:
            self._tls.write(frame)
            frame = self._tls.outgoing()
        if frame:
            self._queue.append(memoryview(frame))
            self._queued_bytes += len(frame)

    def _decrypted(self, data: bytes, tls: TlsStream) -> bytes:
        try:
            plain = tls.received(data)
        except OSError as error:
            raise ChannelClosedError(f"it sent invalid TLS data: {error}") from error
        # TLS has an answer of its own during its handshake.
        self._enqueue(b"")
        self.flush()
        return plain

    def _enqueue_next_piece(self) -> None:
        """Queue a piece of the payload whose turn it is. Behind its last piece, queue the frames that wait for it."""
        outgoing = self._outgoing.popleft()
        piece = os.pread(outgoing.fd, PIECE_BYTES, outgoing.sent)
        outgoing.sent += len(piece)
        if piece:
            self._enqueue(encode_frame({"piece": outgoing.key}, piece))
        if piece and outgoing.sent < outgoing.size:
            self._outgoing.append(outgoing)
            return

        os.close(outgoing.fd)
        for frame in outgoing.behind:
            self._enqueue(frame)

    def _messages(self) -> Iterator[Message]:
        while (frame := self._next_frame()) is not None:
            message = self._as_message(frame)
            if message is not None:
                yield message

    def _next_frame(self) -> Frame | None:
        try:
            return self._decoder.next_frame()
        except FramingError as error:
            raise ChannelClosedError(str(error)) from error

    def _as_message(self, frame: Frame) -> Message | None:
        head, data = frame
        if not isinstance(head, dict):
            raise ChannelClosedError("it sent bytes that are not one of Footplate's messages")
        if not self.trusted:
            return Message(head)
        if "piece" in head:
            _write_all(self.incoming_payload(head["piece"]), data)
            return None
        if "payload" in head:
            fd = self.incoming_payload(head["payload"])
            del self._incoming[head["payload"]]
            return Message(head, payload_fd=fd)
        return Message(head, data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
