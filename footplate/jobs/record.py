"""A job in the store, its transitions, the processes of its attempts, and the trials of a tuning, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from footplate.jobs.scheduling import Resources
from footplate.jobs.states import State


@dataclass(frozen=True)
class Job:
    """A job in the store. Times are seconds since the epoch.

    Attributes:
        name: unique in the store.
        state: its state now.
        created: when it was submitted.
        queued: when it entered the queue; later than `created` if it was resubmitted.
        started: when its first attempt began to run; None before that.
        ended: when it ended; None before that.
        host: the machine that submitted it. Its supervisor runs there.
        backend: where it runs, one of `backends.NAMES`.
        priority: from 0 to 1000.
        attempt: the number of the current attempt, or of the last one; 0 before the first.
        failures: attempts since the last submission that the program failed.
        losses: attempts since the last submission that were lost with the machine or the supervisor.
        cause: why it is in its state, in words; may be empty.
        needs: the part of the machine that it holds while it runs.
        devices: the numbers of the accelerators that it holds while it runs.
        plan: an `execution.Execution` as plain values, for its supervisor.
        spec: the resolved job, for people.
        labels: name → value.
        owner: the identity of its supervisor (`supervision/identity.py`); None before there is one.
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
        """An id that no other job has, not even a later one of the same name."""
        return f"{self.name}-{round(self.created * 1e6)}"

    def _repr_html_(self) -> str:
        from footplate.jobs.job_html import job_html

        return job_html(self)


@dataclass(frozen=True)
class Transition:
    """A change of a job's state. `source` is None for the first one."""

    source: State | None
    target: State
    at: float
    attempt: int
    cause: str


@dataclass(frozen=True)
class Process:
    """A process of an attempt.

    Attributes:
        attempt: the attempt's number.
        role: master, worker, parameter_server, evaluator.
        index: its number within its role.
        pid: its process id, also that of its process group; 0 for a process on another machine.
        mark: its start time in the kernel's units. With the pid, it identifies the process.
        began: when it began.
        ended: when it ended; None while it runs, and for a lost process.
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


class TrialState(StrEnum):
    """The state of a trial of a tuning. A trial in one of the first four hasn't ended."""

    ACTIVE = "ACTIVE"
    STOPPING = "STOPPING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    STOPPED_EARLY = "STOPPED_EARLY"
    INFEASIBLE = "INFEASIBLE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True)
class Fork:
    """The origin of a trial that began from a checkpoint of another trial.

    Attributes:
        parent: the number of that trial.
        step: the step of the checkpoint.
        replaces: the number of the trial that gave way to it.
    """

    parent: int
    step: float
    replaces: int


@dataclass(frozen=True)
class Trial:
    """A trial of a tuning: one training with certain hyperparameters. Times are seconds since the epoch.

    Attributes:
        tuning: the name of the tuning's job.
        number: from 1.
        job: the name of the trial's own job.
        state: ACTIVE while its job waits or runs, STOPPING or PAUSING while it is asked to save and end, PAUSED when it may
            continue, STOPPED_EARLY when it won't. SUCCEEDED with a result, INFEASIBLE if the metric became NaN or infinite.
        parameters: name → value.
        measurements: (step, value) of each report of the metric, in order; recorded when the trial has ended.
        value: the last value of the metric, if the trial has a result.
        step: the step of that value.
        created: when it was added.
        ended: when it ended; None before that.
        cause: why it is in its state, in words; may be empty.
        fork: the trial that it began from; None if it began as the tuning does.
    """

    tuning: str
    number: int
    job: str
    state: TrialState
    parameters: dict[str, float | int | str]
    measurements: tuple[tuple[float, float], ...] = ()
    value: float | None = None
    step: float | None = None
    created: float = 0.0
    ended: float | None = None
    cause: str = ""
    fork: Fork | None = None

    @property
    def has_ended(self) -> bool:
        """True if its state won't change any more."""
        return self.ended is not None
