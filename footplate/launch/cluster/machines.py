"""Machines that people start by hand, or a scheduler does: a placement without a cluster's engine.

The same command is given on each; the first (`node_rank` 0) has the driver and the lobby in which all of them meet:

    lobby                             member (`member.py`), one on each machine, the first one too
                       ◄───────       connects, again and again until the lobby is there
    a nonce            ───────►
                       ◄───────       its proof of the token, a nonce of its own, which machine it is
    the proof of that  ───────►
    start: a call      ───────►       starts an agent in a process of its own (`agent.py`), which talks to the driver itself
                       ◄───────       ended: which one
                       ◄───────       told: SIGTERM or Ctrl-C has come there, and so it has come to the launch
    stop               ───────►       ends its agents
    still there?       ───────►
                       ◄───────       here
    bye: exit code     ───────►       ends
    refused: why       ───────►       ends

Anybody can connect to the lobby. A connection that hasn't proved the token after `GREET_S` is closed. There are never more
than `STRANGERS` of these; beyond that the oldest one is closed.

With P workers on each machine, machine n always carries the places n · P to n · P + P - 1, in whichever order the machines
come. When a machine comes whose number is taken, the lobby asks the earlier one whether it is still there. If there is no
answer within `ANSWER_S`, the earlier one is lost and the new one takes its place: a machine that has started again needn't
wait until its own old connection times out.

A message is a line of JSON. The end of a member's connection is the end of its agents, on both sides. The driver takes that
for a failure of the host, and its next attempt begins when the command has been given on a machine in its place. Whoever
knows the token may run code on all of these machines, so there is no default for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import pickle
import socket
import threading
import time
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch.cluster import greeting
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.channel import notice_silence
from footplate.launch.cluster.placement import Lost
from footplate.launch.cluster.refusals import Refusals

log = logging.getLogger(__name__)

JOIN_S = 600.0  # for all machines to be there
REPLACE_S = 570.0  # for a lost machine to be replaced; less than a supervisor waits for a sign of life
TELL_S = 15.0  # after which it is logged which machines are missing; then again after twice the time, and so on
GREET_S = 10.0  # for a connection to prove the token
STRANGERS = 64
ANSWER_S = 5.0  # for a machine to say that it is still there
LOOK_S = 0.5
STOP_S = 15.0  # for agents to end
LONGEST = 1 << 16  # bytes of a line


class Line:
    """One end of a connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        notice_silence(connection)
        self._connection = connection
        self._file = connection.makefile("rb")
        self._writing = threading.Lock()

    def send(self, **message: Any) -> None:
        """Say something; it is lost when nobody is there, of which `receive` tells."""
        with contextlib.suppress(OSError), self._writing:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when there will be none."""
        try:
            line = self._file.readline(LONGEST)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """End it, also for who is just receiving."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@dataclass
class _Member:
    """A machine that is there. `running`: the places that it carries. `heard`: how many messages have come from it."""

    line: Line
    running: set[int] = field(default_factory=set)
    heard: int = 0


class Lobby:
    """A `Placement` on machines that join. Threads listen to them.

    Args:
        nodes: how many machines.
        places: how many workers each has.
        host: the address of this machine, for the others.
        port: where they come to; 0 for a free one.
        token: what they must know.

    Raises:
        ConfigError: nobody can listen at this address.
    """

    name = "machines"

    def __init__(self, nodes: int, places: int, host: str, port: int, token: str) -> None:
        self.host: str
        self.port: int
        self._nodes = nodes
        self._places = places
        self._token = token.encode()
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._calls: dict[int, AgentCall] = {}  # of places whose machines aren't there yet
        self._calls_until = 0.0
        self._lost: list[Lost] = []
        self._strangers: dict[Line, float] = {}  # since when they are connected; the oldest first
        self._refusals = Refusals(log, "it doesn't know FOOTPLATE_TOKEN, or isn't of this launch")
        self._closed = False
        self._server = _listen(host, port)
        self._server.settimeout(LOOK_S)
        self.host, self.port = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, name="footplate-lobby", daemon=True).start()

    def slots(self) -> int:
        """Those of all machines; waits for them.

        Raises:
            LaunchError: some don't come.
        """
        until, tell_at, pause_s = time.monotonic() + JOIN_S, time.monotonic() + TELL_S, TELL_S
        with self._changed:
            while missing := self._missing():
                now = time.monotonic()
                if now > until:
                    raise LaunchError(f"--nnodes {self._nodes}: after {JOIN_S:.0f} s, {self._absent(missing)}")
                if now > tell_at:
                    log.warning("%s", self._absent(missing))
                    pause_s *= 2
                    tell_at = now + pause_s
                self._changed.wait(LOOK_S)
        return self._nodes * self._places

    def start(self, count: int, call: AgentCall) -> None:
        with self._changed:
            self._calls = dict.fromkeys(range(count), call)
            self._calls_until = time.monotonic() + REPLACE_S
            self._hand_out()
            if self._calls:
                log.warning("%s", self._absent(self._missing()))

    def lost(self) -> list[Lost]:
        with self._changed:
            if self._calls and time.monotonic() > self._calls_until:
                text = f"after {REPLACE_S:.0f} s, {self._absent(self._missing())}"
                self._lost += [Lost(index, text) for index in self._calls]
                self._calls = {}
            found, self._lost = self._lost, []
        return found

    def close(self) -> None:
        with self._changed:
            self._calls = {}
            for member in self._members.values():
                member.line.send(do="stop")
            self._changed.wait_for(lambda: not any(one.running for one in self._members.values()), STOP_S)
            for member in self._members.values():
                if member.running:  # it doesn't do as it is told
                    member.running.clear()
                    member.line.close()
            self._lost = []

    def dismiss(self, code: int) -> None:
        """There will be no other attempt: members end with this exit code."""
        with self._changed:
            self._closed = True
            for member in self._members.values():
                member.line.send(do="bye", code=code)
        self._server.close()

    def _missing(self) -> list[int]:
        return sorted(set(range(self._nodes)) - self._members.keys())

    def _absent(self, missing: list[int]) -> str:
        """Which machines aren't there, and what to do."""
        numbers = ", ".join(map(str, missing))
        text = (
            f"there is nobody of --node-rank {numbers}. Give the same command there, with the same FOOTPLATE_TOKEN; those "
            f"machines must reach {self.host}, port {self.port}."
        )
        if ipaddress.ip_address(self._server.getsockname()[0]).is_loopback:
            text += f" {self.host} is a loopback address, which only this machine itself reaches."
        return text

    def _accept(self) -> None:
        """In a thread: let connections in, and close those that say nothing."""
        warned = False  # of connections that can't be accepted, since one was
        while not self._closed:
            self._refusals.look()
            try:
                connection, peer = self._server.accept()
                warned = False
            except TimeoutError:
                connection, peer = None, ("",)
            except OSError as error:  # closed, or too many open files
                if not self._closed:
                    if not warned:
                        log.warning("the lobby can't take connections: %s", error)
                    warned = True
                    time.sleep(LOOK_S)
                connection, peer = None, ("",)
            self._send_away_strangers(STRANGERS - 1 if connection is not None else STRANGERS)
            if connection is not None:
                self._receive(connection, peer[0])

    def _receive(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(None)
        try:
            line = Line(connection)
        except OSError:  # it has gone already
            connection.close()
            return
        with self._changed:
            self._strangers[line] = time.monotonic()
        try:
            threading.Thread(target=self._serve, args=(line, peer), daemon=True).start()
        except RuntimeError as error:  # no more threads
            log.warning("a connection from %s could not be served: %s", peer, error)
            self._forget_stranger(line)
            line.close()

    def _send_away_strangers(self, most: int) -> None:
        """Close connections that have had their time, and the oldest where there are too many; their threads end of it."""
        with self._changed:
            now = time.monotonic()
            lines = list(self._strangers)
            for line in lines[: max(0, len(lines) - most)] + [
                one for one in lines if now > self._strangers[one] + GREET_S
            ]:
                self._strangers.pop(line, None)
                line.close()

    def _forget_stranger(self, line: Line) -> None:
        with self._changed:
            self._strangers.pop(line, None)

    def _serve(self, line: Line, peer: str) -> None:
        try:
            node = self._greet(line)
        finally:
            self._forget_stranger(line)
        if node is None:
            self._refusals.add(peer)
            line.close()
            return
        member = _Member(line)
        if not self._admit(node, member):
            line.send(do="refused", why=f"--node-rank {node} is there already: give each machine one of its own")
            line.close()
            return
        while (message := line.receive()) is not None:
            with self._changed:
                member.heard += 1
                self._changed.notify_all()
            if "told" in message:
                os.kill(os.getpid(), message["told"])
            elif "ended" in message:
                why = f": {message['why']}" if message.get("why") else ""
                text = f"its agent on machine {node} ended with exit code {message['code']}{why}"
                self._ended(member, [message["ended"]], text)
        self._remove(node, member)

    def _admit(self, node: int, member: _Member) -> bool:
        """Make it the machine of this number, unless another one is there and answers."""
        with self._changed:
            old = self._members.get(node)
            if old is not None:
                heard = old.heard
                old.line.send(do="still there?")
                if self._changed.wait_for(lambda: old.heard > heard, ANSWER_S):
                    return False
                log.warning("machine %d is there again; its earlier connection doesn't answer, and is closed", node)
                self._remove(node, old)
            if node in self._members:  # another one was faster
                return False
            self._members[node] = member
            self._hand_out()
            self._changed.notify_all()
            return True

    def _remove(self, node: int, member: _Member) -> None:
        with self._changed:
            if self._members.get(node) is member:
                del self._members[node]
                member.line.close()
                self._ended(member, sorted(member.running), f"machine {node} has gone")

    def _greet(self, line: Line) -> int | None:
        """Which machine it is, if it is one of ours."""
        nonce = greeting.nonce()
        line.send(nonce=nonce)
        hello = line.receive() or {}
        node, said = hello.get("node"), str(hello.get("proof"))
        if not greeting.proves(self._token, "member", nonce, said):
            line.send(do="refused", why="it doesn't know FOOTPLATE_TOKEN")
            return None
        if type(node) is not int or node not in range(self._nodes):
            line.send(do="refused", why=f"--node-rank {node} is none of --nnodes {self._nodes}")
            return None
        line.send(proof=greeting.proof(self._token, "lobby", str(hello.get("nonce"))))
        return node

    def _hand_out(self) -> None:
        """Give each machine that is there the calls of its places."""
        for node, member in self._members.items():
            for index in range(node * self._places, (node + 1) * self._places):
                call = self._calls.pop(index, None)
                if call is not None:
                    member.running.add(index)
                    member.line.send(do="start", index=index, call=b64encode(pickle.dumps(call)).decode())

    def _ended(self, member: _Member, indices: list[int], text: str) -> None:
        with self._changed:
            for index in indices:
                if index in member.running:
                    member.running.remove(index)
                    self._lost.append(Lost(index, text))
            self._changed.notify_all()


def _listen(host: str, port: int) -> socket.socket:
    """A socket at which machines come in.

    Raises:
        ConfigError: nobody can listen at this address, or others can't reach it.
    """
    flags = f"--master-addr {host} --master-port {port}"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
        server = socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        raise ConfigError(
            f"{flags}: nobody can listen there: {error}. Give an address of this machine that the others reach, and a port "
            "that is free."
        ) from error
    found = ipaddress.ip_address(str(address[0]))
    if found.is_unspecified or (found.is_loopback and not _says_loopback(host)):
        server.close()
        raise ConfigError(
            f"{flags}: on this machine that is {found}, which the other machines can't connect to. Give the address that "
            "this machine has in the network (ip addr shows it)."
        )
    return server


def _says_loopback(host: str) -> bool:
    """Whether an address is openly this machine's own: for trying it out with several commands on one machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
