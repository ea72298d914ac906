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
    bye: exit code     ───────►       ends

A message is a line of JSON. The end of a member's connection is the end of its agents, on both sides. The driver takes that
for a failure of the host, and its next attempt begins when the command has been given on a machine in its place. Whoever
knows the token may run code on all of these machines, so there is no default for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import threading
from base64 import b64encode
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from footplate.errors import ConfigError, LaunchError
from footplate.launch.cluster import greeting
from footplate.launch.cluster.agent import AgentCall
from footplate.launch.cluster.channel import notice_silence
from footplate.launch.cluster.placement import Lost

log = logging.getLogger(__name__)

JOIN_S = 600.0  # for all machines to be there
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
            return json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """End it, also for who is just receiving."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@dataclass
class _Member:
    line: Line
    running: set[int] = field(default_factory=set)


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
        self.host = host
        self._nodes = nodes
        self._places = places
        self._token = token.encode()
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._calls: deque[tuple[int, AgentCall]] = deque()
        self._lost: list[Lost] = []
        try:
            self._server = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"--master-addr {host} --master-port {port}: nobody can listen there: {error}. Give an address of this "
                "machine that the others reach, and a port that is free."
            ) from error
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="footplate-lobby", daemon=True).start()

    def slots(self) -> int:
        """Those of all machines; waits for them.

        Raises:
            LaunchError: some don't come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._members) == self._nodes, JOIN_S):
                missing = sorted(set(range(self._nodes)) - self._members.keys())
                raise LaunchError(
                    f"--nnodes {self._nodes}: after {JOIN_S:.0f} s there is nobody of --node-rank "
                    f"{', '.join(map(str, missing))}. Give the same command there, with the same FOOTPLATE_TOKEN."
                )
        return self._nodes * self._places

    def start(self, count: int, call: AgentCall) -> None:
        with self._changed:
            self._calls = deque((index, call) for index in range(count))
            self._hand_out()

    def lost(self) -> list[Lost]:
        with self._changed:
            found, self._lost = self._lost, []
        return found

    def close(self) -> None:
        with self._changed:
            self._calls.clear()
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
        self._server.close()
        with self._changed:
            for member in self._members.values():
                member.line.send(do="bye", code=code)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(Line(connection), peer[0]), daemon=True).start()

    def _serve(self, line: Line, peer: str) -> None:
        node = self._greet(line)
        if node is None:
            log.warning(
                "a connection from %s was refused: it doesn't know FOOTPLATE_TOKEN, or isn't of this launch", peer
            )
            line.close()
            return
        member = _Member(line)
        with self._changed:
            if node in self._members:
                line.send(do="refused", why=f"--node-rank {node} is there already: give each machine one of its own")
                line.close()
                return
            self._members[node] = member
            self._hand_out()
            self._changed.notify_all()
        while (message := line.receive()) is not None:
            if "told" in message:
                os.kill(os.getpid(), message["told"])
            else:
                self._ended(member, [message["ended"]], f"its agent ended with exit code {message['code']}")
        with self._changed:
            del self._members[node]
        self._ended(member, sorted(member.running), f"machine {node} has gone")

    def _greet(self, line: Line) -> int | None:
        """Which machine it is, if it is one of ours."""
        nonce = greeting.nonce()
        line.send(nonce=nonce)
        hello = line.receive() or {}
        node, said = hello.get("node"), str(hello.get("proof"))
        if not greeting.proves(self._token, "member", nonce, said) or node not in range(self._nodes):
            return None
        line.send(proof=greeting.proof(self._token, "lobby", str(hello.get("nonce"))))
        return node

    def _hand_out(self) -> None:
        """Give calls to the machines in their order, to each as many as it has places."""
        for _, member in sorted(self._members.items()):
            while self._calls and len(member.running) < self._places:
                index, call = self._calls.popleft()
                member.running.add(index)
                member.line.send(do="start", index=index, call=b64encode(pickle.dumps(call)).decode())

    def _ended(self, member: _Member, indices: list[int], text: str) -> None:
        with self._changed:
            for index in indices:
                if index in member.running:
                    member.running.remove(index)
                    self._lost.append(Lost(index, text))
            self._changed.notify_all()
