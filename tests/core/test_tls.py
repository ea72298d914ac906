"""TLS under the handshake with the token: what two ends exchange, and what somebody between them can't do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.net.handshake import ClientHandshake, HandshakeError, ServerHandshake, WrongTokenError
from footplate.core.net.tls import ANNOUNCEMENT, ServerKey, TlsStream, client_stream, expect_announcement

TOKEN = b"the token of these tests"
KEY = ServerKey()


def pump(one: TlsStream, other: TlsStream, size: int = 1 << 20) -> tuple[bytes, bytes]:
    """Carry bytes between two ends in pieces until none are left. Return what each end has received."""
    plain = {one: b"", other: b""}
    moved = True
    while moved:
        moved = False
        for sender, receiver in ((one, other), (other, one)):
            data = sender.outgoing()
            for start in range(0, len(data), size):
                plain[receiver] += receiver.received(data[start : start + size])
                moved = True
    return plain[one], plain[other]


@given(st.lists(st.binary(max_size=70_000), max_size=4), st.integers(1, 3000))
def test_what_one_end_writes_arrives_in_pieces_of_any_size(messages: list[bytes], size: int):
    server, client = KEY.stream(), client_stream()
    # Written before the handshake of TLS has even begun.
    for message in messages:
        server.write(message)
        client.write(message[::-1])
    received = pump(server, client, max(size, 500))
    assert received == (b"".join(message[::-1] for message in messages), b"".join(messages))


def test_nothing_plain_is_on_the_wire():
    server, client = KEY.stream(), client_stream()
    pump(server, client)
    server.write(b"the secret of the launch")
    assert b"secret" not in server.outgoing()


def proofs(server_binding: str, client_binding: str) -> None:
    """Do the handshake with the token, when the two ends have seen these certificates."""
    server, client = ServerHandshake("agent", server_binding), ClientHandshake(TOKEN, "agent", client_binding)
    server.verify(TOKEN, client.answer(server.challenge, {}))
    client.verify(server.acknowledgement(TOKEN))


def test_both_ends_see_one_certificate():
    server, client = KEY.stream(), client_stream()
    server.write(b"hello")
    pump(server, client)
    assert server.binding == client.binding == KEY.binding
    proofs(server.binding, client.binding)


def test_somebody_between_them_needs_a_certificate_of_their_own_and_is_refused():
    middle = ServerKey()
    to_client, client = middle.stream(), client_stream()
    to_client.write(b"hello")
    pump(to_client, client)
    with pytest.raises(WrongTokenError):
        proofs(KEY.binding, client.binding)
    with pytest.raises(WrongTokenError):
        proofs("", client.binding)


def test_each_launch_has_a_key_of_its_own():
    assert ServerKey().binding != KEY.binding


def test_a_side_without_tls_is_told_so():
    expect_announcement(ANNOUNCEMENT)
    with pytest.raises(HandshakeError, match=r"it doesn't use TLS.*--tls on all machines"):
        expect_announcement(ServerHandshake("agent").challenge)
    with pytest.raises(HandshakeError, match=r"it uses TLS, and this process doesn't.*--tls on all machines"):
        ClientHandshake(TOKEN, "agent").answer(ANNOUNCEMENT, {})


@pytest.mark.parametrize("message", [None, [], {}, {"tls": True}, {"protocol": "2", "tls": True}])
def test_what_is_no_announcement_is_no_program_of_ours(message):
    with pytest.raises(HandshakeError, match="isn't one of Footplate's programs"):
        expect_announcement(message)


def test_bytes_that_are_not_tls_end_the_connection():
    with pytest.raises(OSError):
        KEY.stream().received(b"GET / HTTP/1.0\r\n\r\n" * 10)
    server, client = KEY.stream(), client_stream()
    pump(server, client)
    client.write(b"hello")
    changed = bytearray(client.outgoing())
    changed[-1] ^= 1
    with pytest.raises(OSError):
        server.received(bytes(changed))
