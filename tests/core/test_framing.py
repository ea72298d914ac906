"""Frames of all connections: encoding, decoding of a stream cut at any byte, and limits."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.net.framing import Frame, FrameDecoder, FramingError, encode_frame, receive_frame

FRAMES = st.builds(
    Frame, st.lists(st.integers() | st.text()) | st.dictionaries(st.text(), st.floats(allow_nan=False)), st.binary()
)


def decoded(decoder: FrameDecoder) -> list[Frame]:
    frames = []
    while (frame := decoder.next_frame()) is not None:
        frames.append(frame)
    return frames


@given(st.lists(FRAMES), st.lists(st.integers(1, 40)))
def test_frames_survive_however_the_stream_is_cut(frames, lengths):
    stream, decoder, received = b"".join(encode_frame(*frame) for frame in frames), FrameDecoder(), []
    for length in lengths:
        decoder.feed(stream[:length])
        received += decoded(decoder)
        stream = stream[length:]
    decoder.feed(stream)
    assert received + decoded(decoder) == frames


@given(FRAMES, st.binary())
def test_a_reader_of_the_missing_bytes_takes_no_byte_behind_the_frame(frame, rest):
    stream, decoder = encode_frame(*frame) + rest, FrameDecoder()
    while (received := decoder.next_frame()) is None:
        missing = decoder.missing_bytes
        assert missing > 0
        decoder.feed(stream[:missing])
        stream = stream[missing:]
    assert received == frame
    assert stream == rest


def test_a_frame_that_is_too_large_is_refused_before_it_has_arrived():
    decoder = FrameDecoder(max_bytes=100)
    decoder.feed(encode_frame("x" * 90))
    assert decoder.next_frame() == Frame("x" * 90)
    decoder.feed(struct.pack("!II", 90, 3))
    with pytest.raises(FramingError, match="a frame of 101 bytes; 100 are allowed"):
        decoder.next_frame()


@pytest.mark.parametrize("text", [b"nonsense", b"[" * 100_000, b"\xff\xfe"])
def test_a_message_that_is_not_json_is_refused(text):
    decoder = FrameDecoder()
    decoder.feed(struct.pack("!II", len(text), 0) + text)
    with pytest.raises(FramingError, match="not one of Footplate's messages"):
        decoder.next_frame()


def test_a_blocking_receiver_gets_frames_limits_and_the_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_frame([1], b"data") + encode_frame("x" * 200))
        assert receive_frame(ours, 100) == Frame([1], b"data")
        with pytest.raises(FramingError, match="100 are allowed"):
            receive_frame(ours, 100)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(encode_frame([1])[:-1])
        theirs.close()
        assert receive_frame(ours) is None
