"""Connect the ranks to rank 0, on one machine or several.

    every rank → store     the host group that it is in
    rank 0 → store         its addresses, its port and a random token
    rank r → rank 0        connects; both prove the token (`core/net/handshake.py`)
    rank r → rank 0        ["stay"]: only now does the connection count

A rank gives up a connection that is too slow, and tries another address. With "stay" it says which one it has kept.

A name such as `localhost` means another machine on each machine. So rank r first tries the address at which it has met
the other ranks, if that isn't its own loopback. Then it tries the addresses that rank 0 has published, one after the
other. The ranks use the loopback interface if, and only if, all of them are on one machine. Rank 0 closes a connection
that doesn't prove the token. Silent connections delay nobody.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from footplate.compat.horovod.errors import HorovodInternalError
from footplate.core.net.framing import MAX_STRANGER_BYTES, Frame, FrameDecoder, encode_frame, receive_frame
from footplate.core.net.handshake import ClientHandshake, HandshakeError, ServerHandshake, Strangers
from footplate.launch.cluster.agent_info import host_group

log = logging.getLogger(__name__)

# Time for all ranks to connect, after they have met in the store.
MEET_S = 60.0
# Time for a connection to an address.
TRY_S = 5.0
# Pause after a failure to accept a connection.
PAUSE_S = 0.5
TICK_S = 1.0
# Limit of open connections that have not proved the token. Beyond it, the oldest is closed.
MAX_STRANGERS = 256
# The connection's purpose, which the handshake compares.
PURPOSE = "horovod"
STAY = ["stay"]
_LOOPBACK = "127.0.0.1"


def gather(size: int, store: Any) -> dict[int, socket.socket]:
    """Rank 0: wait for the other ranks' connections.

    Raises:
        HorovodInternalError: some have not connected within `MEET_S`.
    """
    own_group = host_group("")
    store.set("place/0", own_group)
    one_machine = all(store.get(f"place/{rank}").decode() == own_group for rank in range(1, size))
    token = secrets.token_hex(16)
    with _listen(one_machine) as listening:
        addresses = [_LOOPBACK] if one_machine else _own_addresses()
        port = listening.getsockname()[1]
        store.set("rank0", json.dumps({"addresses": addresses, "port": port, "token": token}))
        return _admit(listening, set(range(1, size)), token)


def reach(rank: int, store: Any) -> socket.socket:
    """Any other rank: connect to rank 0.

    Raises:
        HorovodInternalError: none of its addresses leads there.
    """
    store.set(f"place/{rank}", host_group(""))
    published = json.loads(store.get("rank0"))
    port, deadline = published["port"], time.monotonic() + MEET_S
    addresses = published["addresses"]
    if addresses != [_LOOPBACK]:
        addresses = list(dict.fromkeys([*_outward(_looked_up(os.environ.get("MASTER_ADDR", ""))), *addresses]))

    failures: dict[str, Exception] = {}
    while addresses and time.monotonic() < deadline:
        for address in addresses:
            try:
                return _connect(rank, address, port, published["token"], deadline)
            except (OSError, ValueError) as error:
                failures[address] = error
        # An address that has timed out may only be slow.
        addresses = [address for address in addresses if isinstance(failures[address], TimeoutError)]
    text = "; ".join(f"{address}: {error}" for address, error in failures.items())
    raise HorovodInternalError(
        f"Rank {rank} can't connect to rank 0 at port {port} ({text}). Let the machines reach each other at "
        "all TCP ports, and set MASTER_ADDR to an address of rank 0's machine that the others can reach."
    )


def _connect(rank: int, address: str, port: int, token: str, deadline: float) -> socket.socket:
    """A connection to rank 0, which has proved the token."""
    left = max(0.1, min(TRY_S, deadline - time.monotonic()))
    connection = socket.create_connection((address, port), timeout=left)
    try:
        handshake = ClientHandshake(token.encode(), PURPOSE)
        connection.sendall(encode_frame(handshake.answer(_receive(connection).message, {"rank": rank})))
        handshake.verify(_receive(connection).message)
        connection.sendall(encode_frame(STAY))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket) -> Frame:
    frame = receive_frame(connection, MAX_STRANGER_BYTES)
    if frame is None:
        raise ConnectionError("the connection was closed")
    return frame


def _admit(listening: socket.socket, missing: set[int], token: str) -> dict[int, socket.socket]:
    """Accept connections until each missing rank has one that it stays with.

    Raises:
        HorovodInternalError: some have not connected within `MEET_S`.
    """
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        admission = _Admission(listening, selector, missing, token)
        try:
            admission.run()
        except BaseException:
            for connection in admission.admitted.values():
                connection.close()
            raise
        finally:
            admission.close()
    return admission.admitted


@dataclass(eq=False)
class _Peer:
    """A connection that doesn't count yet. `rank`: whose it is, once it has proved the token."""

    connection: socket.socket
    handshake: ServerHandshake = field(default_factory=lambda: ServerHandshake(PURPOSE))
    decoder: FrameDecoder = field(default_factory=lambda: FrameDecoder(MAX_STRANGER_BYTES))
    rank: int | None = None


class _Admission:
    """The waiting of rank 0 for the other ranks.

    When this process has no file descriptor left, connections wait in the socket's queue for `PAUSE_S`.
    """

    def __init__(
        self, listening: socket.socket, selector: selectors.BaseSelector, missing: set[int], token: str
    ) -> None:
        self.admitted: dict[int, socket.socket] = {}
        self._listening = listening
        self._selector = selector
        self._expected = missing
        self._token = token.encode()
        self._peers: set[_Peer] = set()
        # Peers that have not proved the token.
        self._strangers: Strangers[_Peer] = Strangers(MAX_STRANGERS)
        # The time at which connections are accepted again, or None while they are accepted.
        self._accept_again_at: float | None = None
        self._warned = False
        self._deadline = time.monotonic() + MEET_S
        selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """Return when all ranks are admitted."""
        while missing := sorted(self._expected - self.admitted.keys()):
            now = time.monotonic()
            if now >= self._deadline:
                late = ", ".join(map(str, missing))
                raise HorovodInternalError(f"Ranks that have not connected to rank 0 within {MEET_S:.0f} s: {late}.")
            for stranger in self._strangers.expired(now):
                self._drop(stranger)
            for key, _ in self._selector.select(self._timeout(now)):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.data in self._peers:
                    # An earlier event of this round may have dropped the peer, to make room.
                    self._read(key.data)

    def close(self) -> None:
        """Close the connections that don't count."""
        for peer in self._peers:
            peer.connection.close()

    def _timeout(self, now: float) -> float:
        """The time to wait in the selector. Accepts connections again when a pause is over."""
        timeout = min(self._deadline - now, TICK_S)
        if self._accept_again_at is None:
            return timeout
        if now >= self._accept_again_at:
            self._accept_again_at = None
            self._selector.register(self._listening, selectors.EVENT_READ)
            return timeout
        return min(timeout, self._accept_again_at - now)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            # The peer has closed the connection already.
            return
        except OSError as error:
            # Mostly too many open files. The selector would report the same connection again at once.
            if not self._warned:
                log.warning("rank 0 can't accept connections of other ranks: %s", error)
            self._warned, self._accept_again_at = True, time.monotonic() + PAUSE_S
            self._selector.unregister(self._listening)
            return

        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        for oldest in self._strangers.add(peer, time.monotonic()):
            self._drop(oldest)
        self._send(peer, peer.handshake.challenge)

    def _read(self, peer: _Peer) -> None:
        """Take a frame of this connection, and no byte behind it."""
        try:
            while (frame := peer.decoder.next_frame()) is None:
                piece = peer.connection.recv(peer.decoder.missing_bytes)
                if not piece:
                    self._drop(peer)
                    return
                peer.decoder.feed(piece)
            if peer.rank is None:
                self._check_proof(peer, frame.message)
            elif frame.message == STAY:
                self._stay(peer, peer.rank)
            else:
                self._drop(peer)
        except BlockingIOError:
            return
        except OSError:
            # The connection broke, or the peer broke the protocol.
            self._drop(peer)

    def _check_proof(self, peer: _Peer, answer: Any) -> None:
        rank = peer.handshake.verify(self._token, answer).get("rank")
        if type(rank) is not int or rank not in self._expected:
            raise HandshakeError(f"rank {rank} is not expected")
        self._strangers.discard(peer)
        peer.rank = rank
        self._send(peer, peer.handshake.acknowledgement(self._token))

    def _stay(self, peer: _Peer, rank: int) -> None:
        """Admit a rank that has kept this connection."""
        self._selector.unregister(peer.connection)
        self._peers.discard(peer)
        peer.connection.setblocking(True)
        peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.admitted[rank] = peer.connection

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        try:
            # The message is so short that the network takes it at once.
            peer.connection.sendall(encode_frame(message))
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._strangers.discard(peer)
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.connection)
        peer.connection.close()


def _listen(one_machine: bool) -> socket.socket:
    if one_machine:
        return socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _own_addresses() -> list[str]:
    """The addresses of this machine at which others may reach it; those of its name come first."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    of_interfaces = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    ]
    of_name = [address for address in _looked_up(socket.gethostname()) if address in of_interfaces]
    ipv4_first = sorted(of_interfaces, key=lambda address: ":" in address)
    return list(dict.fromkeys(_outward([*of_name, *ipv4_first])))


def _outward(addresses: list[str]) -> list[str]:
    """The addresses that mean the same machine on every machine."""
    parsed = [(address, ipaddress.ip_address(address.partition("%")[0])) for address in addresses]
    return [address for address, ip in parsed if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)]


def _looked_up(name: str) -> list[str]:
    """The addresses of a machine's name; none if the name isn't known."""
    if not name:
        return []
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
