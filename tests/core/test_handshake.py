"""The handshake of all connections: mutual proof of the token, protocol version, and limits for strangers."""

from __future__ import annotations

import json

import pytest

from footplate.core.net import handshake
from footplate.core.net.handshake import (
    ClientHandshake,
    HandshakeError,
    RefusedError,
    ServerHandshake,
    Strangers,
    WrongTokenError,
)

TOKEN = b"the token of these tests"


def over_the_wire(message):
    return json.loads(json.dumps(message))


def exchange(server_token=TOKEN, client_token=TOKEN, server_purpose="agent", client_purpose="agent", details=None):
    """Run a whole handshake. Return the messages and the details that the server has accepted."""
    server, client = ServerHandshake(server_purpose), ClientHandshake(client_token, client_purpose)
    challenge = over_the_wire(server.challenge)
    answer = over_the_wire(client.answer(challenge, details or {"index": 3, "clock": 1.5}))
    accepted = server.verify(server_token, answer)
    reply = over_the_wire(server.acknowledgement(server_token))
    client.verify(reply)
    return [challenge, answer, reply], accepted


def test_both_sides_prove_the_token_and_the_server_gets_the_details():
    _, details = exchange()
    assert details == {"index": 3, "clock": 1.5}


def test_the_token_is_never_sent():
    messages, _ = exchange()
    assert TOKEN.decode() not in json.dumps(messages)
    assert TOKEN.hex() not in json.dumps(messages)


def test_proofs_differ_between_connections_and_directions():
    proofs = [message["proof"] for _ in range(2) for message in exchange()[0][1:]]
    assert len(set(proofs)) == 4


@pytest.mark.parametrize("case", [{"client_token": b"another"}, {"client_purpose": "machine"}])
def test_a_client_with_another_token_or_purpose_is_refused(case):
    with pytest.raises(WrongTokenError, match="doesn't know the token"):
        exchange(**case)


def test_details_that_were_changed_on_the_way_are_refused():
    server, client = ServerHandshake("agent"), ClientHandshake(TOKEN, "agent")
    answer = client.answer(server.challenge, {"rank": 1})
    with pytest.raises(WrongTokenError):
        server.verify(TOKEN, {**answer, "details": {"rank": 0}})


def test_an_answer_cannot_be_used_for_another_connection():
    first, second, client = ServerHandshake("agent"), ServerHandshake("agent"), ClientHandshake(TOKEN, "agent")
    answer = client.answer(first.challenge, {})
    assert first.verify(TOKEN, answer) == {}
    with pytest.raises(WrongTokenError):
        second.verify(TOKEN, answer)


def test_a_server_that_sends_the_clients_own_proof_back_is_refused():
    client = ClientHandshake(TOKEN, "agent")
    answer = client.answer(ServerHandshake("agent").challenge, {})
    with pytest.raises(WrongTokenError):
        client.verify({"proof": answer["proof"]})


def test_a_refused_client_learns_why():
    with pytest.raises(RefusedError, match="--node-rank 7"):
        ClientHandshake(TOKEN, "machine").verify(ServerHandshake.refusal("--node-rank 7 is none of --nnodes 2"))


def test_another_version_of_the_protocol_is_named_on_both_sides(monkeypatch):
    server, client = ServerHandshake("agent"), ClientHandshake(TOKEN, "agent")
    answer = client.answer(server.challenge, {})
    with pytest.raises(HandshakeError, match="version 99 of Footplate's protocol, and this process version"):
        server.verify(TOKEN, {**answer, "protocol": 99})
    with pytest.raises(HandshakeError, match="version 99"):
        client.answer({**server.challenge, "protocol": 99}, {})
    monkeypatch.setattr(handshake, "PROTOCOL", handshake.PROTOCOL + 1)
    with pytest.raises(HandshakeError, match="Install the same Footplate"):
        client.answer({**server.challenge, "protocol": handshake.PROTOCOL - 1}, {})


@pytest.mark.parametrize("message", [None, 1, [], "text", {}, {"protocol": True}, {"protocol": [1]}])
def test_messages_of_other_programs_are_refused(message):
    with pytest.raises(HandshakeError, match="isn't one of Footplate's"):
        ServerHandshake("agent").verify(TOKEN, message)
    with pytest.raises(HandshakeError, match="isn't one of Footplate's"):
        ClientHandshake(TOKEN, "agent").answer(message, {})


def test_strangers_are_limited_in_number_and_time():
    strangers: Strangers[str] = Strangers(limit=2, deadline_s=10)
    assert strangers.add("a", 0.0) == []
    assert strangers.add("b", 1.0) == []
    assert strangers.add("c", 2.0) == ["a"]
    assert strangers.expired(11.0) == []
    assert strangers.expired(11.1) == ["b"]
    strangers.discard("c")
    strangers.discard("c")
    assert strangers.add("d", 3.0) == []
    assert "d" in strangers
    assert strangers.clear() == ["d"]
    assert len(strangers) == 0
