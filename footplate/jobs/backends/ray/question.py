"""`python -m footplate.jobs.backends.ray.question`: a question to a running attempt, as a Ray Job of its own on the head.

    asking.py ─ Jobs API ─► this program ─► the actor of each replica, by its name in the namespace of the attempt
              ◄─ events ──               ◄─ answers

It needs no resources of the cluster, so a full cluster answers. It runs Footplate from the files of the attempt, so that it
and the actors understand each other. Its output has these events:

    accepted   step of the training                     a profile has begun
    status     state, directory, summary, error         each new state of the profile; the last one is final
    stacks     text                                     the stacks of all processes
    refused    kind ("state", "unavailable", "config") and text
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import LIMIT_S as PROFILE_S
from footplate.core.profile_requests import STATUS_LIMIT_S, ProfileRequest, ProfileStatus, wait_for_profile
from footplate.core.stacks.snapshot import Process
from footplate.jobs import questions
from footplate.jobs.backends.ray.log_protocol import event
from footplate.jobs.backends.ray.replica_actor import QUESTIONS, Answer
from footplate.jobs.questions import JobProcesses, Silent, no_process
from footplate.jobs.store.jobs import WrongState

VARIABLE = "FOOTPLATE_RAY_QUESTION"
ENTRY_POINT = "exec python -P -m footplate.jobs.backends.ray.question"
# Beyond an actor's own time limit.
MORE_S = 10.0
# The order of the roles, and so of the ranks.
ROLES = ("master", "worker", "parameter_server", "evaluator")


@dataclass(frozen=True)
class _Actor:
    """The actor of a replica. Implements `jobs.questions.Machine`."""

    ray: Any
    name: str
    handle: Any

    def stacks(self, native: bool) -> list[Process]:
        return self._ask(questions.LIMIT_S, "stacks", native)

    def request_profile(self, steps: int) -> ProfileRequest:
        return self._ask(PROFILE_S, "request_profile", steps)

    def profile_status(self, request: ProfileRequest) -> ProfileStatus:
        return self._ask(STATUS_LIMIT_S, "profile_status", request)

    def unfinished(self) -> ProfileStatus | None:
        return self._ask(STATUS_LIMIT_S, "unfinished")

    def end_following(self) -> None:
        """Tell the actor that it may end."""
        call = self.handle.end_following.options(concurrency_group=QUESTIONS)
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.get(call.remote(), timeout=MORE_S)

    def _ask(self, limit_s: float, question: str, *arguments: Any) -> Any:
        call = self.handle.ask.options(concurrency_group=QUESTIONS)
        try:
            answer: Answer = self.ray.get(call.remote(question, *arguments), timeout=limit_s + MORE_S)
        except self.ray.exceptions.GetTimeoutError:
            raise Silent(f"{self.name} did not answer in {limit_s + MORE_S:g} s") from None
        except self.ray.exceptions.RayActorError:
            raise Silent(f"{self.name} has ended, or was lost") from None
        if answer.error:
            raise (Unavailable if answer.unavailable else ConfigError)(answer.error)
        return answer.value


def replicas_of(ray: Any, key: str) -> list[_Actor]:
    """The actors of an attempt, that of rank 0 first."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == key]
    actors = []
    for name in sorted(names, key=_place):
        # An actor that ends meanwhile isn't found.
        with contextlib.suppress(ValueError):
            actors.append(_Actor(ray, name, ray.get_actor(name, namespace=key)))
    return actors


def _place(name: str) -> tuple[int, int]:
    role, _, index = name.rpartition("-")
    return ROLES.index(role), int(index)


def answer(ray: Any, question: dict[str, Any]) -> None:
    """Ask the replicas, and write the events.

    Raises:
        ConfigError: the job doesn't run, or can't answer.
    """
    actors = replicas_of(ray, question["key"])
    if not actors:
        raise no_process(question["job"])
    job = JobProcesses(question["job"], actors)
    if question["question"] == "stacks":
        _write("stacks", text=job.stacks(question["native"]))
        return
    profile = job.profile(question["steps"])
    _write("accepted", step=profile.step)
    wait_for_profile(profile, lambda status: _write("status", **asdict(status)))
    for actor in actors:
        actor.end_following()


def _write(name: str, **values: Any) -> None:
    data = event(name, **values)
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def main() -> None:
    """Answer the question that `FOOTPLATE_RAY_QUESTION` has."""
    import ray

    question = json.loads(os.environ.pop(VARIABLE))
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        answer(ray, question)
    except ConfigError as error:
        kind = (
            "state" if isinstance(error, WrongState) else "unavailable" if isinstance(error, Unavailable) else "config"
        )
        _write("refused", kind=kind, text=str(error))


if __name__ == "__main__":
    main()
    # Ray needs two seconds to end a driver, and longer on a busy cluster. The one who asks waits for the end.
    os._exit(0)
