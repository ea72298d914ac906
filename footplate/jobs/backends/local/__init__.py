"""Jobs on this machine: each replica is a process, and dies with its supervisor.

machine.py   what the machine has for jobs, and what a job needs of it
members.py   what each process of an attempt is to be
attempt.py   the processes of an attempt: started together, heard, and ended together
usage.py     how busy they keep the machine
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
    from footplate.jobs.backends.local.attempt import Gang
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob


class Local:
    """The machine that the job is submitted on."""

    outlives = False

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """Here."""
        return {}

    def check(self, resolved: ResolvedJob, place: Mapping[str, str]) -> list[str]:
        """That it is one training of a Python package; what it asks for beyond this machine.

        Raises:
            ConfigError: its program is in a container image; it is a tuning; its job directory can't be made;
                `FOOTPLATE_LOG_MB` is no number.
        """
        if "hyperparameters" in resolved.spec:
            raise ConfigError(
                f"{resolved.name}: on this machine a job is one training, and none is tuned: leave out hyperparameters."
            )
        if not resolved.command:
            raise ConfigError(
                f"{resolved.name}: the spec names a container image and no module. On this machine jobs run as Python "
                "packages: give --package-path and --module-name."
            )
        if resolved.job_dir is not None and not resolved.job_dir.startswith(BUCKETS):
            _check_job_dir(absolute_job_dir(resolved.job_dir, Path.cwd()))
        limit()  # a wrong FOOTPLATE_LOG_MB is an error now, not when the job begins
        images = any(one.image_uri for one in resolved.replicas)
        word = "On this machine the package runs as it is, without the container image that the spec names."
        return [*machine.shortages(self.needs(resolved), machine.resources()), *([word] if images else [])]

    def needs(self, resolved: ResolvedJob) -> Resources:
        """What its machines have, together."""
        return machine.needs(resolved)

    def request(self, resolved: ResolvedJob, place: Mapping[str, str], package: Snapshot) -> None:
        """Nobody is asked."""

    def find(self, task: Task) -> None:
        """None is left when the supervisor has died."""

    def prepare(self, task: Task) -> None:
        """Install the package, and make the job's directory."""
        from footplate.jobs.backends.local.members import installed

        if task.execution.job_dir is not None and not task.execution.job_dir.startswith(BUCKETS):
            Path(task.execution.job_dir).mkdir(parents=True, exist_ok=True)
        installed(task.execution.package, task.home.root, task.folder)

    def begin(self, task: Task) -> Gang:
        """Start its processes."""
        from footplate.jobs.backends.local.attempt import Gang
        from footplate.jobs.backends.local.members import members
        from footplate.jobs.backends.local.usage import NAME, Meter

        return Gang(members(task), task.attempt, Meter(task.folder / NAME, task.job.devices))


def _check_job_dir(path: Path) -> None:
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not there.is_dir():
        kind = "a link to a place where nothing is" if not there.exists() else "a file"
        raise ConfigError(f"--job-dir: {there} is {kind}. Give a directory; it is made when the job begins.")
    longest = os.pathconf(there, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in path.parts):
        raise ConfigError(
            f"--job-dir: a part of {str(path)[:80]}… is longer than {longest} bytes. Give a shorter path."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--job-dir: {there} can't be written to. Give a directory of yours.")


BACKEND = Local()
