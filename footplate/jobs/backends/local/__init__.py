"""Jobs on this machine: each replica is a process, and dies with its supervisor.

machine.py   the machine's resources for jobs, and the resources that a job needs
members.py   the program, variables and devices of each process of an attempt
attempt.py   the processes of an attempt: started, followed and ended together
usage.py     how much of the machine they use
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError
from footplate.jobs.backends.contract import Task
from footplate.jobs.backends.local import machine
from footplate.jobs.execution import BUCKETS, absolute_job_dir
from footplate.jobs.scheduling import Resources
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
        """Check that the job is one training of a Python package. Return notices of its needs beyond this machine.

        Raises:
            ConfigError: its program is in a container image; it is a tuning; its job directory can't be created;
                `FOOTPLATE_LOG_MB` isn't a number.
        """
        if "hyperparameters" in resolved.spec:
            raise ConfigError(
                f"{resolved.name}: on this machine a job is one training, without tuning: leave out hyperparameters."
            )
        if not resolved.command:
            raise ConfigError(
                f"{resolved.name}: the spec names a container image and no module. On this machine jobs run as Python "
                "packages: give --package-path and --module-name."
            )
        if resolved.job_dir is not None and not resolved.job_dir.startswith(BUCKETS):
            _check_job_dir(absolute_job_dir(resolved.job_dir, Path.cwd()))
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
        from footplate.jobs.backends.local.members import installed

        if task.execution.job_dir is not None and not task.execution.job_dir.startswith(BUCKETS):
            Path(task.execution.job_dir).mkdir(parents=True, exist_ok=True)
        installed(task.execution.package, task.home.root, task.folder)

    def begin(self, task: Task) -> LocalAttempt:
        """Start its processes."""
        from footplate.jobs.backends.local.attempt import LocalAttempt
        from footplate.jobs.backends.local.members import members
        from footplate.jobs.backends.local.usage import NAME, Meter

        return LocalAttempt(members(task), task.attempt, Meter(task.folder / NAME, task.job.devices))


def _check_job_dir(path: Path) -> None:
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        kind = "a link whose target doesn't exist" if not existing.exists() else "a file"
        raise ConfigError(f"--job-dir: {existing} is {kind}. Give a directory; it is created when the job starts.")
    longest = os.pathconf(existing, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in path.parts):
        raise ConfigError(
            f"--job-dir: a part of {str(path)[:80]}… is longer than {longest} bytes. Give a shorter path."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--job-dir: {existing} can't be written to. Give a directory that you can write to.")


BACKEND = Local()
