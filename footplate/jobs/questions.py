"""Questions to a running job: where its processes are now, and a profile of its next steps.

    processes_of(store, job, "stacks").stacks()        the stacks of all processes, as text
    processes_of(store, job, "profile").profile(10)    a profile that the training has begun

The answers come from the machines of the processes. `ProcessesHere` asks those of one machine, over the pipes of
`core/stacks/`. `JobProcesses` asks all machines of a job, and makes one answer of theirs.

    local     JobProcesses ─► ProcessesHere, in the process that asks
    ray       the process that asks ─ Jobs API ─► question.py, on the cluster: JobProcesses
                                                  ─► replica_actor.py, on each node: ProcessesHere
    slurm     JobProcesses, in the process that asks ─ shared disk ─► replica.py, on each node: ProcessesHere
    vertex    can't be asked

An answer has names of functions, files and threads, and lines of the program. Values and variables are in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.profile_requests import (
    ProfileRequest,
    ProfileStatus,
    RunningProfile,
    request_profile,
    status_of,
    unfinished,
)
from footplate.core.stacks.asking import ask
from footplate.core.stacks.report import report_on
from footplate.core.stacks.requests import answering_processes
from footplate.core.stacks.snapshot import Process
from footplate.jobs.record import Job
from footplate.jobs.states import State
from footplate.jobs.store.jobs import Store, WrongState
from footplate.jobs.tuning import backend_of

if TYPE_CHECKING:
    from footplate.jobs.backends.contract import RunningProcesses

T = TypeVar("T")

LIMIT_S = 5.0
_A = {"stacks": "stacks", "profile": "a profile"}


def processes_of(store: Store, job: Job, what: str) -> RunningProcesses:
    """Return the processes of a running job, to ask them.

    Args:
        store: the store of the job.
        job: the job.
        what: what they are asked for, also the name of the command: "stacks" or "profile".

    Raises:
        WrongState: the job doesn't run.
        Unavailable: its processes can't be asked from here.
    """
    if job.state not in (State.RUNNING, State.CANCELLING):
        raise WrongState(f"{job.name} is {job.state}: only a running job has {_A[what]}.")
    processes = [process for process in store.processes(job.name) if process.attempt == job.attempt]
    return backend_of(job, store).reach(job, processes, what)


def no_process(name: str) -> WrongState:
    """The error for a job whose processes haven't begun, or have ended."""
    return WrongState(f"{name} has no process now. See: footplate jobs describe {name}")


class Silent(Exception):
    """A machine doesn't answer, or is lost."""


class Machine(Protocol):
    """The processes of a job on one machine. Each call may raise `Silent`."""

    @property
    def name(self) -> str:
        """Whose processes they are: "worker-1"."""
        ...

    def stacks(self, native: bool) -> list[Process]:
        """The processes with their stacks; empty if none runs."""
        ...

    def request_profile(self, steps: int) -> ProfileRequest:
        """Ask the training for a profile of its next steps.

        Raises:
            ConfigError: none of them trains now.
            Unavailable: the training makes a profile already.
        """
        ...

    def profile_status(self, request: ProfileRequest) -> ProfileStatus:
        """What has become of a request to this machine."""
        ...

    def unfinished(self) -> ProfileStatus | None:
        """The status of a rank that still records or writes a profile; None if there is none."""
        ...


@dataclass(frozen=True)
class ProcessesHere:
    """Processes of this machine. Implements `Machine`."""

    pids: Sequence[int]
    name: str = "this machine"

    def stacks(self, native: bool) -> list[Process]:
        """Ask the processes, and those below them, for their stacks."""
        return list(ask(self.pids, LIMIT_S, native))

    def request_profile(self, steps: int) -> ProfileRequest:
        """Ask the training in the processes, or below them, for a profile."""
        return request_profile(self.pids, steps)

    def profile_status(self, request: ProfileRequest) -> ProfileStatus:
        """What has become of a request."""
        return status_of(request)

    def unfinished(self) -> ProfileStatus | None:
        """The status of a rank that still records or writes."""
        return unfinished(answering_processes(self.pids))


@dataclass(frozen=True)
class JobProcesses:
    """The processes of a job on all of its machines. Implements `RunningProcesses`.

    Args:
        job: the job's name.
        machines: the machines, that of rank 0 first.
    """

    job: str
    machines: Sequence[Machine]

    def stacks(self, native: bool = False) -> str:
        """The stacks of all processes, as text. A line at the end names each machine that didn't answer.

        Raises:
            WrongState: no process runs.
            Unavailable: no machine answers.
        """
        answers, silent = _from_all(self.machines, lambda machine: machine.stacks(native))
        processes = [process for answer in answers for process in answer]
        if not processes and silent:
            raise Unavailable(f"{self.job}: {'; '.join(silent)}.")
        if not processes:
            raise no_process(self.job)
        return report_on(processes) + "".join(f"\n{text}\n" for text in silent)

    def profile(self, steps: int) -> RunningProfile:
        """Begin a profile of the next steps, on all ranks.

        Args:
            steps: how many steps.

        Raises:
            ConfigError: no process trains now.
            Unavailable: the training makes a profile already, or doesn't answer.
        """
        failure = ConfigError(f"{self.job} has no process now.")
        for machine in self.machines:
            try:
                request = machine.request_profile(steps)
            except Unavailable:
                raise
            except Silent as error:
                failure = Unavailable(f"{error}.")
            except ConfigError as error:
                # Its processes don't train. Those of another machine may.
                failure = failure if isinstance(failure, Unavailable) else error
            else:
                others = [other for other in self.machines if other is not machine]
                return _JobProfile(machine, others, request)
        raise failure


@dataclass(frozen=True)
class _JobProfile:
    """A profile of a job. `machine` has accepted the request; the ranks on the other machines record the same steps."""

    machine: Machine
    others: Sequence[Machine]
    request: ProfileRequest

    @property
    def step(self) -> int:
        return self.request.step

    def status(self) -> ProfileStatus:
        try:
            status = self.machine.profile_status(self.request)
        except Silent as error:
            return ProfileStatus("failed", error=str(error))
        if status.state != "done":
            return status
        unfinished, _ = _from_all(self.others, lambda machine: machine.unfinished())
        return next(filter(None, unfinished), status)


def _from_all(machines: Sequence[Machine], question: Callable[[Machine], T]) -> tuple[list[T], list[str]]:
    """Ask all machines at once. Returns the answers, and the errors of machines that don't answer."""

    def answer(machine: Machine) -> tuple[list[T], list[str]]:
        try:
            return [question(machine)], []
        except Silent as error:
            return [], [str(error)]

    if len(machines) < 2:
        return _joined(map(answer, machines))
    with ThreadPoolExecutor(min(16, len(machines)), "footplate-asks") as pool:
        return _joined(pool.map(answer, machines))


def _joined(replies: Iterable[tuple[list[T], list[str]]]) -> tuple[list[T], list[str]]:
    answers: list[T] = []
    silent: list[str] = []
    for answer, error in replies:
        answers += answer
        silent += error
    return answers, silent
