"""Machines that people, or a scheduler, start one by one: a placement without a cluster's engine.

The same command is given on each machine. The first one (`node_rank` 0) has the driver, and the rendezvous at which all
machines join:

    rendezvous                        member (`member.py`), one on each machine, the first one too
                       ◄───────       connects, again and again until the rendezvous is there
                       ◄──────►       with --tls, TLS begins (`core/net/tls.py`)
                       ◄──────►       both prove the token (`core/net/handshake.py`); the member tells its node rank
    start: a call      ───────►       starts an agent in a process of its own (`agent.py`), which connects to the driver
                       ◄───────       ended: which agent, and why
                       ◄───────       signal: SIGTERM or Ctrl-C has arrived there, and so it has arrived at the launch,
                                      unless the launch can go on without this machine
    stop               ───────►       ends its agents
    ping               ───────►
                       ◄───────       pong
    bye: exit code     ───────►       ends
    refused: why       ───────►       ends

Anybody can connect to the rendezvous. A connection that hasn't proved the token after `HANDSHAKE_S` is closed. There are
never more than `MAX_STRANGERS` of these; beyond that, the oldest one is closed.

The rendezvous pings each machine about once in `LOOK_S`. One that hasn't answered for `ANSWER_S` counts as silent.

With P workers on each machine, machine n always has the workers n · P to n · P + P - 1, in whichever order the machines
join. When a machine joins whose node rank is taken, the rendezvous pings the earlier one. If there is no answer within
`ANSWER_S`, the earlier one is lost and the new one replaces it. So a machine that has started again needn't wait until
its own old connection times out.

The end of a member's connection is the end of its agents, on both sides. The driver treats it as a failure of the host.
Its next attempt begins when the command has been given on a machine in its place.

With fewer `min_nodes` than nodes, the next attempt has the machines that are there. A machine that joins later waits: the
supervisor begins another attempt with it after the next checkpoint. A machine that gets SIGTERM leaves: all ranks save and
end, and the next attempt goes without it.

A person who has the token may run code on all of these machines, so there is no default for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from footplate.core.errors import ConfigError, LaunchError
from footplate.core.net.framing import MAX_STRANGER_BYTES, Frame, FrameDecoder, encode_frame
from footplate.core.net.handshake import DEADLINE_S, HandshakeError, ServerHandshake, Strangers, WrongTokenError
from footplate.core.net.silence import detect_silence
from footplate.core.net.tls import ANNOUNCEMENT, ServerKey, TlsStream
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.placement import Lost
from footplate.launch.cluster.refusal_log import RefusalLog

log = logging.getLogger(__name__)

# Time for all machines to join.
JOIN_S = 600.0
# Time to replace a lost machine. It is shorter than the supervisor's wait for a rank's first sign of life.
REPLACE_S = 570.0
# The same, if other machines are enough. A machine that has just been lost is in this way told from one that is slow.
REPLACE_ONE_S = 10.0
# Time until the missing machines are logged. It doubles after each log line.
WARN_S = 15.0
# Time between two warnings that too few machines are left.
WARN_AGAIN_S = 60.0
HANDSHAKE_S = DEADLINE_S
MAX_STRANGERS = 64
# Time for a machine to answer a ping.
ANSWER_S = 5.0
LOOK_S = 0.5
# Time for agents to end.
STOP_S = 15.0
# Size limit of a frame.
MAX_BYTES = 1 << 16
# The connection's purpose, which the handshake compares.
PURPOSE = "machine"


class Connection:
    """One end of a connection that carries frames. It blocks, and may be used from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        detect_silence(connection)
        self._connection = connection
        # The file keeps the descriptor open until this object goes. So a thread that is just receiving can't read from
        # another connection that has got the same number after `close`.
        self._file = connection.makefile("rb")
        self._writing = threading.Lock()
        self._decoder = FrameDecoder()
        self._tls: TlsStream | None = None

    def begin_tls(self, stream: TlsStream) -> None:
        """Encrypt everything from now on. Nothing else may have arrived from the other end."""
        self._tls = stream
        self._send(b"")

    def send(self, data: bytes = b"", /, **message: Any) -> None:
        """Send a message. It is lost if the other end has gone, which `receive` shows."""
        self._send(encode_frame(message, data))

    def receive(self, max_bytes: int = MAX_BYTES) -> Frame | None:
        """Wait for the next message; return None when there will be none."""
        self._decoder.max_bytes = max_bytes
        try:
            while (frame := self._decoder.next_frame()) is None:
                data = self._connection.recv(MAX_BYTES)
                if not data:
                    return None
                self._decoder.feed(data if self._tls is None else self._decrypted(data, self._tls))
        except OSError:
            # The connection broke, or the machine broke the protocol.
            return None
        return frame if isinstance(frame.message, dict) else None

    def close(self) -> None:
        """Close the connection, also for a thread that is just receiving."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError), self._writing:
            if self._tls is not None:
                self._tls.write(data)
                data = self._tls.outgoing()
            self._connection.sendall(data)

    def _decrypted(self, data: bytes, tls: TlsStream) -> bytes:
        plain = tls.received(data)
        # TLS has an answer of its own during its handshake.
        self._send(b"")
        return plain


@dataclass
class _Member:
    """A machine that has joined.

    Attributes:
        connection: to its member.
        running: the indices of the workers that it has.
        received: how many messages have arrived from it.
        pinged_at: when it was pinged; None if it has answered since.
    """

    connection: Connection
    running: set[int] = field(default_factory=set)
    received: int = 0
    pinged_at: float | None = None

    def ping(self) -> None:
        """Ask for an answer, unless one is due."""
        if self.pinged_at is None:
            self.pinged_at = time.monotonic()
            self.connection.send(do="ping")

    @property
    def silent(self) -> bool:
        return self.pinged_at is not None and time.monotonic() > self.pinged_at + ANSWER_S


class MachinePlacement:
    """A `Placement` on machines that join. Threads serve their connections.

    Args:
        nodes: how many machines.
        workers_per_node: how many workers each has.
        host: the address of this machine, for the other machines.
        port: where they connect to; 0 for a free one.
        token: the secret that they must prove.
        min_nodes: the fewest machines that are enough; None for all.
        key: to encrypt the connections of machines with; None for none.

    Raises:
        ConfigError: this process can't listen at this address.
    """

    name = "machines"
    # `slots` waits for `min_nodes` itself.
    min_workers: int | None = None

    def __init__(
        self,
        nodes: int,
        workers_per_node: int,
        host: str,
        port: int,
        token: str,
        min_nodes: int | None = None,
        key: ServerKey | None = None,
    ) -> None:
        self.host: str
        self.port: int
        self._nodes = nodes
        self._min_nodes = nodes if min_nodes is None else min_nodes
        self._workers_per_node = workers_per_node
        self._token = token.encode()
        self._key = key
        self._changed = threading.Condition()
        # The machines, by node rank.
        self._members: dict[int, _Member] = {}
        # The machines that have been asked to end, and leave when their agents have ended.
        self._leaving: set[int] = set()
        # The machine of each index of the present agents.
        self._node_of: list[int] = []
        # Calls for machines that haven't joined yet, by index.
        self._calls: dict[int, AgentCall] = {}
        self._calls_until = 0.0
        # When to log again that there are too few machines.
        self._warn_at = 0.0
        self._lost: list[Lost] = []
        self._strangers: Strangers[Connection] = Strangers(MAX_STRANGERS, HANDSHAKE_S)
        self._refusals = RefusalLog(log, "it doesn't know FOOTPLATE_TOKEN, or isn't of this launch")
        self._closed = False
        self._server = _listen(host, port)
        self._server.settimeout(LOOK_S)
        self.host, self.port = self._server.getsockname()[:2]
        threading.Thread(target=self._accept_all, name="footplate-machines", daemon=True).start()

    def slots(self, wanted: int = 0) -> int:
        """The number of workers of all machines. Waits for the machines.

        Raises:
            LaunchError: some don't join.
        """
        until, warn_at, pause_s = time.monotonic() + JOIN_S, time.monotonic() + WARN_S, WARN_S
        with self._changed:
            while len(missing := self._missing()) > self._nodes - self._min_nodes:
                now = time.monotonic()
                if now > until:
                    raise LaunchError(f"--nnodes {self._written()}: after {JOIN_S:.0f} s, {self._absent(missing)}")
                if now > warn_at:
                    log.warning("%s", self._absent(missing))
                    pause_s *= 2
                    warn_at = now + pause_s
                self._changed.wait(LOOK_S)
        return self._nodes * self._workers_per_node

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        if self._min_nodes == self._nodes:
            return slots
        with self._changed:
            nodes = {node for node, member in self._members.items() if node not in self._leaving and not member.silent}
        if len(nodes) >= self._min_nodes:
            return tuple(slot for slot in slots if self._node(slot) in nodes)
        if time.monotonic() > self._warn_at:
            self._warn_at = time.monotonic() + WARN_AGAIN_S
            log.warning("%s", self._absent(sorted(set(range(self._nodes)) - nodes)))
        return ()

    def leaving(self) -> bool:
        with self._changed:
            return bool(self._leaving)

    def start(self, slots: Sequence[int], call: AgentCall) -> None:
        with self._changed:
            self._node_of = [self._node(slot) for slot in slots]
            self._calls = dict.fromkeys(range(len(slots)), call)
            self._calls_until = time.monotonic() + self._replace_s()
            self._start_agents()
            if self._calls:
                log.warning("%s", self._absent(self._missing()))

    def lost(self) -> list[Lost]:
        with self._changed:
            if self._calls and time.monotonic() > self._calls_until:
                text = f"after {self._replace_s():.0f} s, {self._absent(self._missing())}"
                self._lost += [Lost(index, text) for index in self._calls]
                self._calls = {}
            lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        with self._changed:
            self._calls, self._node_of = {}, []
            for member in self._members.values():
                member.connection.send(do="stop")
            self._changed.wait_for(lambda: not any(m.running for m in self._members.values() if not m.silent), STOP_S)

            # A member whose agents still run doesn't obey: it is cut off.
            for member in self._members.values():
                if member.running:
                    member.running.clear()
                    member.connection.close()
            for node in self._leaving & self._members.keys():
                self._members.pop(node).connection.send(do="bye", code=128 + signal.SIGTERM)
            self._leaving.clear()
            self._lost = []

    def dismiss(self, code: int) -> None:
        """End the launch: members end with this exit code."""
        with self._changed:
            self._closed = True
            for member in self._members.values():
                member.connection.send(do="bye", code=code)
        self._server.close()

    def _node(self, slot: int) -> int:
        return slot // self._workers_per_node

    def _written(self) -> str:
        """The value of --nnodes."""
        return str(self._nodes) if self._min_nodes == self._nodes else f"{self._min_nodes}:{self._nodes}"

    def _replace_s(self) -> float:
        return REPLACE_S if self._min_nodes == self._nodes else REPLACE_ONE_S

    def _missing(self) -> list[int]:
        return sorted(set(range(self._nodes)) - self._members.keys())

    def _absent(self, missing: list[int]) -> str:
        """Describe which machines are missing, and what to do."""
        numbers = ", ".join(map(str, missing))
        text = (
            f"no machine has joined as --node-rank {numbers}. Give the same command there, with the same FOOTPLATE_TOKEN. "
            f"Those machines must reach {self.host}, port {self.port}."
        )
        if ipaddress.ip_address(self._server.getsockname()[0]).is_loopback:
            text += f" {self.host} is a loopback address, which only this machine itself reaches."
        return text

    def _accept_all(self) -> None:
        """Accept connections, and close those whose time has passed. Runs in a thread."""
        # True if a failure to accept was logged since the last accepted connection.
        warned = False
        while not self._closed:
            self._refusals.flush()
            connection, peer = None, ("",)
            try:
                connection, peer = self._server.accept()
                warned = False
            except TimeoutError:
                pass
            except OSError as error:
                # The socket was closed, or too many files are open.
                if not self._closed:
                    if not warned:
                        log.warning("machine 0 can't take connections of other machines: %s", error)
                    warned = True
                    time.sleep(LOOK_S)

            with self._changed:
                for stranger in self._strangers.expired(time.monotonic()):
                    stranger.close()
                for member in self._members.values():
                    member.ping()
            if connection is not None:
                self._accept(connection, peer[0])

    def _accept(self, accepted: socket.socket, peer: str) -> None:
        accepted.settimeout(None)
        try:
            connection = Connection(accepted)
        except OSError:
            # The peer has closed the connection already.
            accepted.close()
            return

        # Closing a connection also ends its thread.
        with self._changed:
            for oldest in self._strangers.add(connection, time.monotonic()):
                oldest.close()
        try:
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()
        except RuntimeError as error:
            # No more threads can be started.
            log.warning("a connection from %s could not be served: %s", peer, error)
            self._forget_stranger(connection)
            connection.close()

    def _forget_stranger(self, connection: Connection) -> None:
        with self._changed:
            self._strangers.discard(connection)

    def _serve(self, connection: Connection, peer: str) -> None:
        try:
            node = self._shake_hands(connection)
        finally:
            self._forget_stranger(connection)
        if node is None:
            self._refusals.add(peer)
            connection.close()
            return
        member = _Member(connection)
        if not self._admit(node, member):
            why = f"--node-rank {node} has joined already: give each machine a node rank of its own"
            connection.send(do="refused", why=why)
            connection.close()
            return

        while (frame := connection.receive()) is not None:
            message = frame.message
            with self._changed:
                member.received, member.pinged_at = member.received + 1, None
                self._changed.notify_all()
            if "signal" in message:
                self._pass_on(node, message["signal"])
            elif "ended" in message:
                why = f": {message['why']}" if message.get("why") else ""
                text = f"its agent on machine {node} ended with exit code {message['code']}{why}"
                self._record_end(member, [message["ended"]], text)
        self._remove(node, member)

    def _pass_on(self, node: int, signum: int) -> None:
        """Handle a signal that a machine has got: it leaves, or the launch ends."""
        with self._changed:
            left = self._members.keys() - self._leaving - {node}
            leaves = signum == signal.SIGTERM and len(left) >= self._min_nodes
            if leaves:
                self._leaving.add(node)
        if leaves:
            log.warning("machine %d was asked to end: the ranks save, and go on without it", node)
        else:
            os.kill(os.getpid(), signum)

    def _shake_hands(self, connection: Connection) -> int | None:
        """The node rank of a machine that has proved the token; None if it is refused."""
        handshake = ServerHandshake(PURPOSE, "" if self._key is None else self._key.binding)
        if self._key is not None:
            connection.send(**ANNOUNCEMENT)
            connection.begin_tls(self._key.stream())
        connection.send(**handshake.challenge)
        answer = connection.receive(MAX_STRANGER_BYTES)
        try:
            node = handshake.verify(self._token, answer.message if answer is not None else None).get("node")
        except WrongTokenError:
            connection.send(**handshake.refusal("it doesn't know FOOTPLATE_TOKEN"))
            return None
        except HandshakeError as error:
            connection.send(**handshake.refusal(str(error)))
            return None
        if type(node) is not int or node not in range(self._nodes):
            connection.send(**handshake.refusal(f"--node-rank {node} is none of --nnodes {self._nodes}"))
            return None
        connection.send(**handshake.acknowledgement(self._token))
        return node

    def _admit(self, node: int, member: _Member) -> bool:
        """Make this the machine of this node rank, unless another one has joined and answers."""
        with self._changed:
            earlier = self._members.get(node)
            if earlier is not None:
                received = earlier.received
                earlier.connection.send(do="ping")
                if self._changed.wait_for(lambda: earlier.received > received, ANSWER_S):
                    return False
                log.warning("machine %d has joined again; its earlier connection doesn't answer and is closed", node)
                self._remove(node, earlier)
            # Another machine with this node rank joined first.
            if node in self._members:
                return False
            self._members[node] = member
            if self._node_of and node not in self._node_of:
                log.warning("machine %d has joined: it takes part from the next checkpoint on", node)
            self._start_agents()
            self._changed.notify_all()
            return True

    def _remove(self, node: int, member: _Member) -> None:
        with self._changed:
            if self._members.get(node) is member:
                del self._members[node]
                self._leaving.discard(node)
                member.connection.close()
                self._record_end(member, sorted(member.running), f"machine {node} has gone")

    def _start_agents(self) -> None:
        """Send each machine that has joined the calls of its workers."""
        for index, call in list(self._calls.items()):
            member = self._members.get(self._node_of[index])
            if member is not None:
                del self._calls[index]
                member.running.add(index)
                member.connection.send(pickle.dumps(call), do="start", index=index)

    def _record_end(self, member: _Member, indices: list[int], text: str) -> None:
        with self._changed:
            for index in indices:
                if index in member.running:
                    member.running.remove(index)
                    self._lost.append(Lost(index, text))
            self._changed.notify_all()


def _listen(host: str, port: int) -> socket.socket:
    """A socket at which machines join.

    Raises:
        ConfigError: this process can't listen at this address, or other machines can't reach it.
    """
    flags = f"--master-addr {host} --master-port {port}"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        server = socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        raise ConfigError(
            f"{flags}: this process can't listen there: {error}. Give an address of this machine that the other machines "
            "reach, and a port that is free."
        ) from error
    bound = ipaddress.ip_address(str(address[0]))
    if bound.is_unspecified or (bound.is_loopback and not _is_loopback_on_purpose(host)):
        server.close()
        raise ConfigError(
            f"{flags}: on this machine that is {bound}, which the other machines can't connect to. Give the address that "
            "this machine has in the network (ip addr shows it)."
        )
    return server


def _is_loopback_on_purpose(host: str) -> bool:
    """Return True for an explicit loopback address, as when you try it out with several commands on one machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
