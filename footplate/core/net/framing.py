"""Length-prefixed messages: the framing of all of Footplate's own connections.

    bytes of the JSON │ bytes of the data │ the JSON │ the data
         4, big-endian       4, big-endian

A frame is a message in JSON, and bytes that go with it; most messages have none. The lengths come first, so a receiver
knows how much it has to read, and refuses a frame that is too large before it has read it.

There are two ways to receive:

- `FrameDecoder` takes pieces of a stream in whatever size they arrive. Non-blocking connections use it.
- `receive_frame` blocks until a whole frame is there.

Nothing here unpickles. JSON is all that a connection decodes of a message, before and after the handshake
(`handshake.py`).
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

# Size limit of a frame from a peer that has not proved the token yet.
MAX_STRANGER_BYTES = 1 << 13

_LENGTHS = struct.Struct("!II")
HEADER_BYTES = _LENGTHS.size


class FramingError(ConnectionError):
    """The peer sent a frame that is too large, or that isn't JSON."""


class Frame(NamedTuple):
    """A message, and the bytes that go with it."""

    message: Any
    data: bytes = b""


def encode_frame(message: Any, data: bytes = b"") -> bytes:
    """Encode a message and its data as one frame."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(data)) + text + data


class FrameDecoder:
    """Frames from the pieces of a stream.

    Attributes:
        max_bytes: the largest frame that is accepted, with its header; None for no limit. You may change it between two
            frames, as when the peer has proved the token.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> None:
        """Add a piece of the stream."""
        self._buffer += piece

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that the next frame still needs: those of its header, then those of the rest.

        A reader that takes no more than these leaves what follows the frame in the connection.
        """
        if len(self._buffer) < HEADER_BYTES:
            return HEADER_BYTES - len(self._buffer)
        return max(0, HEADER_BYTES + sum(_LENGTHS.unpack_from(self._buffer)) - len(self._buffer))

    def next_frame(self) -> Frame | None:
        """Take the next whole frame; return None if it has not arrived completely.

        Raises:
            FramingError: the frame is too large, or its message isn't JSON.
        """
        if len(self._buffer) < HEADER_BYTES:
            return None
        text_bytes, data_bytes = _LENGTHS.unpack_from(self._buffer)
        end = HEADER_BYTES + text_bytes + data_bytes
        _check_size(end, self.max_bytes)
        if len(self._buffer) < end:
            return None

        body = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return Frame(_decode(body[:text_bytes]), body[text_bytes:])


def receive_frame(connection: socket.socket, max_bytes: int | None = None, start: bytes = b"") -> Frame | None:
    """Wait for a whole frame; return None if the connection ends before one.

    Args:
        connection: a blocking socket.
        max_bytes: the largest frame that is accepted, with its header; None for no limit.
        start: bytes of the frame that were received already.

    Raises:
        FramingError: the frame is too large, or its message isn't JSON.
        OSError: the connection broke, or its timeout has passed.
    """
    try:
        header = start + receive_exactly(connection, HEADER_BYTES - len(start))
        text_bytes, data_bytes = _LENGTHS.unpack(header)
        _check_size(HEADER_BYTES + text_bytes + data_bytes, max_bytes)
        body = receive_exactly(connection, text_bytes + data_bytes)
    except EOFError:
        return None
    return Frame(_decode(body[:text_bytes]), body[text_bytes:])


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Wait for this many bytes.

    Raises:
        EOFError: the connection ends before.
    """
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _check_size(frame_bytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and frame_bytes > max_bytes:
        raise FramingError(f"it sent a frame of {frame_bytes} bytes; {max_bytes} are allowed")


def _decode(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FramingError("it sent bytes that are not one of Footplate's messages") from error
