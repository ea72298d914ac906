"""The part of a resolved job that its supervisor reads, as plain values that the store keeps.

Reading it imports neither the spec's model nor the catalog, so a supervisor starts as fast as a small program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.core.version import LIBRARY

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

BUCKETS = ("gs://", "s3://", "abfss://")


@dataclass(frozen=True)
class Role:
    """The replicas of a role.

    Attributes:
        role: master, worker, parameter_server, evaluator.
        count: the number of replicas.
        gpus: the accelerators of each, as the spec declares them.
        image_uri: the container image that the spec names.
    """

    role: str
    count: int
    gpus: int = 0
    image_uri: str | None = None


@dataclass(frozen=True)
class Execution:
    """The part of a resolved job that its supervisor reads.

    Attributes:
        name: the job's name.
        replicas: the roles, master first.
        arguments: the interpreter's arguments: `-m trainer.task …`.
        job_dir: the directory for the job's outputs, absolute if it is on this machine; None if the spec has none.
        directory: the directory of the submission, in which the processes run.
        max_running_time_s: the job fails after this time.
        package: the digest of its program.
        python: the interpreter that submitted it.
        library: the directory from which that interpreter imports Footplate.
        spec: all keys of TrainingInput that were given.
        place: the backend's options. The store's field has this name.
        tuning: a `tuning.plan.TuningPlan` as plain values; None if the job is one training.
        trial: the trial that the job is, as `tuning/trial_jobs.py` describes it; None if it is no trial.
    """

    name: str
    replicas: tuple[Role, ...]
    arguments: tuple[str, ...]
    job_dir: str | None
    directory: str
    max_running_time_s: float
    package: str
    python: str
    library: str
    spec: dict[str, Any]
    place: dict[str, str] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    trial: dict[str, Any] | None = None

    @classmethod
    def of(cls, resolved: ResolvedJob, package: str, directory: Path, destination: Mapping[str, str]) -> Execution:
        """Cut a resolved job down.

        Args:
            resolved: the job; it has a name and a module.
            package: the digest of its program.
            directory: the directory of the submission.
            destination: the backend's options.
        """
        assert resolved.name is not None
        job_dir, arguments = resolved.job_dir, list(resolved.command[1:])
        if job_dir is not None and not job_dir.startswith(BUCKETS):
            job_dir = str(absolute_job_dir(job_dir, directory))
            arguments[-1] = job_dir
        roles = tuple(
            Role(replica.role, replica.count, replica.machine.count or 0, replica.image_uri)
            for replica in resolved.replicas
        )
        longest_s = float(resolved.max_running_time.removesuffix("s"))
        return cls(
            resolved.name, roles, tuple(arguments), job_dir, str(directory), longest_s, package,
            sys.executable, LIBRARY, resolved.spec, dict(destination),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Execution:
        """Undo `to_dict`."""
        roles = tuple(Role(**role) for role in values["replicas"])
        return cls(**{**values, "replicas": roles, "arguments": tuple(values["arguments"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the execution as plain values."""
        return asdict(self)


def absolute_job_dir(job_dir: str, directory: Path) -> Path:
    """Return the absolute path of a job directory on this machine.

    Args:
        job_dir: a path, or file://PATH.
        directory: the directory of the submission.

    Raises:
        ConfigError: it begins with `~NAME`, and there is no such user.
    """
    try:
        return directory / Path(job_dir.removeprefix("file://")).expanduser()
    except RuntimeError:
        raise ConfigError(f"--job-dir {job_dir}: this machine has no such user. Give a directory's path.") from None


def check_job_dir(path: Path) -> None:
    """Check that a job directory on this machine can be created and written.

    Raises:
        ConfigError: it can't.
    """
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
