"""What is known of a job, as plain data: the job, its transitions, the processes of its attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from footplate.jobs.scheduling import Resources
from footplate.jobs.states import State


@dataclass(frozen=True)
class Job:
    """A job as the store has it. Times are seconds since the epoch.

    Attributes:
        name: unique in its store.
        state: where it is now.
        created: when it was submitted.
        queued: when it came into the queue: later than `created` if it was resubmitted.
        started: when its first attempt began to run; None before.
        ended: when it came to its end; None before.
        host: the machine that it was submitted on, and where its supervisor runs.
        backend: where it runs, one of `backends.NAMES`.
        priority: from 0 to 1000.
        attempt: which attempt is under way, or was the last; 0 before the first.
        failures: attempts of this submission that ended by the program's own fault.
        losses: attempts of this submission that were lost with the machine or the supervisor.
        cause: why it is in its state, in words; empty where nothing needs to be said.
        needs: what it holds of the machine while it runs.
        devices: the accelerators that are its own while it runs, by number.
        plan: what its supervisor needs to know (`plan.Plan`), as plain values.
        spec: the job as it was resolved, for people.
        labels: name → value.
        owner: who its supervisor is (`supervision/identity.py`); None before there is one.
    """

    name: str
    state: State
    created: float
    queued: float
    host: str
    backend: str = "local"
    priority: int = 0
    started: float | None = None
    ended: float | None = None
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    cause: str = ""
    needs: Resources = field(default_factory=Resources)
    devices: tuple[int, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    owner: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """What no other job has, not even one of the same name after this one was deleted."""
        return f"{self.name}-{round(self.created * 1e6)}"


@dataclass(frozen=True)
class Transition:
    """One step in a job's life; `source` is None for the first."""

    source: State | None
    target: State
    at: float
    attempt: int
    cause: str


@dataclass(frozen=True)
class Process:
    """One process of an attempt.

    Attributes:
        attempt: which.
        role: master, worker, parameter_server, evaluator.
        index: its number in its role.
        pid: its process id, which is also that of its group; 0 of one that is not of this machine.
        mark: when it began, in the system's own units: with its number, what tells it from others.
        began: when.
        ended: when; None while it runs, and of one that was lost.
        outcome: how it ended, in words; empty while it runs.
    """

    attempt: int
    role: str
    index: int
    pid: int
    mark: float
    began: float
    ended: float | None = None
    outcome: str = ""
