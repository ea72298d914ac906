"""What runs a job: its resolved spec, cut down to what its supervisor reads, as plain values that the store keeps.

Reading it needs neither the spec's model nor the catalog, so a supervisor starts in the time of a small program.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.core.version import LIBRARY

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

BUCKETS = ("gs://", "s3://")


@dataclass(frozen=True)
class Role:
    """The replicas of a role.

    Attributes:
        role: master, worker, parameter_server, evaluator.
        count: how many.
        gpus: that each was to have.
        image_uri: the container image that the spec names.
    """

    role: str
    count: int
    gpus: int = 0
    image_uri: str | None = None


@dataclass(frozen=True)
class Plan:
    """See the module's docstring.

    Attributes:
        name: the job's.
        replicas: the roles, master first.
        arguments: what follows the interpreter: `-m trainer.task …`.
        job_dir: where the job's outputs go, absolute if it is of this machine; None when the spec has none.
        directory: where the job was submitted: its processes' current one.
        max_running_time_s: after which it fails.
        package: the digest of its program.
        python: the interpreter that submitted it.
        library: the directory from which that imports Footplate.
        spec: all keys of TrainingInput that were given.
        place: where exactly it runs, as its backend has it.
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

    @classmethod
    def of(cls, resolved: ResolvedJob, package: str, directory: Path, place: Mapping[str, str]) -> Plan:
        """The plan of a job.

        Args:
            resolved: the job; it has a name and a module.
            package: the digest of its program.
            directory: from which it is submitted.
            place: where exactly it is to run.
        """
        assert resolved.name is not None
        job_dir, arguments = resolved.job_dir, list(resolved.command[1:])
        if job_dir is not None and not job_dir.startswith(BUCKETS):
            job_dir = str(absolute_job_dir(job_dir, directory))
            arguments[-1] = job_dir
        roles = tuple(Role(one.role, one.count, one.machine.count or 0, one.image_uri) for one in resolved.replicas)
        longest_s = float(resolved.max_running_time.removesuffix("s"))
        return cls(
            resolved.name, roles, tuple(arguments), job_dir, str(directory), longest_s, package,
            sys.executable, LIBRARY, resolved.spec, dict(place),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Plan:
        """From what `to_dict` made of it."""
        roles = tuple(Role(**one) for one in found["replicas"])
        return cls(**{**found, "replicas": roles, "arguments": tuple(found["arguments"])})

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def absolute_job_dir(job_dir: str, directory: Path) -> Path:
    """The absolute path of a job directory on this machine.

    Args:
        job_dir: as it was given: a path, or file://PATH.
        directory: from which the job is submitted.

    Raises:
        ConfigError: it begins with `~NAME`, and there is no such user.
    """
    try:
        return directory / Path(job_dir.removeprefix("file://")).expanduser()
    except RuntimeError:
        raise ConfigError(f"--job-dir {job_dir}: there is no such user here. Give a directory's path.") from None
