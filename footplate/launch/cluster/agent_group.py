"""Workers on the machines of a cluster: a `WorkerGroup` that controls agents, wherever an engine has placed them.

    Supervisor ─ AgentGroup ─ Listener ◄──TCP── agent on machine A: the workers of machine A
                      │                ◄──TCP── agent on machine B: the workers of machine B
                  Placement (Ray, Spark): starts the agents together, and reports those that it has lost

The engine only places the agents. Everything else goes over our own connections, so it is the same for every engine.
`agent.py` shows the messages.

An attempt begins when all agents are there. When a worker fails, the agents stay, with their warm fork servers, and the
next attempt costs a fork. An agent is lost when its connection breaks, when it doesn't obey, or when the engine says so.
Its ranks have then ended, which is a failure of the host. The other agents are dismissed when the next attempt begins,
which places a new group.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from footplate.core.errors import LaunchError
from footplate.core.net.tls import ServerKey
from footplate.core.stacks.snapshot import Process
from footplate.launch import payload, rendezvous
from footplate.launch.cluster import agent_info, rank_assignment
from footplate.launch.cluster.agent import PAYLOAD, AgentCall, share_as_message
from footplate.launch.cluster.agent_info import AgentInfo
from footplate.launch.cluster.channel import Channel, ChannelClosedError, Message
from footplate.launch.cluster.listener import Listener
from footplate.launch.cluster.placement import Placement
from footplate.launch.dispatch import Waker, dispatch_ready
from footplate.launch.local import KILL_S, Caller
from footplate.launch.worker_group import Alive, Attempt, Ended, Event, Reported, Stacks, Wrote

log = logging.getLogger(__name__)

# Interval between two questions to the placement.
LOOK_S = 0.2
# An agent from which nothing has come for this long is silent. It sends a heartbeat each second.
SILENT_S = 3.0


class AgentClock:
    """Converts times on an agent's monotonic clock to our monotonic clock.

    A message arrives later than it was sent, so the difference between the two clocks seems larger by its delay. The
    smallest difference of the last `READINGS` messages is the nearest. Earlier ones are forgotten, because clocks drift.
    """

    READINGS = 60

    def __init__(self) -> None:
        self._differences: deque[float] = deque(maxlen=self.READINGS)

    def read(self, sent_at: float, received_at: float) -> None:
        """Take the time at which a message was sent, on the agent's clock, and received, on ours."""
        self._differences.append(received_at - sent_at)

    def ours(self, at: float) -> float:
        """A time on the agent's clock, on ours."""
        return at + min(self._differences)


@dataclass
class _Agent:
    """An agent of the group.

    Attributes:
        channel: to the agent.
        info: its description of itself.
        clock: converts its times.
        leads: whether it runs the ranks of its host group.
        heard_at: when something arrived from it, on our clock.
    """

    channel: Channel
    info: AgentInfo
    clock: AgentClock
    leads: bool
    heard_at: float = field(default_factory=time.monotonic)

    def order(self, do: str, /, **message: Any) -> None:
        """Send it an order, behind the payload."""
        self.channel.send({"do": do, **message}, behind=PAYLOAD)


@dataclass
class _Generation:
    """The agents of one placement.

    Attributes:
        slots: the slots that the placement is for.
        agents: those that have connected, by the index of their allocation.
        allocations: for each slot, the index of its allocation, once all agents are there.
        broken: whether an agent was lost.
    """

    slots: tuple[int, ...]
    agents: dict[int, _Agent] = field(default_factory=dict)
    allocations: dict[int, int] = field(default_factory=dict)
    broken: bool = False

    def host_groups(self) -> list[str]:
        """The host group of each allocation, by index."""
        return [self.agents[index].info.host_group for index in range(len(self.slots))]

    def leader(self, host_group: str) -> _Agent | None:
        """The agent that runs the ranks of a host group."""
        agents = self.agents.values()
        return next((agent for agent in agents if agent.leads and agent.info.host_group == host_group), None)


@dataclass
class _Rank:
    """A rank of the attempt.

    Attributes:
        allocation: the index of the allocation whose resources it uses.
        started: whether an agent was asked to start it.
        ended: whether it has ended.
        killed_at: when an agent was asked to kill it.
    """

    allocation: int
    started: bool = False
    ended: bool = False
    killed_at: float | None = None


class AgentGroup:
    """A `WorkerGroup` in a cluster.

    Args:
        placement: starts agents there. This group closes it.
        payload_fd: descriptor of the payload with the function and its arguments.
        environment: variables for all workers, over those of their machines.
        preload: modules that fork servers import.
        key: to encrypt the connections to agents with; None for none.
    """

    def __init__(
        self,
        placement: Placement,
        payload_fd: int,
        environment: Mapping[str, str],
        preload: Sequence[str],
        key: ServerKey | None = None,
    ) -> None:
        self._placement = placement
        self._payload_fd = payload_fd
        self._tls = key is not None
        caller = asdict(Caller.of_this_process())
        self._prepare = {"environment": dict(environment), "preload": list(preload), "caller": caller}
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._listener = Listener(placement.host, self._selector, self._admit, key)
        self._attempt = Attempt(0, ())
        self._ranks: list[_Rank] = []
        self._generation = _Generation((), broken=True)
        self._report_fds: list[int] = []
        self._events: list[Event] = []
        self._looked_at = 0.0

    def present(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        return self._placement.present(slots)

    def leaving(self) -> bool:
        return self._placement.leaving()

    def begin(self, attempt: Attempt) -> None:
        self._close_reports()
        self._attempt = attempt
        same_agents = not self._generation.broken and self._generation.allocations.keys() >= set(attempt.slots)
        if same_agents and not self._placement.leaving():
            self._ranks = [_Rank(self._generation.allocations[slot]) for slot in attempt.slots]
            self._open_rendezvous()
            return

        self._dismiss(another_follows=True)
        self._generation = _Generation(attempt.slots)
        self._ranks = [_Rank(index) for index in range(len(attempt.slots))]
        self._listener.token = secrets.token_bytes(32)
        call = AgentCall(*self._listener.address, self._listener.token, tls=self._tls)
        self._placement.start(attempt.slots, call)

    def wait(self, timeout_s: float) -> list[Event]:
        self._flush()
        dispatch_ready(self._selector, 0 if self._events else min(timeout_s, LOOK_S))
        self._flush()
        if time.monotonic() >= self._looked_at + LOOK_S:
            self._look()
            self._looked_at = time.monotonic()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._waker.wake()

    def send(self, rank: int, signum: int) -> None:
        if self._ranks[rank].started:
            self._order(rank, "signal", rank=rank, signum=signum)
        else:
            # Don't start the worker only to end it.
            self._end(rank, -signum)

    def kill(self, rank: int) -> None:
        if self._ranks[rank].started:
            self._order(rank, "kill", rank=rank)
            self._ranks[rank].killed_at = self._ranks[rank].killed_at or time.monotonic()
        else:
            self._end(rank, -signal.SIGKILL)

    def ask_stacks(self, limit_s: float, native: bool) -> None:
        for agent in self._generation.agents.values():
            if agent.leads:
                agent.order("stacks", limit_s=limit_s, native=native)

    def release(self) -> None:
        for agent in self._generation.agents.values():
            if agent.leads:
                agent.order("release")

    def silence_s(self, rank: int) -> float:
        agent = self._running_agent(rank)
        return 0.0 if agent is None else time.monotonic() - agent.heard_at

    def close(self) -> None:
        self._dismiss(another_follows=False)
        self._placement.close()
        self._close_reports()
        self._listener.close()
        self._selector.close()
        self._waker.close()

    def _admit(self, channel: Channel, info: AgentInfo, proof: dict[str, str]) -> None:
        """Take an agent that has proved the token into the group."""
        generation = self._generation
        differences = agent_info.version_differences(info.versions, agent_info.versions())
        if differences:
            channel.close()
            raise LaunchError(
                f"The agent on {info.machine} has {differences}. Other versions may not load what this one has pickled: "
                "install the same ones on all nodes."
            )
        refusal = self._refusal(info.index)
        if refusal:
            log.warning("an agent on %s was refused: %s", info.machine, refusal)
            channel.close()
            return

        clock = AgentClock()
        clock.read(info.clock, time.monotonic())
        agent = _Agent(channel, info, clock, leads=generation.leader(info.host_group) is None)
        generation.agents[info.index] = agent
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._receive(agent))
        channel.trusted = True
        channel.send(proof)
        if agent.leads:
            channel.send({"do": "prepare", **self._prepare})
            channel.send_payload(PAYLOAD, self._payload_fd, {"do": "payload"})
        if len(generation.agents) == len(generation.slots) and not generation.broken:
            generation.allocations = rank_assignment.assign(generation.slots, generation.host_groups())
            for rank, slot in zip(self._ranks, self._attempt.slots, strict=True):
                rank.allocation = generation.allocations[slot]
            self._open_rendezvous()

    def _refusal(self, index: int) -> str:
        """The reason to refuse an agent with this allocation; empty if it is wanted."""
        count = len(self._generation.slots)
        if index in self._generation.agents:
            return f"allocation {index} has an agent already"
        return "" if 0 <= index < count else f"there is no allocation {index}, only {count}"

    def _open_rendezvous(self) -> None:
        """Ask the agent that runs rank 0 to open the store, now that all agents are there. `_start_workers` follows."""
        self._order(0, "host", world_size=len(self._attempt.slots))

    def _start_workers(self, store: tuple[str, int]) -> None:
        """Send each host group its share. If some ranks have ended before, the other ranks soon will, too."""
        if self._generation.broken or any(rank.ended for rank in self._ranks):
            return
        agents = self._generation.agents
        allocations = [rank.allocation for rank in self._ranks]
        tasks = tuple(agents[index].info.task for index in allocations)
        shares = rank_assignment.ranks_by_host_group(allocations, self._generation.host_groups())
        for node, ranks in enumerate(shares):
            devices = [agents[allocations[rank]].info.devices for rank in ranks]
            variables = rank_assignment.device_environment(devices, agent_info.DEVICES)
            share = rendezvous.Share(self._attempt, ranks, store, node=node, environment=variables, tasks=tasks)
            self._order(ranks[0], "run", share=share_as_message(share))
            for rank in ranks:
                self._ranks[rank].started = True

    def _receive(self, agent: _Agent) -> None:
        agent.heard_at = time.monotonic()
        try:
            for message in agent.channel.receive():
                self._handle(agent, message)
        except ChannelClosedError as error:
            self._lose(agent, str(error))

    def _handle(self, agent: _Agent, message: Message) -> None:
        head = message.head
        if head["event"] == "heartbeat":
            agent.clock.read(head["clock"], time.monotonic())
            return
        if head["event"] == "unable":
            raise LaunchError(f"On {agent.info.machine}: {head['text']}")
        if head["event"] == "store":
            host, port = head["at"]
            self._start_workers((host, port))
            return
        if message.payload_fd is not None:
            self._report_fds.append(message.payload_fd)
        if not self._ranks[head["rank"]].ended:
            self._pass_on(agent, head, message)

    def _pass_on(self, agent: _Agent, head: dict[str, Any], message: Message) -> None:
        """Pass on an event of an agent's worker group, with its times on our clock."""
        event, rank = head["event"], head["rank"]
        if event == "alive":
            self._events.append(Alive(rank, head["progressed"], head["saved"]))
        elif event == "wrote":
            self._events.append(Wrote(rank, head["stream"], message.data, head["raw"]))
        elif event == "stacks":
            self._events.append(Stacks(rank, Process.from_dict(json.loads(message.data))))
        elif message.payload_fd is not None:
            report, load = payload.read_two(message.payload_fd)
            report = replace(report, at=agent.clock.ours(report.at))
            self._events.append(Reported(rank, report, load, message.payload_fd))
        else:
            # All ranks of one machine were lost. These are all ranks of the attempt only if there is no other machine.
            all_ranks = (
                head["all_ranks"] and not self._generation.broken and len(set(self._generation.host_groups())) == 1
            )
            where = f"was lost on {agent.info.machine}: " if head["all_ranks"] and not all_ranks else ""
            self._end(rank, head["code"], agent.clock.ours(head["at"]), where + head["text"], all_ranks)

    def _end(
        self,
        rank: int,
        code: int | None,
        at: float | None = None,
        text: str = "",
        all_ranks: bool = False,
        silent: bool = False,
    ) -> None:
        if not self._ranks[rank].ended:
            self._ranks[rank].ended = True
            self._events.append(Ended(rank, code, at or time.monotonic(), text, all_ranks, silent))

    def _look(self) -> None:
        """Find agents that are lost, and those that don't obey."""
        self._listener.check_deadlines()
        for lost in self._placement.lost():
            agent = self._generation.agents.get(lost.index)
            if agent is not None:
                self._lose(agent, lost.text)
            elif not self._generation.broken:
                self._generation.broken = True
                self._end(lost.index, None, text=f"could not be started: {lost.text}")
        now = time.monotonic()
        for number, rank in enumerate(self._ranks):
            agent = self._running_agent(number)
            if agent is None or rank.killed_at is None or rank.ended:
                continue
            if now > agent.heard_at + KILL_S:
                self._lose(agent, f"nothing has come from it for {now - agent.heard_at:.0f} s")
            elif now > rank.killed_at + 2 * KILL_S:
                self._lose(agent, "it did not stop its workers when asked")

    def _lose(self, agent: _Agent, how: str) -> None:
        """Handle the loss of an agent.

        The ranks that it ran have ended. If another agent of its host group ran its rank, that agent kills the rank.
        """
        index = agent.info.index
        if self._generation.agents.get(index) is not agent:
            return
        self._generation.broken = True
        silent = time.monotonic() > agent.heard_at + SILENT_S
        for number, rank in enumerate(self._ranks):
            if rank.allocation == index or (rank.started and self._running_agent(number) is agent):
                if not agent.leads:
                    self.kill(number)
                self._end(number, None, text=f"was lost with its node {agent.info.machine}: {how}", silent=silent)
        del self._generation.agents[index]
        self._selector.unregister(agent.channel)
        agent.channel.close()

    def _dismiss(self, another_follows: bool) -> None:
        """Have all agents end their workers and disconnect. The placement ends those that don't.

        Where another group follows, machines keep what they have for the launch.
        """
        generation, self._generation = self._generation, _Generation((), broken=True)
        self._listener.token = None
        channels = [agent.channel for agent in generation.agents.values()]
        for channel in channels:
            self._selector.unregister(channel)
            channel.send({"do": "close", "another_follows": another_follows})

        until, left = time.monotonic() + KILL_S, channels
        while (left := [channel for channel in left if not _has_disconnected(channel)]) and time.monotonic() < until:
            select.select(left, [channel for channel in left if channel.pending], [], LOOK_S)
        for channel in channels:
            channel.close()
        if generation.slots:
            self._placement.close()

    def _order(self, rank: int, do: str, /, **message: Any) -> None:
        agent = self._running_agent(rank)
        if agent is not None:
            agent.order(do, **message)

    def _running_agent(self, rank: int) -> _Agent | None:
        """The agent that runs a rank; None if it is lost."""
        agent = self._generation.agents.get(self._ranks[rank].allocation)
        return self._generation.leader(agent.info.host_group) if agent is not None else None

    def _flush(self) -> None:
        """Send what waits to be sent, and have `wait` return when the network takes the rest."""
        for agent in list(self._generation.agents.values()):
            try:
                agent.channel.flush()
            except ChannelClosedError as error:
                self._lose(agent, str(error))
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.channel.pending else 0)
            key = self._selector.get_key(agent.channel)
            if key.events != wanted:
                self._selector.modify(agent.channel, wanted, key.data)

    def _close_reports(self) -> None:
        for fd in self._report_fds:
            os.close(fd)
        self._report_fds = []


def _has_disconnected(channel: Channel) -> bool:
    try:
        channel.flush()
        for _ in channel.receive():
            pass
    except ChannelClosedError:
        return True
    return False
