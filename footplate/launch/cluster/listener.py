"""The port at which a launch accepts its agents: those that prove the token of the present group (`agent_info.py`).

Every connection gets a challenge, and has `HANDSHAKE_S` to answer it. A connection that doesn't answer, or answers
wrongly, is closed. With TLS, the challenge is encrypted.

When this process has no file descriptor left, connections wait in the socket's queue, and the listener tries again after
`PAUSE_S`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass

from footplate.core.net.handshake import DEADLINE_S, HandshakeError, ServerHandshake, Strangers
from footplate.core.net.tls import ANNOUNCEMENT, ServerKey
from footplate.launch import rendezvous
from footplate.launch.cluster.agent_info import PURPOSE, AgentInfo
from footplate.launch.cluster.channel import Channel, ChannelClosedError, Message
from footplate.launch.cluster.refusal_log import RefusalLog

log = logging.getLogger(__name__)

HANDSHAKE_S = DEADLINE_S
# Limit of open connections that have not proved the token. Beyond it, the oldest is closed.
MAX_STRANGERS = 256
# Pause after a failure to accept a connection.
PAUSE_S = 0.5


@dataclass(eq=False)
class _Stranger:
    """A connection that has not proved the token yet."""

    channel: Channel
    peer: str
    handshake: ServerHandshake


class Listener:
    """Accepts agents. It listens as soon as it is made.

    Args:
        host: the address to listen on.
        selector: where sockets are registered; the data of its keys are functions without arguments.
        admit: called with the channel and the description of an agent that has proved the token, and with the
            handshake's last message for it.
        key: for TLS; None for none.

    Attributes:
        token: of the present group of agents; None to refuse all.
        address: host and port.
    """

    def __init__(
        self,
        host: str,
        selector: selectors.BaseSelector,
        admit: Callable[[Channel, AgentInfo, dict[str, str]], None],
        key: ServerKey | None = None,
    ) -> None:
        self._key = key
        self.token: bytes | None = None
        self._selector = selector
        self._admit = admit
        self._strangers: Strangers[_Stranger] = Strangers(MAX_STRANGERS, HANDSHAKE_S)
        self._refusals = RefusalLog(log, "it doesn't know the token of this launch")
        # The time at which connections are accepted again, or None while they are accepted.
        self._paused_until: float | None = None
        # True if a failure to accept was logged since the last accepted connection.
        self._warned = False
        self._server = rendezvous.listen(host, MAX_STRANGERS)
        self._server.setblocking(False)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def check_deadlines(self) -> None:
        """Close the connections whose time has passed, and accept connections again after a pause."""
        now = time.monotonic()
        if self._paused_until is not None and now > self._paused_until:
            self._paused_until = None
            self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._refusals.flush()
        for stranger in self._strangers.expired(now):
            self._close(stranger)

    def close(self) -> None:
        """Stop listening, and close all connections that have not proved the token."""
        for stranger in self._strangers.clear():
            self._close(stranger)
        if self._paused_until is None:
            self._selector.unregister(self._server)
        self._server.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._server.accept()
        except (BlockingIOError, ConnectionError):
            # The peer has closed the connection already.
            return
        except OSError as error:
            # Mostly too many open files. The selector would report the same connection again at once.
            if not self._warned:
                log.warning("a launch can't take connections at %s, port %d: %s", *self.address, error)
            self._warned = True
            self._selector.unregister(self._server)
            self._paused_until = time.monotonic() + PAUSE_S
            return

        self._warned = False
        with contextlib.suppress(OSError):
            now = time.monotonic()
            stranger = self._stranger(Channel(connection), peer[0])
            for oldest in self._strangers.add(stranger, now):
                self._close(oldest)
            self._selector.register(stranger.channel, selectors.EVENT_READ, lambda: self._receive(stranger))
            # The message is so short that the network takes it at once.
            stranger.channel.flush()

    def _stranger(self, channel: Channel, peer: str) -> _Stranger:
        """Begin the handshake: queue its first message, with TLS behind the announcement."""
        handshake = ServerHandshake(PURPOSE, "" if self._key is None else self._key.binding)
        if self._key is not None:
            channel.send(ANNOUNCEMENT)
            channel.begin_tls(self._key.stream())
        channel.send(handshake.challenge)
        return _Stranger(channel, peer, handshake)

    def _receive(self, stranger: _Stranger) -> None:
        try:
            message = next(stranger.channel.receive(), None)
        except ChannelClosedError:
            self._refuse(stranger)
            return
        if message is None:
            return
        agent = self._verified(stranger, message)
        if agent is None:
            self._refusals.add(stranger.peer)
            self._refuse(stranger)
            return

        self._strangers.discard(stranger)
        self._selector.unregister(stranger.channel)
        proof = stranger.handshake.acknowledgement(self.token or b"")
        self._admit(stranger.channel, agent, proof)

    def _verified(self, stranger: _Stranger, answer: Message) -> AgentInfo | None:
        """The agent, if it has proved the token of the present group."""
        if self.token is None:
            return None
        try:
            return AgentInfo.from_details(stranger.handshake.verify(self.token, answer.head))
        except HandshakeError:
            return None

    def _refuse(self, stranger: _Stranger) -> None:
        self._strangers.discard(stranger)
        self._close(stranger)

    def _close(self, stranger: _Stranger) -> None:
        # The connection may break before it is registered.
        with contextlib.suppress(KeyError):
            self._selector.unregister(stranger.channel)
        stranger.channel.close()
