"""The interface of a backend of jobs.

    submission    destination ─► check ─► request ─► needs    the job is in the store, with its destination
    --dry-run     destination ─► check ─► request             the request is printed
    an attempt    find, or prepare ─► begin   ─► Attempt: wait, wait, … until it is over ─► close
    questions     reach                       ─► RunningProcesses: stacks, profile

On some backends an attempt outlives its supervisor: a service runs the attempt, and the supervisor only follows it. When
that supervisor dies, the next one finds the attempt by its key, which consists of the job's id and the attempt's number.
So no attempt is begun twice. On other backends an attempt dies with its supervisor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from footplate.core.profile_requests import RunningProfile
from footplate.jobs.execution import Execution
from footplate.jobs.home import Home
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import Resources
from footplate.launch.failure import Failure

if TYPE_CHECKING:
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob


@dataclass(frozen=True)
class Task:
    """An attempt to begin.

    Attributes:
        home: the home of the job.
        job: the job, as it was in the store when its supervisor began.
        execution: what the attempt runs.
        attempt: its number, from 1.
        folder: the attempt's folder. Output goes to `ROLE-INDEX.log`, that of the preparation to `prepare.log`.
    """

    home: Home
    job: Job
    execution: Execution
    attempt: int
    folder: Path

    @property
    def key(self) -> str:
        """A name that no other attempt has, of this or another job."""
        return f"{self.job.id}-{self.attempt}"


@dataclass(frozen=True)
class Requeued(Failure):
    """The end of an attempt after which the backend itself begins the next one. It counts as no loss.

    The supervisor finds the next attempt by its number (`Backend.find`).
    """


class Attempt(Protocol):
    """A running attempt at a job."""

    @property
    def running(self) -> bool:
        """True when its processes have begun."""
        ...

    @property
    def waits_for(self) -> str:
        """The reason why the processes haven't begun; may be empty."""
        ...

    @property
    def over(self) -> bool:
        """True when all processes have ended."""
        ...

    @property
    def succeeded(self) -> bool:
        """True if it has done its work; final once it is over."""
        ...

    @property
    def failure(self) -> Failure | None:
        """The failure that ended it; None if it succeeded. The kind "host" means the machine, not the program.

        For a stopped attempt: what the user should know about its end; usually None.
        """
        ...

    @property
    def processes(self) -> list[Process]:
        """The processes that have begun. `pid` is 0 for a process on another machine."""
        ...

    def wait(self, timeout_s: float) -> list[Process]:
        """Follow the attempt for `timeout_s`: keep its output, and return the processes that ended meanwhile.

        The attempt itself handles a network that fails for a while. That is no failure of the job.
        """
        ...

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to all processes, and kill the remaining ones after `grace_s` seconds. Returns at once."""
        ...

    def close(self) -> None:
        """Release it. An attempt that outlives its supervisor goes on; the processes of another one are killed."""
        ...


class RunningProcesses(Protocol):
    """The processes of a running job, which answer questions (`jobs/questions.py`)."""

    def stacks(self, native: bool = False) -> str:
        """The stacks of all processes, as text. The first line says which process is where.

        Args:
            native: read native stacks, too, if py-spy is installed. It pauses the processes for a moment.

        Raises:
            WrongState: no process runs.
            Unavailable: the processes can't be asked.
        """
        ...

    def profile(self, steps: int) -> RunningProfile:
        """Begin a profile of the training's next steps, on all ranks.

        Raises:
            ConfigError: no process trains now.
            Unavailable: a profile is being made already, or the processes can't be asked.
        """
        ...


class SupervisedBackend(Protocol):
    """What a supervisor needs of a backend.

    Attributes:
        outlives: its attempts go on when their supervisor dies.
    """

    outlives: bool

    def find(self, task: Task) -> Attempt | None:
        """Find the attempt, if it was begun already.

        Raises:
            OSError: the service can't be reached.
        """
        ...

    def prepare(self, task: Task) -> None:
        """Install or upload the package. This may take minutes.

        Raises:
            FootplateError: a retry won't help.
            OSError: the service can't be reached.
        """
        ...

    def begin(self, task: Task) -> Attempt:
        """Begin a prepared attempt that `find` hasn't found.

        Raises:
            FootplateError: a retry won't help.
            OSError: the machine has no room for its processes, or the service can't be reached.
        """
        ...

    def reach(self, job: Job, processes: Sequence[Process], what: str) -> RunningProcesses:
        """Return the processes of a running attempt, to ask them.

        Args:
            job: the job, which runs.
            processes: the processes of its current attempt, from the store.
            what: what they are asked for, also the name of the command: "stacks" or "profile".

        Raises:
            WrongState: no process runs now.
            Unavailable: they can't be asked from here.
        """
        ...


class Backend(SupervisedBackend, Protocol):
    """A place where jobs run."""

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """Complete the options, from the command's options and the environment. The result is kept with the job.

        Raises:
            ConfigError: an option is missing, or has a wrong value.
        """
        ...

    def check(self, resolved: ResolvedJob, destination: Mapping[str, str]) -> list[str]:
        """Check that the job can run there. Returns what the user may not expect, one sentence each.

        Raises:
            ConfigError: the job can't run there as it is.
        """
        ...

    def needs(self, resolved: ResolvedJob) -> Resources:
        """The part of the submitting machine that the job needs."""
        ...

    def request(
        self, resolved: ResolvedJob, destination: Mapping[str, str], package: Snapshot
    ) -> dict[str, Any] | None:
        """Make the request that the service would get; None if there is no service.

        Args:
            resolved: the job.
            destination: the backend's options.
            package: the snapshot of its program.

        Raises:
            ConfigError: the job can't run there as it is.
            PackageError: its package can't be sent there.
        """
        ...
