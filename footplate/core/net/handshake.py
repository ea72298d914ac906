"""The handshake of all of Footplate's own connections: both sides prove a shared token without sending it.

    server                                        client
                                ◄───────────      connects
    {protocol, nonce}           ───────────►
                                ◄───────────      {protocol, nonce, proof, details}
    {proof} or {refused: why}   ───────────►

A proof is an HMAC-SHA256 with the token over: the purpose of the connection, the side, both nonces and the client's
details (its rank, for instance), and with TLS the digest of the server's certificate (`tls.py`). So a proof is good for one
connection, in one direction, and for these details. Proofs are compared in constant time.

The order matters:

1. The client checks the protocol's version first. Two versions that differ are named, and nothing else is exchanged.
2. The client proves the token first, so a stranger learns nothing from the server.
3. A side handles no message of the other, and unpickles nothing, before it has checked the other's proof.

Without TLS, what follows the handshake is neither signed nor encrypted, like the traffic of torch.distributed itself.

This file does no input or output: it makes and checks messages. `framing.py` carries them. Servers keep connections
without a proof in `Strangers`, which limits their number and their time.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

# Version of framing and handshake. Increase it when either changes.
PROTOCOL = 2
# Time for a client to prove the token.
DEADLINE_S = 10.0

Stranger = TypeVar("Stranger")


class HandshakeError(ConnectionError):
    """The handshake failed. The text is about the other side, such as "it doesn't know the token"."""


class WrongTokenError(HandshakeError):
    """The other side has not proved the token."""


class RefusedError(HandshakeError):
    """The server refused this client, and said why."""


class ServerHandshake:
    """The accepting side of one connection.

    Send `challenge`, give the client's answer to `verify`, and send `acknowledgement`, or else `refusal(why)`.

    Args:
        purpose: what the connection is for, such as `"agent"`. Both sides must use the same word.
        binding: the digest of the server's certificate, with TLS.
    """

    def __init__(self, purpose: str, binding: str = "") -> None:
        self._purpose = purpose
        self._binding = binding
        self._nonce = new_nonce()
        self._client_nonce = ""
        self._details: dict[str, Any] = {}

    @property
    def challenge(self) -> dict[str, Any]:
        """The first message."""
        return {"protocol": PROTOCOL, "nonce": self._nonce}

    def verify(self, token: bytes, answer: Any) -> dict[str, Any]:
        """Check the client's answer to the challenge; return its details.

        Raises:
            WrongTokenError: the client has not proved the token.
            HandshakeError: the client isn't one of Footplate's, or uses another protocol.
        """
        answer = _as_message(answer)
        check_protocol(answer)
        self._client_nonce, details = str(answer.get("nonce")), answer.get("details")
        if not isinstance(details, dict):
            raise HandshakeError("it didn't answer the challenge")
        try:
            expected = self._proof(token, "client", details)
        except RecursionError as error:
            # The message is nested too deeply to be encoded again.
            raise HandshakeError("it didn't answer the challenge") from error
        if not _equal(expected, answer.get("proof")):
            raise WrongTokenError("it doesn't know the token")
        self._details = details
        return details

    def acknowledgement(self, token: bytes) -> dict[str, Any]:
        """The server's own proof, for a client that `verify` has accepted."""
        return {"proof": self._proof(token, "server", self._details)}

    def _proof(self, token: bytes, side: str, details: Mapping[str, Any]) -> str:
        return _proof(token, [self._purpose, side, self._nonce, self._client_nonce, details, self._binding])

    @staticmethod
    def refusal(why: str) -> dict[str, Any]:
        """The last message to a client that isn't accepted."""
        return {"refused": why}


class ClientHandshake:
    """The connecting side of one connection.

    Give the server's challenge to `answer` and send what it returns. Then give the server's reply to `verify`.

    Args:
        token: the secret that both sides have.
        purpose: what the connection is for, as on the server.
        binding: the digest of the server's certificate, with TLS.
    """

    def __init__(self, token: bytes, purpose: str, binding: str = "") -> None:
        self._token = token
        self._purpose = purpose
        self._binding = binding
        self._nonce = new_nonce()
        self._server_nonce = ""
        self._details: Mapping[str, Any] = {}

    def answer(self, challenge: Any, details: Mapping[str, Any]) -> dict[str, Any]:
        """Prove the token, and say who this is.

        Raises:
            HandshakeError: the server isn't one of Footplate's, or uses another protocol.
        """
        challenge = _as_message(challenge)
        check_protocol(challenge)
        if "tls" in challenge:
            raise HandshakeError("it uses TLS, and this process doesn't. Give --tls on all machines, or on none")
        self._server_nonce, self._details = str(challenge.get("nonce")), details
        proof = self._proof("client")
        return {"protocol": PROTOCOL, "nonce": self._nonce, "proof": proof, "details": dict(details)}

    def verify(self, reply: Any) -> None:
        """Check the server's proof.

        Raises:
            RefusedError: the server refused this client.
            WrongTokenError: the server has not proved the token.
        """
        reply = _as_message(reply)
        if "refused" in reply:
            raise RefusedError(str(reply["refused"])[:200])
        if not _equal(self._proof("server"), reply.get("proof")):
            raise WrongTokenError("it doesn't know the token")

    def _proof(self, side: str) -> str:
        parts = [self._purpose, side, self._server_nonce, self._nonce, self._details, self._binding]
        return _proof(self._token, parts)


class Strangers(Generic[Stranger]):
    """Connections that have not proved the token yet: not more than `limit`, and each for `deadline_s` at most.

    The owner closes the connections that `add` and `expired` return. It calls `discard` when a connection has proved the
    token or has ended.
    """

    def __init__(self, limit: int, deadline_s: float = DEADLINE_S) -> None:
        self._limit = limit
        self._deadline_s = deadline_s
        # The time at which each stranger connected, the oldest first.
        self._since: dict[Stranger, float] = {}

    def __contains__(self, stranger: Stranger) -> bool:
        return stranger in self._since

    def __len__(self) -> int:
        return len(self._since)

    def add(self, stranger: Stranger, now: float) -> list[Stranger]:
        """Add a connection; return the oldest ones where there are too many, which must be closed."""
        self._since[stranger] = now
        return self._take(list(self._since)[: max(0, len(self._since) - self._limit)])

    def discard(self, stranger: Stranger) -> None:
        """Forget a connection, if it is still here."""
        self._since.pop(stranger, None)

    def expired(self, now: float) -> list[Stranger]:
        """Take the connections whose time has passed, which must be closed."""
        return self._take([stranger for stranger, since in self._since.items() if now > since + self._deadline_s])

    def clear(self) -> list[Stranger]:
        """Take all connections, which must be closed."""
        return self._take(list(self._since))

    def _take(self, strangers: list[Stranger]) -> list[Stranger]:
        for stranger in strangers:
            del self._since[stranger]
        return strangers


def check_protocol(message: Mapping[str, Any]) -> None:
    """Check the version in a message of the other side.

    Raises:
        HandshakeError: it uses another version, or isn't one of Footplate's programs.
    """
    protocol = message.get("protocol")
    if type(protocol) is not int:
        raise HandshakeError("it isn't one of Footplate's programs")
    if protocol != PROTOCOL:
        raise HandshakeError(
            f"it uses version {protocol} of Footplate's protocol, and this process version {PROTOCOL}. Install the same "
            "Footplate on all machines"
        )


def new_nonce() -> str:
    """A random nonce of 128 bits."""
    return secrets.token_hex(16)


def _proof(token: bytes, parts: list[Any]) -> str:
    # As JSON, so that no two lists of parts have the same text.
    text = json.dumps([PROTOCOL, *parts], sort_keys=True, separators=(",", ":"))
    return hmac.new(token, text.encode(), "sha256").hexdigest()


def _equal(expected: str, actual: Any) -> bool:
    return hmac.compare_digest(expected.encode(), str(actual).encode(errors="replace"))


def _as_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise HandshakeError("it isn't one of Footplate's programs")
    return message
