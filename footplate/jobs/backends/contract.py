"""What a place in which jobs run must be able to do.

    submission    place ─► check, needs       the job is in the store, with what was found
    --dry-run     place ─► check ─► request   printed, nothing else
    an attempt    find, or prepare ─► begin   ─► Attempt: wait, wait, … until it is over ─► close

The attempts of some places outlive their supervisor: the service runs them, and the supervisor only looks on. When that
dies, the next one finds the attempt again by its key, which is made of the job and the attempt's number, so that none is
begun twice. The attempts of others die with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
    """An attempt that is to be.

    Attributes:
        home: where this machine keeps its jobs.
        job: the job, as the store had it when its supervisor began.
        execution: what the attempt runs.
        attempt: from 1.
        folder: the attempt's: output goes to `ROLE-INDEX.log` in it, that of the preparation to `prepare.log`.
    """

    home: Home
    job: Job
    execution: Execution
    attempt: int
    folder: Path

    @property
    def key(self) -> str:
        """What no other attempt has, of this or another job."""
        return f"{self.job.id}-{self.attempt}"


class Attempt(Protocol):
    """One attempt at a job, under way."""

    @property
    def running(self) -> bool:
        """Whether its processes have begun."""
        ...

    @property
    def waits_for(self) -> str:
        """Why they have not, in words; empty when there is nothing to say."""
        ...

    @property
    def over(self) -> bool:
        """Whether all of them have ended."""
        ...

    @property
    def succeeded(self) -> bool:
        """Whether it has done its work; known once it is over."""
        ...

    @property
    def failure(self) -> Failure | None:
        """What ended it, unless it succeeded. Of kind "host": the machine, not the program.

        Of one that was stopped, what the user should know of its end; mostly nothing.
        """
        ...

    @property
    def processes(self) -> list[Process]:
        """Those that have begun, `pid` 0 for one that is not of this machine."""
        ...

    def wait(self, timeout_s: float) -> list[Process]:
        """Hear it for so long, keep what it writes, and return the processes that have ended meanwhile.

        A network that fails for a while is the attempt's own trouble, and no failure of the job.
        """
        ...

    def stop(self, grace_s: float) -> None:
        """Ask all processes to end, by SIGTERM, and kill what is left after so many seconds. Returns at once."""
        ...

    def close(self) -> None:
        """Let go of it. One that outlives its supervisor goes on, the processes of another are killed."""
        ...


class Backend(Protocol):
    """A place in which jobs run.

    Attributes:
        outlives: its attempts go on when their supervisor dies.
    """

    outlives: bool

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """Where exactly: what the command's options and the environment say, kept with the job.

        Raises:
            ConfigError: something lacks, or is no place.
        """
        ...

    def check(self, resolved: ResolvedJob, place: Mapping[str, str]) -> list[str]:
        """What the user may not expect of it, each in a sentence.

        Raises:
            ConfigError: the job can't run there as it is.
        """
        ...

    def needs(self, resolved: ResolvedJob) -> Resources:
        """What the job takes of the machine that submits it."""
        ...

    def request(self, resolved: ResolvedJob, place: Mapping[str, str], package: Snapshot) -> dict[str, Any] | None:
        """What would be sent to the service; None where there is no service.

        Args:
            resolved: the job.
            place: where.
            package: its program, as a submission would take it.

        Raises:
            ConfigError: the job can't run there as it is.
            PackageError: its package can't be sent there.
        """
        ...

    def find(self, task: Task) -> Attempt | None:
        """The attempt, if it was begun already.

        Raises:
            OSError: the service is away.
        """
        ...

    def prepare(self, task: Task) -> None:
        """Install, or upload, the package: what may take minutes.

        Raises:
            FootplateError: it can't be done, however often it is tried.
            OSError: the service is away.
        """
        ...

    def begin(self, task: Task) -> Attempt:
        """Begin a prepared attempt which `find` has not found.

        Raises:
            FootplateError: it can't be done, however often it is tried.
            OSError: the machine has no room for its processes, or the service is away.
        """
        ...
