"""The port that a launch opens for its agents, and who comes in: those who know the gang's token (`greeting.py`).

Whoever connects is asked, and has `GREET_S` to answer. Who doesn't, or answers wrongly, is sent away.

When this process has no file descriptor left, connections wait in the socket's queue, and the door tries again after
`PAUSE_S`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass

from footplate.launch import rendezvous
from footplate.launch.cluster import greeting
from footplate.launch.cluster.channel import Channel, Gone
from footplate.launch.cluster.greeting import Hello
from footplate.launch.cluster.refusals import Refusals

log = logging.getLogger(__name__)

GREET_S = 10.0
STRANGERS = 256  # who may be about to say who they are; beyond that, the first of them is sent away
PAUSE_S = 0.5  # before the next try, when a connection couldn't be accepted


@dataclass
class _Stranger:
    channel: Channel
    peer: str
    nonce: str
    asked_at: float


class Door:
    """Listens as soon as it is made.

    Args:
        host: the address to listen on.
        selector: told what to wait for; the data of its keys are functions without arguments.
        admit: called with the channel and the greeting of somebody who knows the token, and how far our clock is ahead
            of theirs, in seconds.

    Attributes:
        token: who doesn't know it is sent away; None to send all away.
        address: host and port.
    """

    def __init__(
        self, host: str, selector: selectors.BaseSelector, admit: Callable[[Channel, Hello, float], None]
    ) -> None:
        self.token: bytes | None = None
        self._selector = selector
        self._admit = admit
        self._strangers: list[_Stranger] = []
        self._refusals = Refusals(log, "it doesn't know the token of this launch")
        self._paused_until: float | None = None  # None while connections are accepted
        self._warned = False  # of connections that can't be accepted, since one was
        self._server = rendezvous.listen(host, STRANGERS)
        self._server.setblocking(False)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Send those away who have said nothing for too long, and accept connections again after a pause."""
        now = time.monotonic()
        if self._paused_until is not None and now > self._paused_until:
            self._paused_until = None
            self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._refusals.look()
        for stranger in [one for one in self._strangers if now > one.asked_at + GREET_S]:
            self._send_away(stranger)

    def close(self) -> None:
        """Nobody may come any more."""
        for stranger in list(self._strangers):
            self._send_away(stranger)
        if self._paused_until is None:
            self._selector.unregister(self._server)
        self._server.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._server.accept()
        except (BlockingIOError, ConnectionError):  # it has gone already
            return
        except OSError as error:  # mostly too many open files; the selector would report the same connection forever
            if not self._warned:
                log.warning("a launch can't take connections at %s, port %d: %s", *self.address, error)
            self._warned = True
            self._selector.unregister(self._server)
            self._paused_until = time.monotonic() + PAUSE_S
            return
        self._warned = False
        with contextlib.suppress(OSError):
            if len(self._strangers) >= STRANGERS:
                self._send_away(self._strangers[0])
            stranger = _Stranger(Channel(connection), peer[0], greeting.nonce(), time.monotonic())
            self._strangers.append(stranger)
            self._selector.register(stranger.channel, selectors.EVENT_READ, lambda: self._hear(stranger))
            stranger.channel.send({"nonce": stranger.nonce})
            stranger.channel.flush()  # so little that the network takes it at once

    def _hear(self, stranger: _Stranger) -> None:
        try:
            message = next(stranger.channel.receive(), None)
        except Gone:
            self._send_away(stranger)
            return
        if message is None:
            return
        hello = Hello.of(message.head)
        if hello is None or not self._knows_token(hello, stranger.nonce):
            self._refusals.add(stranger.peer)
            self._send_away(stranger)
            return
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.channel)
        self._admit(stranger.channel, hello, (stranger.asked_at + time.monotonic()) / 2 - hello.clock)

    def _knows_token(self, hello: Hello, nonce: str) -> bool:
        return self.token is not None and greeting.proves(self.token, "agent", nonce, hello.proof)

    def _send_away(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.channel)
        stranger.channel.close()
