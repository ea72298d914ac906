"""Jobs on this machine: each replica is a process, and dies with its supervisor.

machine.py   the machine's resources for jobs, and the resources that a job needs
members.py   the program, variables and devices of each process of an attempt
attempt.py   the processes of an attempt: started, followed and ended together
usage.py     how much of the machine they use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs.backends.contract import Task
from footplate.jobs.backends.local import machine
from footplate.jobs.execution import BUCKETS, absolute_job_dir, check_job_dir
from footplate.jobs.questions import JobProcesses, ProcessesHere, no_process
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import Resources
from footplate.jobs.supervision.identity import Identity, boot
from footplate.jobs.supervision.logfiles import limit

if TYPE_CHECKING:
    from footplate.jobs.backends.local.attempt import LocalAttempt
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob


class Local:
    """The machine that submits the job."""

    outlives = False

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """Return an empty dict: this backend has no options."""
        return {}

    def check(self, resolved: ResolvedJob, destination: Mapping[str, str]) -> list[str]:
        """Check that the job runs a Python package. Return notices of its needs beyond this machine.

        Raises:
            ConfigError: its program is in a container image; its job directory can't be created; `FOOTPLATE_LOG_MB` isn't
                a number.
        """
        if not resolved.command:
            raise ConfigError(
                f"{resolved.name}: the spec names a container image and no module. On this machine jobs run as Python "
                "packages: give --package-path and --module-name."
            )
        if resolved.job_dir is not None and not resolved.job_dir.startswith(BUCKETS):
            check_job_dir(absolute_job_dir(resolved.job_dir, Path.cwd()))
        # A wrong FOOTPLATE_LOG_MB must fail now, not when the job starts.
        limit()
        images = any(replica.image_uri for replica in resolved.replicas)
        notice = "On this machine the package runs as it is, without the container image that the spec names."
        return [*machine.shortages(self.needs(resolved), machine.resources()), *([notice] if images else [])]

    def needs(self, resolved: ResolvedJob) -> Resources:
        """Return the total resources of the spec's machines."""
        return machine.needs(resolved)

    def request(self, resolved: ResolvedJob, destination: Mapping[str, str], package: Snapshot) -> None:
        """Return None: there is no service to send a request to."""

    def find(self, task: Task) -> None:
        """Return None: no attempt outlives its supervisor."""

    def prepare(self, task: Task) -> None:
        """Install the package, and create the job's directory."""
        from footplate.jobs.backends.local.members import prepare

        prepare(task)

    def begin(self, task: Task) -> LocalAttempt:
        """Start its processes."""
        from footplate.jobs.backends.local.attempt import LocalAttempt
        from footplate.jobs.backends.local.members import members
        from footplate.jobs.backends.local.usage import NAME, Meter

        return LocalAttempt(members(task), task.attempt, Meter(task.folder / NAME, task.job.devices))

    def reach(self, job: Job, processes: Sequence[Process], what: str) -> JobProcesses:
        """Return the processes, which run on this machine.

        Raises:
            WrongState: no process runs now.
            Unavailable: they run on another machine.
        """
        if job.host != machine.host():
            raise Unavailable(f"{job.name} runs on {job.host}, and so do its processes: ask there.")
        running = [process for process in processes if process.pid and process.ended is None]
        pids = [process.pid for process in running if Identity(process.pid, process.mark, boot()).alive()]
        if not pids:
            raise no_process(job.name)
        return JobProcesses(job.name, [ProcessesHere(pids)])


BACKEND = Local()
