"""The far end of a launch: a `LocalWorkerGroup` on another machine, controlled by the driver over a connection.

An engine (Ray, Spark) runs `AgentCall` once for each rank, each in an *allocation* that has the resources of one worker.
Every agent connects to the driver, and both prove the token (`agent_info.py`). The first agent of a host group runs all
of its ranks, so that a machine imports torch once. The other agents only hold their allocations. If one of them goes, its
rank is lost.

    driver (`agent_group.py`)           agent
    prepare, the payload  ────────►     starts a fork server                   (one agent of each host group)
    host                  ────────►     binds the socket of the store          (the agent with rank 0)
                          ◄────────     store: its address
    run                   ────────►     starts its share of the attempt's workers
                          ◄────────     alive, wrote, reported, ended: the worker group's events
                          ◄────────     heartbeat: every second, with this machine's clock. It tells a lost machine
                                        from a frozen worker
    signal, kill, release ────────►     passes them on
    stacks                ────────►     asks its workers, and sends `stacks` of each
    close                 ────────►     ends its workers and itself, and removes what the machine has kept for the launch
                                        (`worker.kept`), unless another group of agents follows

When the connection breaks, the agent kills its workers and ends, as at the end of the launch. Either the driver has gone,
or it has lost this agent and starts again with other agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from footplate.core.errors import LaunchError
from footplate.core.net.handshake import ClientHandshake, HandshakeError, WrongTokenError
from footplate.core.net.tls import client_stream, expect_announcement
from footplate.launch import rendezvous, worker
from footplate.launch.cluster.agent_info import PURPOSE, AgentInfo
from footplate.launch.cluster.channel import Channel, ChannelClosedError, Message
from footplate.launch.local import Caller, LocalWorkerGroup
from footplate.launch.worker_group import Alive, Attempt, Ended, Event, Reported, Stacks, Wrote

PAYLOAD = "payload"
TICK_S = 0.5
HEARTBEAT_S = 1.0
CONNECT_S = 20.0


@dataclass(frozen=True)
class AgentCall:
    """The call that an engine runs in each allocation. It returns when the launch no longer needs the allocation.

    Attributes:
        host: the driver's address.
        port: the driver's port.
        token: the secret of this group of agents.
        tls: whether the connection to the driver is encrypted.
    """

    host: str
    port: int
    token: bytes
    tls: bool = False

    def __call__(self, index: int, node: str = "") -> None:
        """Serve as agent number `index`. Ranks of different `node`s never share a host group.

        Raises:
            LaunchError: the driver can't be reached, or isn't one.
        ConfigError: this machine has no interface of the name in `FOOTPLATE_INTERFACE`.
        """
        try:
            connection = socket.create_connection((self.host, self.port), timeout=CONNECT_S)
        except OSError as error:
            raise LaunchError(
                f"The agent on {socket.gethostname()} can't reach the driver at {self.host}:{self.port}: {error}. "
                "The driver listens there on a free port: the nodes must be able to connect to it."
            ) from error
        address = rendezvous.own_address(connection.getsockname()[0])
        channel = Channel(connection)
        try:
            if _shake_hands(channel, self, index, node, address):
                _Agent(channel, address).serve()
        finally:
            channel.close()


def _shake_hands(channel: Channel, call: AgentCall, index: int, node: str, address: str) -> bool:
    """Return True if the driver accepts this agent. It closes the connection of an agent of an earlier group.

    Raises:
        LaunchError: the other end has not proved the token, or uses another protocol.
    """
    try:
        challenge, binding = _next_message(channel).head, ""
        if call.tls:
            expect_announcement(challenge)
            stream = client_stream()
            channel.begin_tls(stream)
            channel.flush()
            challenge, binding = _next_message(channel).head, stream.binding
        handshake = ClientHandshake(call.token, PURPOSE, binding)
        details = AgentInfo.of_this_process(index, node, address).as_details()
        channel.send(handshake.answer(challenge, details))
        channel.flush()
        handshake.verify(_next_message(channel).head)
    except ChannelClosedError:
        return False
    except WrongTokenError as error:
        raise LaunchError(f"What listens at {call.host}:{call.port} is not the driver of this launch.") from error
    except HandshakeError as error:
        raise LaunchError(
            f"What listens at {call.host}:{call.port} is not the driver of this launch: {error}."
        ) from error
    channel.trusted = True
    return True


def _next_message(channel: Channel) -> Message:
    """Wait for the one message that is due."""
    while True:
        if not select.select([channel], [], [], CONNECT_S)[0]:
            raise ChannelClosedError(f"it sent nothing for {CONNECT_S:.0f} s")
        for message in channel.receive():
            return message


class _Agent:
    """Serves the driver.

    Args:
        channel: to the driver.
        address: this machine's, for the other machines.
    """

    def __init__(self, channel: Channel, address: str) -> None:
        self._channel = channel
        self._address = address
        self._group: LocalWorkerGroup | None = None
        self._store: socket.socket | None = None
        self._payload_fd: int | None = None
        # The launch whose workers this agent runs.
        self._launch: str | None = None
        self._open = True
        self._another_follows = False
        # Time of the next heartbeat.
        self._heartbeat_at = time.monotonic()

    def serve(self) -> None:
        """Serve until the driver closes the launch, or is gone."""
        try:
            while self._open:
                for message in self._channel.receive():
                    self._handle(message)
                if self._group is not None and not self._channel.clogged:
                    for event in self._group.wait(0):
                        self._send_event(event)
                if time.monotonic() >= self._heartbeat_at and not self._channel.pending:
                    self._heartbeat_at = time.monotonic() + HEARTBEAT_S
                    self._channel.send({"event": "heartbeat", "clock": time.monotonic()})
                self._channel.flush()
                self._wait()
        except ChannelClosedError:
            pass
        except LaunchError as error:
            # No worker can ever be started on this machine.
            self._channel.send({"event": "unable", "text": str(error)})
            self._linger()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._store is not None:
            self._store.close()
        if self._payload_fd is not None:
            os.close(self._payload_fd)
        if self._launch is not None and not self._another_follows:
            shutil.rmtree(worker.kept_of(self._launch), ignore_errors=True)

    def _wait(self) -> None:
        """Wait until there is something to do. If the driver is slow, the workers' output stays in their pipes."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.pending else 0))
        if self._group is not None and not self._channel.clogged:
            poll.register(self._group, select.POLLIN)
        poll.poll(TICK_S * 1000)

    def _linger(self) -> None:
        """Wait until the driver has received the last message."""
        with contextlib.suppress(ChannelClosedError):
            while True:
                self._channel.flush()
                self._wait()
                for message in self._channel.receive():
                    if message.head["do"] == "close":
                        return

    def _handle(self, message: Message) -> None:
        """Do what the driver asks for."""
        order = message.head
        do = order["do"]
        if do == "prepare":
            payload_fd = self._channel.incoming_payload(PAYLOAD)
            self._launch = order["environment"].get(worker.LAUNCH)
            caller = _merged_caller(order["caller"])
            self._group = LocalWorkerGroup(payload_fd, order["environment"], order["preload"], caller)
            self._group.prepare()
        elif do == "payload":
            self._payload_fd = message.payload_fd
        elif do == "host":
            if self._store is not None:
                self._store.close()
            self._store = rendezvous.listen(self._address, order["world_size"])
            self._channel.send({"event": "store", "at": self._store.getsockname()[:2]})
        elif do == "close":
            self._open, self._another_follows = False, order["another_follows"]
        elif self._group is not None:
            self._command(self._group, do, order)

    def _command(self, group: LocalWorkerGroup, do: str, order: dict[str, Any]) -> None:
        if do == "run":
            self._run_share(group, share_from_message(order["share"], self._address))
        elif do == "signal":
            group.send(order["rank"], order["signum"])
        elif do == "kill":
            group.kill(order["rank"])
        elif do == "release":
            group.release()
        elif do == "stacks":
            group.ask_stacks(order["limit_s"], order["native"])

    def _run_share(self, group: LocalWorkerGroup, share: rendezvous.Share) -> None:
        """Start the workers of a share, unless they could never connect to rank 0."""
        problem = "" if 0 in share.ranks else _why_unreachable(share.store)
        if problem:
            for rank in share.ranks:
                self._send_event(Ended(rank, None, time.monotonic(), problem))
            return
        group.run_share(share, self._store if 0 in share.ranks else None)
        if self._store is not None:
            self._store.close()
            self._store = None

    def _send_event(self, event: Event) -> None:
        send = self._channel.send
        if isinstance(event, Alive):
            send({"event": "alive", "rank": event.rank, "progressed": event.progressed, "saved": event.saved})
        elif isinstance(event, Wrote):
            send({"event": "wrote", "rank": event.rank, "stream": event.stream, "raw": event.raw}, event.data)
        elif isinstance(event, Reported):
            head = {"event": "reported", "rank": event.rank}
            self._channel.send_payload(f"rank {event.rank}", event.payload_fd, head)
        elif isinstance(event, Stacks):
            send({"event": "stacks", "rank": event.rank}, json.dumps(event.process.to_dict()).encode())
        else:
            head = {"event": "ended", "rank": event.rank, "code": event.code, "at": event.at, "text": event.text}
            send({**head, "all_ranks": event.all_ranks}, behind=f"rank {event.rank}")


def _why_unreachable(store: tuple[str, int]) -> str:
    """The reason why ranks here can't connect to rank 0, as the end of a sentence; empty if its store can be reached."""
    try:
        socket.create_connection(store, timeout=CONNECT_S).close()
    except OSError as error:
        return (
            f"can't meet rank 0: {socket.gethostname()} can't connect to {store[0]}:{store[1]}, a free port of rank 0's "
            f"machine: {error}. Workers connect to each other on free ports, which no firewall may close"
        )
    return ""


def share_as_message(share: rendezvous.Share) -> dict[str, Any]:
    """Encode a share for `share_from_message` at the other end, which knows its own address."""
    attempt = share.attempt
    return {
        "number": attempt.number, "slots": attempt.slots, "terminals": sorted(attempt.terminals), "ranks": share.ranks,
        "store": share.store, "node": share.node, "environment": dict(share.environment), "tasks": share.tasks,
    }  # fmt: skip


def share_from_message(message: dict[str, Any], address: str) -> rendezvous.Share:
    """Decode a share that `share_as_message` has encoded."""
    attempt = Attempt(message["number"], tuple(message["slots"]), frozenset(message["terminals"]))
    host, port = message["store"]
    ranks, tasks = tuple(message["ranks"]), tuple(message["tasks"])
    return rendezvous.Share(attempt, ranks, (host, port), address, message["node"], message["environment"], tasks=tasks)


def _merged_caller(message: dict[str, Any]) -> Caller:
    """The driver's script, directory and path. Its path comes before this machine's own entries."""
    caller = Caller(**message)
    own_entries = [entry for entry in Caller.of_this_process().path if entry not in caller.path]
    return replace(caller, path=caller.path + own_entries)
