"""Workers on the machines of a cluster: a `Crew` whose hands are agents, wherever an engine has placed them.

    Supervisor ─ ClusterCrew ─ Door ◄──TCP── agent on machine A: the workers of machine A
                      │             ◄──TCP── agent on machine B: the workers of machine B
                  Placement (Ray, Spark): starts the agents as a gang, tells of those that it has lost

All but the placing goes over our own connections, so it is the same for every engine: `agent.py` shows the messages.

An attempt begins when the whole gang is there. A worker's failure leaves the agents where they are, with their warm
nurseries, and the next attempt costs a fork. When a place is lost (its connection breaks, it doesn't do as it is told, the
engine says so), its ranks have ended, which is a failure of the host; the rest of the gang is dismissed when the next
attempt begins, which places a new one.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from footplate.core.errors import LaunchError
from footplate.launch import parcel, rendezvous
from footplate.launch.cluster import greeting, seating
from footplate.launch.cluster.agent import PAYLOAD, AgentCall, share_as_message
from footplate.launch.cluster.channel import Channel, Gone, Message
from footplate.launch.cluster.door import Door
from footplate.launch.cluster.greeting import Hello
from footplate.launch.cluster.placement import Lost as Lost
from footplate.launch.cluster.placement import Placement as Placement
from footplate.launch.crew import Alive, Attempt, Ended, Event, Reported, Wrote
from footplate.launch.local import KILL_S, Caller
from footplate.launch.waiting import Bell, heed

LOOK_S = 0.2  # how often the placement is asked


@dataclass
class _Place:
    """An agent of the gang.

    Attributes:
        leads: whether it carries its household's ranks.
        ahead_s: our clock minus its.
        heard_at: when something came from it, on our clock.
    """

    channel: Channel
    hello: Hello
    ahead_s: float
    leads: bool
    heard_at: float = field(default_factory=time.monotonic)

    def order(self, do: str, /, **message: Any) -> None:
        """Tell it what to do, once it has the payload."""
        self.channel.send({"do": do, **message}, behind=PAYLOAD)


@dataclass
class _Gang:
    """The places of one placement, by index, and which of them each slot has got once all are there."""

    slots: tuple[int, ...]
    places: dict[int, _Place] = field(default_factory=dict)
    settled: dict[int, int] = field(default_factory=dict)
    broken: bool = False

    def households(self) -> list[str]:
        """Of the places, by index."""
        return [self.places[index].hello.household for index in range(len(self.slots))]

    def leader(self, household: str) -> _Place | None:
        """Who carries the ranks of a household."""
        return next((one for one in self.places.values() if one.leads and one.hello.household == household), None)


@dataclass
class _Rank:
    """A rank of the attempt. `place`: the index of the one whose resources it uses."""

    place: int
    carried: bool = False
    ended: bool = False
    killed_at: float | None = None


class ClusterCrew:
    """A `Crew` in a cluster.

    Args:
        placement: starts agents there. The crew closes it.
        payload: descriptor of the parcel with the function and its arguments.
        environment: variables for all workers, over those of their places.
        preload: modules that nurseries import.
    """

    def __init__(
        self, placement: Placement, payload: int, environment: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        self._placement = placement
        self._payload = payload
        caller = asdict(Caller.here())
        self._prepare = {"environment": dict(environment), "preload": list(preload), "caller": caller}
        self._selector = selectors.DefaultSelector()
        self._bell = Bell(self._selector)
        self._door = Door(placement.host, self._selector, self._admit)
        self._attempt = Attempt(0, ())
        self._ranks: list[_Rank] = []
        self._gang = _Gang((), broken=True)
        self._homes: list[int] = []  # descriptors of reports
        self._events: list[Event] = []
        self._looked_at = 0.0

    def begin(self, attempt: Attempt) -> None:
        self._forget_reports()
        self._attempt = attempt
        if not self._gang.broken and self._gang.settled.keys() >= set(attempt.slots):
            self._ranks = [_Rank(self._gang.settled[slot]) for slot in attempt.slots]
            self._open_rendezvous()
            return
        self._dismiss(another_follows=True)
        self._gang = _Gang(attempt.slots)
        self._ranks = [_Rank(index) for index in range(len(attempt.slots))]
        self._door.token = secrets.token_bytes(32)
        self._placement.start(len(attempt.slots), AgentCall(*self._door.address, self._door.token))

    def wait(self, timeout_s: float) -> list[Event]:
        self._flush()
        heed(self._selector, 0 if self._events else min(timeout_s, LOOK_S))
        self._flush()
        if time.monotonic() >= self._looked_at + LOOK_S:
            self._look()
            self._looked_at = time.monotonic()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._bell.ring()

    def send(self, rank: int, signum: int) -> None:
        if self._ranks[rank].carried:
            self._order(rank, "signal", rank=rank, signum=signum)
        else:
            self._end(rank, -signum)  # it would come to life for that alone

    def kill(self, rank: int) -> None:
        if self._ranks[rank].carried:
            self._order(rank, "kill", rank=rank)
            self._ranks[rank].killed_at = self._ranks[rank].killed_at or time.monotonic()
        else:
            self._end(rank, -signal.SIGKILL)

    def release(self) -> None:
        for place in self._gang.places.values():
            if place.leads:
                place.order("release")

    def silence_s(self, rank: int) -> float:
        carrier = self._carrier(rank)
        return 0.0 if carrier is None else time.monotonic() - carrier.heard_at

    def close(self) -> None:
        self._dismiss(another_follows=False)
        self._placement.close()
        self._forget_reports()
        self._door.close()
        self._selector.close()
        self._bell.close()

    def _admit(self, channel: Channel, hello: Hello, ahead_s: float) -> None:
        """An agent of ours has come in."""
        gang = self._gang
        differs = greeting.skew(hello.versions, greeting.versions())
        if differs:
            channel.close()
            raise LaunchError(
                f"The place for a worker on {hello.machine} has {differs}. What is sent between different versions may "
                "not arrive as it was: install the same ones on all nodes."
            )
        if hello.index in gang.places or not 0 <= hello.index < len(gang.slots):
            channel.close()
            return
        place = _Place(channel, hello, ahead_s, leads=gang.leader(hello.household) is None)
        gang.places[hello.index] = place
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(place))
        channel.trusted = True
        channel.send({"proof": greeting.proof(self._door.token or b"", "driver", hello.nonce)})
        if place.leads:
            channel.send({"do": "prepare", **self._prepare})
            channel.post(PAYLOAD, self._payload, {"do": "payload"})
        if len(gang.places) == len(gang.slots) and not gang.broken:
            gang.settled = seating.settle(gang.slots, gang.households())
            for rank, slot in zip(self._ranks, self._attempt.slots, strict=True):
                rank.place = gang.settled[slot]
            self._open_rendezvous()

    def _open_rendezvous(self) -> None:
        """All are there: whoever carries rank 0 is to say where its store will be; `_share_out` follows."""
        self._order(0, "host", world_size=len(self._attempt.slots))

    def _share_out(self, store: tuple[str, int]) -> None:
        """Have the workers started, unless some ranks have ended before that: the others then will, too."""
        if self._gang.broken or any(rank.ended for rank in self._ranks):
            return
        places = [rank.place for rank in self._ranks]
        tasks = tuple(self._gang.places[place].hello.task for place in places)
        for node, ranks in enumerate(seating.shares(places, self._gang.households())):
            given = [self._gang.places[places[rank]].hello.devices for rank in ranks]
            variables = seating.environment(given, greeting.DEVICES)
            share = rendezvous.Share(self._attempt, ranks, store, node=node, environment=variables, tasks=tasks)
            self._order(ranks[0], "carry", share=share_as_message(share))
            for rank in ranks:
                self._ranks[rank].carried = True

    def _hear(self, place: _Place) -> None:
        place.heard_at = time.monotonic()
        try:
            for message in place.channel.receive():
                self._take(place, message)
        except Gone as error:
            self._lose(place, str(error))

    def _take(self, place: _Place, message: Message) -> None:
        told = message.head
        if told["event"] == "here":
            return
        if told["event"] == "unable":
            raise LaunchError(f"On {place.hello.machine}: {told['text']}")
        if told["event"] == "store":
            host, port = told["at"]
            self._share_out((host, port))
            return
        if message.parcel is not None:
            self._homes.append(message.parcel)
        if not self._ranks[told["rank"]].ended:
            self._pass_on(place, told, message)

    def _pass_on(self, place: _Place, told: dict[str, Any], message: Message) -> None:
        """A crew's event, as it was there, with the time as it is here."""
        event, rank = told["event"], told["rank"]
        if event == "alive":
            self._events.append(Alive(rank, told["progressed"]))
        elif event == "wrote":
            self._events.append(Wrote(rank, told["stream"], message.data, told["raw"]))
        elif message.parcel is not None:
            report, load = parcel.opened(message.parcel)
            report = replace(report, at=report.at + place.ahead_s)
            self._events.append(Reported(rank, report, load, message.parcel))
        else:
            whole = told["whole"] and not self._gang.broken and len(set(self._gang.households())) == 1
            where = f"was lost on {place.hello.machine}: " if told["whole"] and not whole else ""
            self._end(rank, told["code"], told["at"] + place.ahead_s, where + told["text"], whole)

    def _end(self, rank: int, code: int | None, at: float | None = None, text: str = "", whole: bool = False) -> None:
        if not self._ranks[rank].ended:
            self._ranks[rank].ended = True
            self._events.append(Ended(rank, code, at or time.monotonic(), text, whole))

    def _look(self) -> None:
        """Find what is lost or late."""
        self._door.look()
        for lost in self._placement.lost():
            place = self._gang.places.get(lost.index)
            if place is not None:
                self._lose(place, lost.text)
            elif not self._gang.broken:
                self._gang.broken = True
                self._end(lost.index, None, text=f"could not be started: {lost.text}")
        now = time.monotonic()
        for number, rank in enumerate(self._ranks):
            carrier = self._carrier(number)
            if carrier and rank.killed_at and not rank.ended and now > rank.killed_at + 2 * KILL_S:
                self._lose(carrier, "it did not do as it was told")

    def _lose(self, place: _Place, how: str) -> None:
        """A place has gone, and what it carried; what another carries for it, of the same household, is ended."""
        index = place.hello.index
        if self._gang.places.get(index) is not place:
            return
        self._gang.broken = True
        for number, rank in enumerate(self._ranks):
            if rank.place == index or (rank.carried and self._carrier(number) is place):
                if not place.leads:
                    self.kill(number)
                self._end(number, None, text=f"was lost with its node {place.hello.machine}: {how}")
        del self._gang.places[index]
        self._selector.unregister(place.channel)
        place.channel.close()

    def _dismiss(self, another_follows: bool) -> None:
        """Send the gang home: agents end their workers and hang up; what doesn't is ended by the placement.

        Where another gang follows, machines keep what they have for the launch.
        """
        gang, self._gang = self._gang, _Gang((), broken=True)
        self._door.token = None
        channels = [place.channel for place in gang.places.values()]
        for channel in channels:
            self._selector.unregister(channel)
            channel.send({"do": "close", "another_follows": another_follows})
        until, left = time.monotonic() + KILL_S, channels
        while (left := [channel for channel in left if not _hung_up(channel)]) and time.monotonic() < until:
            select.select(left, [channel for channel in left if channel.pending], [], LOOK_S)
        for channel in channels:
            channel.close()
        if gang.slots:
            self._placement.close()

    def _order(self, rank: int, do: str, /, **message: Any) -> None:
        carrier = self._carrier(rank)
        if carrier is not None:
            carrier.order(do, **message)

    def _carrier(self, rank: int) -> _Place | None:
        """Who looks after a rank; None if that one is lost."""
        place = self._gang.places.get(self._ranks[rank].place)
        return self._gang.leader(place.hello.household) if place is not None else None

    def _flush(self) -> None:
        """Send what waits to be sent, and have `wait` return for what can't be yet."""
        for place in list(self._gang.places.values()):
            try:
                place.channel.flush()
            except Gone as error:
                self._lose(place, str(error))
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if place.channel.pending else 0)
            key = self._selector.get_key(place.channel)
            if key.events != wanted:
                self._selector.modify(place.channel, wanted, key.data)

    def _forget_reports(self) -> None:
        for fd in self._homes:
            os.close(fd)
        self._homes = []


def _hung_up(channel: Channel) -> bool:
    try:
        channel.flush()
        for _ in channel.receive():
            pass
    except Gone:
        return True
    return False
