"""Messages and payloads over a connection."""

from __future__ import annotations

import os
import select
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.launch import payload
from footplate.launch.cluster import channel
from footplate.launch.cluster.channel import Channel, ChannelClosedError, Message


def pair(trusted: bool = True) -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return Channel(one, trusted), Channel(other, trusted)


def pass_on(sender: Channel, receiver: Channel, count: int) -> list[Message]:
    """Have `count` messages sent and received in turn."""
    messages: list[Message] = []
    while len(messages) < count:
        sender.flush()
        select.select([receiver], [sender] if sender.pending else [], [], 60)
        messages += receiver.receive()
    return messages


def send_until_noticed(sender: Channel) -> None:
    while True:
        sender.flush()
        sender.send({"to": "nobody"})


def content(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def filled(data: bytes) -> int:
    fd = payload.create()
    os.write(fd, data)
    return fd


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary()), min_size=1, max_size=5))
def test_messages_arrive_in_order_as_they_were(messages):
    one, other = pair()
    for head, data in messages:
        one.send({"head": head}, data)
    assert pass_on(one, other, len(messages)) == [Message({"head": head}, data) for head, data in messages]
    one.close()
    other.close()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(-1, 1))
def test_payloads_of_every_size_arrive_whole(pieces, more):
    one, other = pair()
    contents = [os.urandom(max(0, number * channel.PIECE_BYTES + more)) for number in pieces]
    for number, data in enumerate(contents):
        fd = filled(data)
        one.send_payload(str(number), fd, {"number": number})
        os.close(fd)
    payloads = {message.head["number"]: message.payload_fd for message in pass_on(one, other, len(contents))}
    assert [content(payloads[number]) for number in range(len(contents))] == contents
    one.close()
    other.close()


def test_a_message_overtakes_a_payload_unless_it_is_sent_behind_it():
    one, other = pair()
    fd = filled(bytes(20 * channel.PIECE_BYTES))
    one.send_payload("large", fd, {"name": "payload"})
    os.close(fd)
    one.send({"name": "behind"}, behind="large")
    one.flush()
    one.send({"name": "urgent"})
    one.send({"name": "free"}, behind="another")
    messages = pass_on(one, other, 4)
    assert [message.head["name"] for message in messages] == ["urgent", "free", "payload", "behind"]
    os.close(messages[2].payload_fd)
    one.close()
    other.close()


def test_the_end_of_a_connection_comes_after_what_was_sent_before_it():
    one, other = pair()
    one.send({"last": "words"})
    one.flush()
    one.close()
    received = other.receive()
    assert next(received) == Message({"last": "words"})
    with pytest.raises(ChannelClosedError, match="closed"):
        next(received)
    other.send({"to": "nobody"})
    with pytest.raises(ChannelClosedError):
        send_until_noticed(other)  # the kernel takes the first before it hears
    other.close()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (struct.pack("!II", 1 << 20, 0), "frame of"),
        (struct.pack("!II", 5, 0) + b"hello", "not one of"),
        (struct.pack("!II", 4000, 0) + b"[" * 4000, "not one of"),
        (struct.pack("!II", 2, 0) + b"[]", "not one of"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame of"),
    ],
)
def test_a_stranger_can_send_neither_much_nor_nonsense(sent, words):
    one, other = pair(trusted=False)
    one.connection.setblocking(True)
    one.connection.sendall(sent)
    select.select([other], [], [], 60)
    with pytest.raises(ChannelClosedError, match=words):
        list(other.receive())
    one.close()
    other.close()


def test_a_strangers_payloads_are_not_kept():
    one, other = pair(trusted=False)
    one.send({"piece": "x"}, b"data")
    one.send({"payload": "x"})
    assert pass_on(one, other, 2) == [Message({"piece": "x"}), Message({"payload": "x"})]
    one.close()
    other.close()


def test_one_that_sends_more_than_is_taken_is_clogged_and_loses_nothing():
    one, other = pair()
    count = 0
    while not one.clogged:
        one.send({"count": count}, bytes(1 << 16))
        one.flush()
        count += 1
    assert [message.head["count"] for message in pass_on(one, other, count)] == list(range(count))
    assert not one.clogged
    one.close()
    other.close()
