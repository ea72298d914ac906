"""`python -m footplate.jobs.backends.ray.entrypoint`: the entry point of an attempt's Ray Job, on the cluster's head.

    placement group ──► an actor for each replica (`replica_actor.py`) ──► their addresses ──► the processes ──► the verdict

On the cluster, it has the role of a supervisor on its own machine: it begins the replicas together, judges them by the same
rules (`supervision/exit_status.py`), and ends them together. It writes their output, and the events, to its own output
(`log_protocol.py`). The supervisor learns everything from there. The entry point doesn't need the supervisor.

    who dies             what follows
    a replica's process  its exit code is judged
    a node               its actors don't answer, and after some time Ray reports that: the attempt was lost with the node.
                         Errors that this causes in other replicas come after the node's last answer, so they aren't the
                         cause
    only an actor        counts as a process killed by a signal, once Ray has had time to notice a lost node; the other
                         replicas are followed meanwhile
    the entry point      Ray ends its actors, and they end their processes
    SIGTERM to it        (`ray job stop`) is passed on to all replicas; after the grace period the rest is killed
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
from footplate.jobs.backends.ray.replica_actor import (
    QUESTIONS,
    QUESTIONS_AT_ONCE,
    Message,
    ReplicaActor,
    ReplicaTask,
)
from footplate.jobs.cluster_env import processes, replica_ids
from footplate.jobs.execution import Execution
from footplate.jobs.supervision.exit_status import End, Orders, Verdict, outcome
from footplate.jobs.tuning.report_lines import FILES
from footplate.launch.failure import Failure

VARIABLE = "FOOTPLATE_RAY_TASK"
PACKAGE = "package.tar"
# Between two tries to place the replicas.
PLACE_S = 2.0
# Between two heartbeats.
ALIVE_S = 30.0
# An actor that hasn't answered for this long counts as lost with its node.
LOST_S = 60.0
# The time until Ray reports a lost node whose actors it has already reported.
NODE_S = 30.0
# An unfinished line is passed on after this time.
REST_S = 1.0
_TICK_S = 0.5
# The bytes of output to keep for the last line, which explains a failure.
_LAST = 4096


@dataclass(frozen=True)
class Lost:
    """The loss of an actor, with its node or alone. `why` is Ray's message."""

    why: str
    at: float


@dataclass
class Replica:
    """The entry point's view of a replica."""

    role: str
    index: int
    actor: Any
    node: str = ""
    poll: Any = None
    answer: int = 0
    last_heard: float = 0.0
    last: bytes = b""
    # The beginning of a line whose end hasn't arrived.
    rest: bytes = b""
    rest_since: float = 0.0
    lost: Lost | None = None
    over: bool = False

    @property
    def source(self) -> str:
        """The name of its output."""
        return f"{self.role}-{self.index}"


class EntryPoint:
    """Runs an attempt. `task` comes from `request.document`."""

    def __init__(self, ray: Any, task: dict[str, Any]) -> None:
        self._ray = ray
        self._task = task
        self._execution = Execution.from_dict(task["plan"])
        self._needs = tuple(resources.Need(**need) for need in task["needs"])
        self._replicas: list[Replica] = []
        self._verdict = Verdict()
        self._kill_at = float("inf")
        self._killed = False
        self._stopping = False
        self._written_at = time.monotonic()
        # True after SIGTERM.
        self.stop_requested = False

    def run(self) -> bool:
        """Run the attempt until it ends. Returns True if it succeeded."""
        try:
            if self._place():
                self._begin()
                while not all(replica.over for replica in self._replicas):
                    self._take_messages()
                    self._keep_time()
            failure = None if self._stopping or self.stop_requested else self._verdict.failure
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
        """Reserve the resources of all replicas, and create their actors. Returns False if the attempt was stopped."""
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes = self._nodes()
        asked, why = resources.bundles(self._needs, nodes), ""
        group = placement_group(asked, strategy="PACK")
        while not group.wait(PLACE_S):
            if self.stop_requested:
                return False
            waiting = resources.waiting(self._needs, nodes, self._ray.available_resources())
            # The free resources change all the time, so a new reason is reported rarely.
            if waiting != why and (not why or self._quiet()):
                why = waiting
                self._event("waits", text=why)
            self._say_alive()
            nodes = self._nodes()
            now = resources.bundles(self._needs, nodes)
            # Nodes were added or lost.
            if now != asked:
                remove_placement_group(group)
                asked, group = now, placement_group(now, strategy="PACK")
        self._place_actors(group, asked)
        return not self.stop_requested

    def _place_actors(self, group: Any, asked: list[resources.Bundle]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for number, (replica, bundle) in enumerate(zip(replica_ids(cast("Any", self._execution)), asked, strict=True)):
            actor = self._ray.remote(concurrency_groups={QUESTIONS: QUESTIONS_AT_ONCE})(ReplicaActor).options(
                # By this name `question.py` finds it, in the namespace of the attempt.
                name=f"{replica.role}-{replica.index}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                # Five calls at once: run, clean, send_signal, poll, and a repeated poll.
                max_concurrency=5,
                max_restarts=0,
            )
            self._replicas.append(Replica(replica.role, replica.index, actor.remote()))

    def _begin(self) -> None:
        """Get addresses from all nodes, and begin all processes."""
        replies = self._ray.get([replica.actor.node_and_addresses.remote(2) for replica in self._replicas])
        addresses, rendezvous = [node_addresses[0] for _, node_addresses in replies], replies[0][1][1]
        for replica, (node, _) in zip(self._replicas, replies, strict=True):
            replica.node = node

        attempt, trial = self._task["attempt"], self._execution.trial
        described = processes(
            cast("Any", self._execution), addresses, rendezvous, attempt - 1, self._execution.job_dir,
            None if trial is None else trial["number"],
        )  # fmt: skip
        common = {
            **self._task["variables"],
            "PYTHONUNBUFFERED": "1",
            "FOOTPLATE_JOB_ID": self._task["job"],
            "FOOTPLATE_JOB_ATTEMPT": str(attempt),
        }

        has_gpus = [need.gpus > 0 for need in self._needs for _ in range(need.count)]
        self._event("placed", nodes={replica.source: replica.node for replica in self._replicas})
        for replica, process, alone in zip(self._replicas, described, has_gpus, strict=True):
            variables = {**common, **process.env, **(_a_machine_of_its_own(process.env) if alone else {})}
            task = ReplicaTask(
                PACKAGE,
                self._execution.package,
                self._execution.arguments,
                variables,
                self._execution.directory,
                self._task["key"],
                replica.role,
                replica.index,
                trial,
            )
            replica.actor.run.remote(task)
            replica.poll, replica.last_heard = replica.actor.poll.remote(0), time.monotonic()

    def _take_messages(self) -> None:
        """Get messages from all replicas. Waits until one has a message, or for a tick."""
        polls = {replica.poll: replica for replica in self._replicas if not replica.over and not replica.lost}
        if not polls:
            time.sleep(_TICK_S)
            return
        ready, _ = self._ray.wait(list(polls), num_returns=len(polls), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(list(polls), timeout=_TICK_S)
        pause_s = 0.0
        for ref in ready:
            replica = polls[ref]
            try:
                answer, messages = self._ray.get(ref)
            except self._ray.exceptions.ActorUnavailableError:
                # Without a pause, Ray would report the same error again at once.
                replica.poll, pause_s = replica.actor.poll.remote(replica.answer), _TICK_S
            except self._ray.exceptions.RayError as error:
                replica.lost = Lost(_line(error), time.monotonic())
            else:
                replica.last_heard, replica.answer = time.monotonic(), answer
                replica.poll = replica.actor.poll.remote(answer)
                for message in messages:
                    self._take(replica, message)
        time.sleep(pause_s)

    def _take(self, replica: Replica, message: Message) -> None:
        if message.kind == "output":
            replica.last = (replica.last + message.data)[-_LAST:]
            whole, end, rest = (replica.rest + message.data).rpartition(b"\n")
            if end or not replica.rest:
                replica.rest_since = time.monotonic()
            replica.rest = rest
            self._write(encode(replica.source, whole + end))
        elif message.kind in ("prepare", *FILES):
            self._write(encode(message.kind, message.data))
        elif message.kind == "began":
            self._event("began", role=replica.role, index=replica.index)
            replica.actor.clean.remote()
        elif message.kind == "hang":
            self._event("hang", role=replica.role, index=replica.index, text=message.text)
        elif message.kind == "refused":
            self._end(replica, 2 if message.mistake else None, f"could not be started: {message.text}")
        elif message.kind == "ended":
            lines = [line.strip() for line in replica.last.decode("utf-8", "replace").splitlines()]
            last_line = next((line for line in reversed(lines) if line), "")
            self._end(replica, message.code, outcome(message.code, last_line))

    def _end_lost(self) -> None:
        """Judge the replicas that no longer answer: each was lost with its node, or killed alone."""
        now = time.monotonic()
        left = [replica for replica in self._replicas if not replica.over]
        silent = [replica for replica in left if replica.lost or now - replica.last_heard > LOST_S]
        alive = self._nodes() if silent else {}
        for replica in silent:
            if replica.lost is None or replica.node not in alive:
                self._end(replica, None, "was lost with its node", replica.last_heard)
            elif now - replica.lost.at > NODE_S:
                text = f"was killed with its Ray worker: {replica.lost.why}"
                self._end(replica, -signal.SIGKILL, text, replica.lost.at)

    def _end(self, replica: Replica, code: int | None, text: str, at: float | None = None) -> None:
        self._write(encode(replica.source, replica.rest))
        replica.over, replica.rest = True, b""
        at = time.monotonic() if at is None else at
        self._event("ended", role=replica.role, index=replica.index, outcome=text)
        if not self._stopping:
            self._carry_out(self._verdict.ended(End(replica.role, replica.index, code, text, at)))

    def _carry_out(self, orders: Orders) -> None:
        for replica in self._replicas:
            if replica.role in orders.ask and not replica.over:
                replica.actor.send_signal.remote(int(signal.SIGTERM))
        self._kill_at = min(self._kill_at, time.monotonic() + orders.kill_within_s)

    def _keep_time(self) -> None:
        """Do what is due: a requested end, the end of the grace period, lost replicas, unfinished lines, a heartbeat."""
        if self.stop_requested and not self._stopping:
            self._stopping = True
            self._carry_out(Orders(tuple({replica.role for replica in self._replicas}), self._task["grace_s"]))
        if time.monotonic() >= self._kill_at and not self._killed:
            self._killed = True
            for replica in self._replicas:
                if not replica.over:
                    replica.actor.send_signal.remote(int(signal.SIGKILL))
        self._end_lost()
        for replica in self._replicas:
            if replica.rest and time.monotonic() - replica.rest_since > REST_S:
                self._write(encode(replica.source, replica.rest))
                replica.rest = b""
        self._say_alive()

    def _say_alive(self) -> None:
        if self._quiet():
            self._event("alive")

    def _quiet(self) -> bool:
        """Return True if nothing was written for so long that a heartbeat is due."""
        return time.monotonic() - self._written_at > ALIVE_S

    def _event(self, name: str, **values: Any) -> None:
        self._write(event(name, at=time.time(), **values))

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._written_at = time.monotonic()
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]

    def _nodes(self) -> dict[str, dict[str, float]]:
        return {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}


def _a_machine_of_its_own(env: dict[str, str]) -> dict[str, str]:
    """The rank variables of a replica with its own accelerators. Several such replicas may share a node."""
    if "RANK" not in env:
        return {}
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": env["RANK"], "GROUP_RANK": env["RANK"]}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> int:
    """Run the attempt that `FOOTPLATE_RAY_TASK` describes. Returns 0 if it succeeds."""
    import ray

    task = json.loads(os.environ.pop(VARIABLE))
    stop_requests: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(True))
    ray.init(namespace=task["key"], log_to_driver=False, logging_level=logging.ERROR)
    entry_point = EntryPoint(ray, task)
    signal.signal(signal.SIGTERM, lambda *_: setattr(entry_point, "stop_requested", True))
    if stop_requests:
        entry_point.stop_requested = True
    return 0 if entry_point.run() else 1


if __name__ == "__main__":
    sys.exit(main())
