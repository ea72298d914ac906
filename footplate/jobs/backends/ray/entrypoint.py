"""`python -m footplate.jobs.backends.ray.entrypoint`: the entry point of an attempt's Ray Job.

It runs on the cluster's head.


    placement group ──► an actor for each replica (`replica_actor.py`) ──► their addresses ──► the processes ──► the verdict

It is to the replicas what the supervisor is to those of a job on its own machine: one gang, begun together, judged by the
same rules (`supervision/exit_status.py`), ended together. What they write, and what happens to them, it writes to its own
output (`lines.py`), which is all that the supervisor far away hears of it. It goes on without that.

    who dies             what follows
    a replica's process  its exit code is judged
    a node               its actors don't answer, and Ray says so in time: the attempt was lost with the node. What the
                         others raise of it comes later than the last answer from there, and so isn't the cause
    an actor alone       as if its process had been killed by a signal, once Ray has had the time to notice that a node
                         is gone; the others are heard meanwhile
    the driver           Ray ends its actors, and they their processes
    SIGTERM to it        (`ray job stop`) is passed on to all replicas; what is left after the grace is killed
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

from footplate.core.errors import FootplateError
from footplate.jobs.backends.ray import resources
from footplate.jobs.backends.ray.log_protocol import encode, event
from footplate.jobs.backends.ray.replica_actor import Message, ReplicaActor, ReplicaTask
from footplate.jobs.cluster_env import processes, replica_ids
from footplate.jobs.execution import Execution
from footplate.jobs.supervision.exit_status import End, Orders, Verdict, outcome
from footplate.launch.failure import Failure

VARIABLE = "FOOTPLATE_RAY_TASK"
PACKAGE = "package.tar"
PLACE_S = 2.0  # between two looks at what lacks
ALIVE_S = 30.0  # between two signs of life
LOST_S = 60.0  # after which an actor that doesn't answer is taken for lost with its node
NODE_S = 30.0  # until Ray notices that a node is gone whose actors it has lost already
REST_S = 1.0  # that a line may wait for its end
_TICK_S = 0.5
_LAST = 4096  # bytes of what a replica wrote, of which the last line is its cause


@dataclass(frozen=True)
class Lost:
    """An actor is no more: with its node, or alone. `why` is what Ray says of it."""

    why: str
    at: float


@dataclass
class Replica:
    """A replica, as its driver knows it."""

    role: str
    index: int
    actor: Any
    node: str = ""
    hearing: Any = None
    answer: int = 0
    heard: float = 0.0
    last: bytes = b""
    rest: bytes = b""  # a line that has no end yet
    rest_since: float = 0.0
    lost: Lost | None = None
    over: bool = False

    @property
    def source(self) -> str:
        """What its lines are called."""
        return f"{self.role}-{self.index}"


class Driver:
    """One attempt. `task` is what `request.document` has made."""

    def __init__(self, ray: Any, task: dict[str, Any]) -> None:
        self._ray = ray
        self._task = task
        self._execution = Execution.from_dict(task["plan"])
        self._needs = tuple(resources.Need(**one) for one in task["needs"])
        self._replicas: list[Replica] = []
        self._verdict = Verdict()
        self._kill_at = float("inf")
        self._killed = False
        self._stopping = False
        self._said = time.monotonic()
        self.told = False  # to end, by SIGTERM

    def run(self) -> bool:
        """Run the attempt to its end; whether it has succeeded."""
        try:
            if self._place():
                self._begin()
                while not all(one.over for one in self._replicas):
                    self._hear()
                    self._keep_time()
            failure = None if self._stopping or self.told else self._verdict.failure
        except FootplateError as error:
            failure = Failure("exception", str(error), time.monotonic(), mistake=True)
        except self._ray.exceptions.RayError as error:
            failure = Failure("host", f"Ray: {_line(error)}", time.monotonic())
        self._event(
            "over",
            succeeded=self._verdict.succeeded,
            failure=failure
            and {"kind": failure.kind, "text": failure.text, "mistake": failure.mistake, "code": failure.code},
        )
        return self._verdict.succeeded

    def _place(self) -> bool:
        """Reserve what all replicas need, and have an actor for each; False if the attempt was ended before."""
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes = self._nodes()
        asked, why = resources.bundles(self._needs, nodes), ""
        group = placement_group(asked, strategy="PACK")
        while not group.wait(PLACE_S):
            if self.told:
                return False
            waiting = resources.waiting(self._needs, nodes, self._ray.available_resources())
            if waiting != why and (not why or self._quiet()):  # what others leave free changes all the time
                why = waiting
                self._event("waits", text=why)
            self._say_alive()
            nodes = self._nodes()
            now = resources.bundles(self._needs, nodes)
            if now != asked:  # nodes have come or gone meanwhile
                remove_placement_group(group)
                asked, group = now, placement_group(now, strategy="PACK")
        self._place_actors(group, asked)
        return not self.told

    def _place_actors(self, group: Any, asked: list[resources.Bundle]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for number, (replica, bundle) in enumerate(zip(replica_ids(cast("Any", self._execution)), asked, strict=True)):
            actor = self._ray.remote(ReplicaActor).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                max_concurrency=5,  # run, clean, tell, and hear, also one that is repeated
                max_restarts=0,
            )
            self._replicas.append(Replica(replica.role, replica.index, actor.remote()))

    def _begin(self) -> None:
        """Ask all nodes for addresses, and begin all processes."""
        found = self._ray.get([one.actor.where.remote(2) for one in self._replicas])
        addresses, rendezvous = [some[0] for _, some in found], found[0][1][1]
        for one, (node, _) in zip(self._replicas, found, strict=True):
            one.node = node
        attempt = self._task["attempt"]
        told = processes(cast("Any", self._execution), addresses, rendezvous, attempt - 1, self._execution.job_dir)
        common = {
            **self._task["variables"],
            "PYTHONUNBUFFERED": "1",
            "FOOTPLATE_JOB_ID": self._task["job"],
            "FOOTPLATE_JOB_ATTEMPT": str(attempt),
        }
        has_gpus = [need.gpus > 0 for need in self._needs for _ in range(need.count)]
        self._event("placed", nodes={one.source: one.node for one in self._replicas})
        for one, process, alone in zip(self._replicas, told, has_gpus, strict=True):
            variables = {**common, **process.env, **(_a_machine_of_its_own(process.env) if alone else {})}
            order = ReplicaTask(
                PACKAGE,
                self._execution.package,
                self._execution.arguments,
                variables,
                self._execution.directory,
                self._task["key"],
            )
            one.actor.run.remote(order)
            one.hearing, one.heard = one.actor.hear.remote(0), time.monotonic()

    def _hear(self) -> None:
        """Hear all replicas, for as long as it takes one of them to say something."""
        hearing = {one.hearing: one for one in self._replicas if not one.over and not one.lost}
        if not hearing:
            time.sleep(_TICK_S)
            return
        ready, _ = self._ray.wait(list(hearing), num_returns=len(hearing), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(list(hearing), timeout=_TICK_S)
        pause_s = 0.0
        for ref in ready:
            one = hearing[ref]
            try:
                answer, said = self._ray.get(ref)
            except self._ray.exceptions.ActorUnavailableError:
                one.hearing, pause_s = one.actor.hear.remote(one.answer), _TICK_S  # else Ray says it again at once
            except self._ray.exceptions.RayError as error:
                one.lost = Lost(_line(error), time.monotonic())
            else:
                one.heard, one.answer = time.monotonic(), answer
                one.hearing = one.actor.hear.remote(answer)
                for what in said:
                    self._take(one, what)
        time.sleep(pause_s)

    def _take(self, one: Replica, said: Message) -> None:
        if said.kind == "output":
            one.last = (one.last + said.data)[-_LAST:]
            whole, end, rest = (one.rest + said.data).rpartition(b"\n")
            if end or not one.rest:
                one.rest_since = time.monotonic()
            one.rest = rest
            self._write(encode(one.source, whole + end))
        elif said.kind == "prepare":
            self._write(encode("prepare", said.data))
        elif said.kind == "began":
            self._event("began", role=one.role, index=one.index)
            one.actor.clean.remote()
        elif said.kind == "refused":
            self._end(one, 2 if said.mistake else None, f"could not be started: {said.text}")
        elif said.kind == "ended":
            lines = [line.strip() for line in one.last.decode("utf-8", "replace").splitlines()]
            self._end(one, said.code, outcome(said.code, next((line for line in reversed(lines) if line), "")))

    def _end_lost(self) -> None:
        """Judge the replicas that don't answer any more: each was lost with its node, or killed alone."""
        now = time.monotonic()
        silent = [one for one in self._replicas if not one.over and (one.lost or now - one.heard > LOST_S)]
        alive = self._nodes() if silent else {}
        for one in silent:
            if one.lost is None or one.node not in alive:
                self._end(one, None, "was lost with its node", one.heard)
            elif now - one.lost.at > NODE_S:
                text = f"was killed with its Ray worker: {one.lost.why}"
                self._end(one, -signal.SIGKILL, text, one.lost.at)

    def _end(self, one: Replica, code: int | None, text: str, at: float | None = None) -> None:
        self._write(encode(one.source, one.rest))
        one.over, one.rest = True, b""
        at = time.monotonic() if at is None else at
        self._event("ended", role=one.role, index=one.index, outcome=text)
        if not self._stopping:
            self._obey(self._verdict.ended(End(one.role, one.index, code, text, at)))

    def _obey(self, orders: Orders) -> None:
        for one in self._replicas:
            if one.role in orders.ask and not one.over:
                one.actor.tell.remote(int(signal.SIGTERM))
        self._kill_at = min(self._kill_at, time.monotonic() + orders.kill_within_s)

    def _keep_time(self) -> None:
        """What is due: the end that was asked for, the end of the grace, who is lost, a sign of life."""
        if self.told and not self._stopping:
            self._stopping = True
            self._obey(Orders(tuple({one.role for one in self._replicas}), self._task["grace_s"]))
        if time.monotonic() >= self._kill_at and not self._killed:
            self._killed = True
            for one in self._replicas:
                if not one.over:
                    one.actor.tell.remote(int(signal.SIGKILL))
        self._end_lost()
        for one in self._replicas:
            if one.rest and time.monotonic() - one.rest_since > REST_S:
                self._write(encode(one.source, one.rest))
                one.rest = b""
        self._say_alive()

    def _say_alive(self) -> None:
        if self._quiet():
            self._event("alive")

    def _quiet(self) -> bool:
        """Whether nothing was said for so long that it is time for a sign of life."""
        return time.monotonic() - self._said > ALIVE_S

    def _event(self, name: str, **values: Any) -> None:
        self._write(event(name, at=time.time(), **values))

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._said = time.monotonic()
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]

    def _nodes(self) -> dict[str, dict[str, float]]:
        return {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}


def _a_machine_of_its_own(env: dict[str, str]) -> dict[str, str]:
    """The world's variables of a replica that sees no accelerators but its own: several of them may be on one node."""
    if "RANK" not in env:
        return {}
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": env["RANK"], "GROUP_RANK": env["RANK"]}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> int:
    """Run the attempt that `FOOTPLATE_RAY_TASK` describes; 0 if it has succeeded."""
    import ray

    task = json.loads(os.environ.pop(VARIABLE))
    told: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    driver = Driver(ray, task)
    signal.signal(signal.SIGTERM, lambda *_: setattr(driver, "told", True))
    if told:
        driver.told = True
    return 0 if driver.run() else 1


if __name__ == "__main__":
    sys.exit(main())
