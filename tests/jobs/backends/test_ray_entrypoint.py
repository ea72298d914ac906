"""The entry point judges messages of replicas. Stand-ins for Ray and for the clock let minutes pass at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from footplate.jobs.backends.ray import entrypoint, request
from footplate.jobs.backends.ray.entrypoint import EntryPoint, Replica
from footplate.jobs.backends.ray.log_protocol import OURS, decode
from footplate.jobs.backends.ray.replica_actor import ANSWER_S, Message
from footplate.jobs.cluster_env import replica_ids
from footplate.jobs.execution import Execution
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import resolve
from footplate.jobs.spec.yamlfile import parse

TEXT = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-4
  workerType: n1-standard-4
  workerCount: {workers}
"""


class RayError(Exception):
    """Ray's error for an actor that has died."""


class Unavailable(RayError):
    """Ray's error for an actor that it can't reach now."""


class Clock:
    """A clock that advances only by waits."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(eq=False)
class Ref:
    """A pending answer."""

    at: float
    what: Any


@dataclass(eq=False)
class Actor:
    """Gives the scripted answers, each after some seconds; then none until it is told to end.

    Attributes:
        answers: seconds, and the replica's message or Ray's error.
        last: every further answer.
    """

    clock: Clock
    node: str
    answers: list[tuple[float, list[Message] | RayError]]
    last: list[Message] | RayError = field(default_factory=list)
    number: int = 0

    def __getattr__(self, name: str) -> Any:
        """Ray's form of a call: `actor.poll.remote(last)`."""
        return SimpleNamespace(remote=lambda *args: Ref(self.clock.now, getattr(self, f"_{name}")(*args)))

    @property
    def poll(self) -> Any:
        return SimpleNamespace(remote=self._poll)

    def _poll(self, _: int) -> Ref:
        after_s, what = self.answers.pop(0) if self.answers else (ANSWER_S, self.last)
        if isinstance(what, RayError):
            return Ref(self.clock.now + after_s, what)
        self.number += 1
        return Ref(self.clock.now + after_s, (self.number, what))

    def _node_and_addresses(self, ports: int) -> tuple[str, list[str]]:
        return self.node, [f"10.0.0.1:{2000 + port}" for port in range(ports)]

    def _run(self, _: object) -> None:
        pass

    def _clean(self) -> None:
        pass

    def _send_signal(self, signum: int) -> None:
        if not isinstance(self.last, RayError):
            self.answers = [(0.0, [Message("ended", code=-signum)])]


class Cluster:
    """The parts of Ray that an entry point with running actors uses."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=Unavailable)

    def __init__(self, clock: Clock, start_s: float = 0.0) -> None:
        self.clock = clock
        self.start_s = start_s
        self.alive = {"one", "two"}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": name in self.alive, "Resources": {}} for name in ("one", "two")]

    def get(self, asked: Ref | list[Ref]) -> Any:
        if isinstance(asked, list):  # where they are: known when all actors have started
            self.clock.sleep(self.start_s)
            return [ref.what for ref in asked]
        if isinstance(asked.what, RayError):
            raise asked.what
        return asked.what

    def wait(self, refs: Sequence[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        if timeout:
            self.clock.now = max(self.clock.now, min([self.clock.now + timeout, *(ref.at for ref in refs)]))
        return [ref for ref in refs if ref.at <= self.clock.now], []


class Placed(EntryPoint):
    """An entry point whose actors exist."""

    def __init__(self, cluster: Cluster, actors: Sequence[Actor]) -> None:
        flags = {"module-name": "trainer.task", "region": "us-central1", "job-dir": "gs://bucket/out"}
        resolved = resolve(draft(parse(TEXT.format(workers=len(actors) - 1)), flags, (), "my_job"))
        plan = Execution.of(resolved, "digest", Path("/work"), {})
        super().__init__(cluster, request.document("my_job-1", 1, plan, resolved.to_dict(), {}))
        self._actors = actors

    def _place(self) -> bool:
        places = replica_ids(self._execution)
        self._replicas = [
            Replica(place.role, place.index, actor) for place, actor in zip(places, self._actors, strict=True)
        ]
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(entrypoint, "time", clock)
    return clock


def said(capfd: pytest.CaptureFixture[str]) -> Iterator[tuple[str, bytes]]:
    """Source and output of each line that an entry point has written."""
    for line in capfd.readouterr().out.splitlines():
        messages = decode(line)
        assert messages is not None, line
        yield messages


def ends(capfd: pytest.CaptureFixture[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """End of each replica, and the cause of the job's end."""
    events = [json.loads(data) for source, data in said(capfd) if source == OURS]
    ended = {f"{event['role']}-{event['index']}": event["outcome"] for event in events if event["event"] == "ended"}
    return ended, events[-1]["failure"]


DIED = RayError("The actor died unexpectedly before finishing this task.")
BEGAN = (0.0, [Message("began")])


def test_actors_that_die_alone_at_once_are_not_taken_for_a_lost_node_and_the_others_are_heard(clock: Clock, capfd):
    workers = [Actor(clock, "two", [BEGAN, (3.0, DIED)], DIED) for _ in range(3)]
    assert not Placed(Cluster(clock), [Actor(clock, "one", [BEGAN]), *workers]).run()
    outcomes, failure = ends(capfd)
    assert outcomes == {
        "master-0": "was killed by SIGKILL",
        **{f"worker-{index}": f"was killed with its Ray worker: {DIED}" for index in range(3)},
    }
    assert (failure["kind"], failure["text"]) == ("signal", f"worker 0 was killed with its Ray worker: {DIED}")


def test_what_others_raise_of_an_actor_that_died_is_not_the_cause(clock: Clock, capfd):
    raises = [(3.3, [Message("output", b"RuntimeError: Connection closed by peer\n"), Message("ended", code=1)])]
    actors = [Actor(clock, "one", [BEGAN, *raises]), Actor(clock, "two", [BEGAN, (3.0, DIED)], DIED)]
    assert not Placed(Cluster(clock), actors).run()
    assert ends(capfd)[1]["text"] == f"worker 0 was killed with its Ray worker: {DIED}"


def test_a_node_that_ray_says_is_gone_is_the_cause_and_a_loss(clock: Clock, capfd):
    cluster = Cluster(clock)
    cluster.alive = {"one"}
    actors = [Actor(clock, "one", [BEGAN]), Actor(clock, "two", [BEGAN, (3.0, DIED)], DIED)]
    assert not Placed(cluster, actors).run()
    outcomes, failure = ends(capfd)
    assert outcomes == {"master-0": "was killed by SIGKILL", "worker-0": "was lost with its node"}
    assert failure["kind"] == "host"


def test_an_actor_that_cannot_be_reached_for_a_while_goes_on_and_one_that_stays_so_is_lost(clock: Clock, capfd):
    away = Unavailable("The actor is temporarily unavailable")
    for_a_while = [(0.0, away) for _ in range(20)]
    actors = [
        Actor(clock, "one", [BEGAN, *for_a_while, (0.0, [Message("output", b"back\n")])]),
        Actor(clock, "two", [BEGAN], away),
    ]
    assert not Placed(Cluster(clock), actors).run()
    output = list(said(capfd))
    assert ("master-0", b"back\n") in output
    events = [json.loads(data) for source, data in output if source == OURS]
    lost = [event["role"] for event in events if "lost" in event.get("outcome", "")]
    assert lost == ["worker"]


def test_actors_that_take_minutes_to_start_are_not_lost(clock: Clock, capfd):
    answers = [(ANSWER_S, [Message("began")]), (5.0, [Message("ended", code=0)])]
    actors = [Actor(clock, node, [*answers]) for node in ("one", "two")]
    assert Placed(Cluster(clock, start_s=300.0), actors).run()
    assert set(ends(capfd)[0].values()) == {"ended with exit code 0"}


def test_a_bar_that_is_drawn_over_and_over_in_one_line_is_seen_while_it_grows(clock: Clock, capfd):
    draws = [(0.2, [Message("output", b"\r%d%%" % percent)]) for percent in range(100)]
    assert Placed(Cluster(clock), [Actor(clock, "one", [BEGAN, *draws, (0.0, [Message("ended", code=0)])])]).run()
    pieces = [data for source, data in said(capfd) if source == "master-0"]
    assert b"".join(pieces) == b"".join(b"\r%d%%" % percent for percent in range(100))
    assert len(pieces) > 10
