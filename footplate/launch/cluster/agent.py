"""The far end of a launch: on another machine, a `LocalCrew` served over a connection to the driver.

An engine (Ray, Spark) runs `AgentCall` once for each rank, each in a *place* that has the resources of one worker. Every
agent connects to the driver and tells who it is (`greeting.py`). Of the agents of one household, the first carries all of
its ranks, so that a machine imports torch once; the others hold their places, and are missed if they go.

    driver (`crew.py`)                  agent
    prepare, the payload  ────────►     starts a nursery                       (one of each household)
    host                  ────────►     binds the socket of the store          (the one with rank 0)
                          ◄────────     store: where that is
    carry                 ────────►     starts its share of the attempt's workers
                          ◄────────     alive, wrote, reported, ended: the crew's events
                          ◄────────     here: every second, so that a lost machine isn't taken for a frozen worker
    signal, kill, release ────────►     passes them on
    close                 ────────►     ends its workers and itself, and what the machine has kept for the launch
                                        (`worker.kept`), unless another gang is to follow

When the connection breaks, the agent kills its workers and ends, as at the end of the launch: the driver is gone, or has
lost it and begins anew with other agents.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from footplate.core.errors import LaunchError
from footplate.launch import rendezvous, worker
from footplate.launch.cluster import greeting
from footplate.launch.cluster.channel import Channel, Gone, Message
from footplate.launch.crew import Alive, Attempt, Ended, Event, Reported, Wrote
from footplate.launch.local import Caller, LocalCrew

PAYLOAD = "payload"
TICK_S = 0.5
HERE_S = 1.0
CONNECT_S = 20.0


@dataclass(frozen=True)
class AgentCall:
    """What an engine runs in each place; it returns when the launch needs the place no more.

    Attributes:
        host: the driver's address.
        port: the driver's port.
        token: the secret of this gang.
    """

    host: str
    port: int
    token: bytes

    def __call__(self, index: int, node: str = "") -> None:
        """Serve as agent number `index`. Ranks of different `node`s never share a household.

        Raises:
            LaunchError: the driver can't be reached, or isn't one.
        """
        try:
            connection = socket.create_connection((self.host, self.port), timeout=CONNECT_S)
        except OSError as error:
            raise LaunchError(
                f"The worker's place on {socket.gethostname()} can't reach the driver at {self.host}:{self.port}: {error}. "
                "The driver listens there on a free port: the nodes must be able to connect to it."
            ) from error
        address = connection.getsockname()[0]
        channel = Channel(connection)
        try:
            if _greet(channel, self, index, node, address):
                _Agent(channel, address).serve()
        finally:
            channel.close()


def _greet(channel: Channel, call: AgentCall, index: int, node: str, address: str) -> bool:
    """Whether the driver wants this agent."""
    with contextlib.suppress(Gone):  # an agent of an earlier gang, or of other versions, is sent away
        challenge = _next(channel).head.get("nonce")
        hello = greeting.greet(call.token, index, str(challenge), node, address)
        channel.send(hello.as_message())
        channel.flush()
        if greeting.proves(call.token, "driver", hello.nonce, str(_next(channel).head.get("proof"))):
            channel.trusted = True
            return True
        raise LaunchError(f"What listens at {call.host}:{call.port} is not the driver of this launch.")
    return False


def _next(channel: Channel) -> Message:
    """The one message that is due."""
    while True:
        if not select.select([channel], [], [], CONNECT_S)[0]:
            raise Gone(f"it said nothing for {CONNECT_S:.0f} s")
        for message in channel.receive():
            return message


class _Agent:
    """Serves the driver that `channel` leads to; `address` is this machine's, on the way to it."""

    def __init__(self, channel: Channel, address: str) -> None:
        self._channel = channel
        self._address = address
        self._crew: LocalCrew | None = None
        self._store: socket.socket | None = None
        self._payload: int | None = None
        self._launch: str | None = None  # for which this agent looks after workers
        self._open = True
        self._another_follows = False
        self._here_at = time.monotonic()  # when the driver is told again that this machine is there

    def serve(self) -> None:
        """Until the driver says so or is gone."""
        try:
            while self._open:
                for message in self._channel.receive():
                    self._heed(message)
                if self._crew is not None and not self._channel.clogged:
                    for event in self._crew.wait(0):
                        self._tell(event)
                if time.monotonic() >= self._here_at and not self._channel.pending:
                    self._here_at = time.monotonic() + HERE_S
                    self._channel.send({"event": "here"})
                self._channel.flush()
                self._wait()
        except Gone:
            pass
        except LaunchError as error:  # no worker can ever be started here
            self._channel.send({"event": "unable", "text": str(error)})
            self._linger()
        finally:
            if self._crew is not None:
                self._crew.close()
            if self._store is not None:
                self._store.close()
            if self._payload is not None:
                os.close(self._payload)
            if self._launch is not None and not self._another_follows:
                shutil.rmtree(worker.kept_of(self._launch), ignore_errors=True)

    def _wait(self) -> None:
        """Until there is something to do. Output of workers that the driver doesn't take stays in their pipes."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.pending else 0))
        if self._crew is not None and not self._channel.clogged:
            poll.register(self._crew, select.POLLIN)
        poll.poll(TICK_S * 1000)

    def _linger(self) -> None:
        """Let what was said last arrive."""
        with contextlib.suppress(Gone):
            while True:
                self._channel.flush()
                self._wait()
                for message in self._channel.receive():
                    if message.head["do"] == "close":
                        return

    def _heed(self, message: Message) -> None:
        order = message.head
        do = order["do"]
        if do == "prepare":
            payload = self._channel.parcel(PAYLOAD)
            self._launch = order["environment"].get(worker.LAUNCH)
            self._crew = LocalCrew(payload, order["environment"], order["preload"], _caller(order["caller"]))
            self._crew.prepare()
        elif do == "payload":
            self._payload = message.parcel
        elif do == "host":
            if self._store is not None:
                self._store.close()
            self._store = rendezvous.listen(self._address, order["world_size"])
            self._channel.send({"event": "store", "at": self._store.getsockname()[:2]})
        elif do == "close":
            self._open, self._another_follows = False, order["another_follows"]
        elif self._crew is not None:
            self._command(self._crew, do, order)

    def _command(self, crew: LocalCrew, do: str, order: dict[str, Any]) -> None:
        if do == "carry":
            share = share_of(order["share"], self._address)
            why = "" if 0 in share.ranks else _unreachable(share.store)
            if why:
                for rank in share.ranks:
                    self._tell(Ended(rank, None, time.monotonic(), why))
                return
            crew.carry(share, self._store if 0 in share.ranks else None)
            if self._store is not None:
                self._store.close()
                self._store = None
        elif do == "signal":
            crew.send(order["rank"], order["signum"])
        elif do == "kill":
            crew.kill(order["rank"])
        elif do == "release":
            crew.release()

    def _tell(self, event: Event) -> None:
        send = self._channel.send
        if isinstance(event, Alive):
            send({"event": "alive", "rank": event.rank, "progressed": event.progressed})
        elif isinstance(event, Wrote):
            send({"event": "wrote", "rank": event.rank, "stream": event.stream, "raw": event.raw}, event.data)
        elif isinstance(event, Reported):
            self._channel.post(f"rank {event.rank}", event.home, {"event": "reported", "rank": event.rank})
        else:
            told = {"rank": event.rank, "code": event.code, "at": event.at, "text": event.text, "whole": event.whole}
            send({"event": "ended", **told}, behind=f"rank {event.rank}")


def _unreachable(store: tuple[str, int]) -> str:
    """Why ranks here could never meet rank 0, to be read after "rank 1 "; empty if its store can be reached."""
    try:
        socket.create_connection(store, timeout=CONNECT_S).close()
    except OSError as error:
        return (
            f"can't meet rank 0: {socket.gethostname()} can't connect to {store[0]}:{store[1]}, a free port of rank 0's "
            f"machine: {error}. Workers connect to each other on free ports, which no firewall may close"
        )
    return ""


def share_as_message(share: rendezvous.Share) -> dict[str, Any]:
    """A share, for `share_of` at the other end, which knows its address itself."""
    attempt = share.attempt
    return {
        "number": attempt.number, "slots": attempt.slots, "terminals": sorted(attempt.terminals), "ranks": share.ranks,
        "store": share.store, "node": share.node, "environment": dict(share.environment), "tasks": share.tasks,
    }  # fmt: skip


def share_of(message: dict[str, Any], address: str) -> rendezvous.Share:
    """What `share_as_message` was given."""
    attempt = Attempt(message["number"], tuple(message["slots"]), frozenset(message["terminals"]))
    host, port = message["store"]
    ranks, tasks = tuple(message["ranks"]), tuple(message["tasks"])
    return rendezvous.Share(attempt, ranks, (host, port), address, message["node"], message["environment"], tasks=tasks)


def _caller(told: dict[str, Any]) -> Caller:
    """The driver's script, directory and path, which is searched before what this machine has of its own."""
    caller = Caller(**told)
    own = [entry for entry in Caller.here().path if entry not in caller.path]
    return replace(caller, path=caller.path + own)
