"""From a draft to a resolved job: every problem at once, or the job as it would be submitted.

1  pydantic says which values are of the wrong type; those are taken out, and the rest is looked at again
2  checking.py says what doesn't fit together in what is left; what is missing only because it was taken out is no
   problem of its own
3  with no problem left, the scale tier becomes machines, and the job's directory becomes an argument of the program
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from footplate.jobs.catalog.rows import catalog
from footplate.jobs.spec import checking
from footplate.jobs.spec.draft import Draft
from footplate.jobs.spec.mistakes import mistakes
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import Path, Problem, SpecError
from footplate.jobs.spec.scaling import Replica, replicas, tier_of
from footplate.jobs.spec.schema import ValidationError

DEFAULT_MAX_RUNNING_TIME = "604800s"  # seven days, as AI Platform had it


@dataclass(frozen=True)
class ResolvedJob:
    """A job as it would be submitted: nothing is left to be looked up.

    Attributes:
        name: its name; None for a file without one.
        scale_tier: as given, or as follows from what was given.
        replicas: the machines, master first.
        command: what runs on each of them, as a list of arguments, `--job-dir` included; empty for an image's own.
        spec: all keys of TrainingInput that were given, in the API's form.
        labels: name → value.
        notices: what is good to know.
    """

    name: str | None
    scale_tier: str
    region: str | None
    job_dir: str | None
    replicas: tuple[Replica, ...]
    command: tuple[str, ...]
    max_running_time: str
    spec: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The job as plain values, for YAML and JSON."""
        return {
            "jobId": self.name,
            "scaleTier": self.scale_tier,
            "region": self.region,
            "jobDir": self.job_dir,
            "replicas": [_replica(one) for one in self.replicas],
            "command": list(self.command),
            "maxRunningTime": self.max_running_time,
            "labels": dict(self.labels),
            "trainingInput": copy.deepcopy(self.spec),
            "notices": list(self.notices),
        }


def resolve(draft: Draft) -> ResolvedJob:
    """Check a draft, and resolve it.

    Raises:
        SpecError: with every problem.
    """
    job = checked(draft)
    spec = job.training_input
    return ResolvedJob(
        name=job.job_id,
        scale_tier=tier_of(spec),
        region=spec.region,
        job_dir=spec.job_dir,
        replicas=tuple(replicas(spec)),
        command=_command(job),
        max_running_time=(spec.scheduling and spec.scheduling.max_running_time) or DEFAULT_MAX_RUNNING_TIME,
        spec=spec.model_dump(by_alias=True, exclude_none=True),
        labels=dict(job.labels or {}),
        notices=tuple(checking.notices(job)),
    )


def checked(draft: Draft) -> Job:
    """The job that a draft is, with nothing wrong with it.

    Raises:
        SpecError: with every problem.
    """
    job, found = _checked(draft)
    if found:
        raise SpecError(found)
    return job


def problems(draft: Draft) -> list[Problem]:
    """Everything that is wrong with a draft; empty when it can be resolved."""
    return _checked(draft)[1]


def _checked(draft: Draft) -> tuple[Job, list[Problem]]:
    found = list(draft.document.problems) if draft.document else []
    values: Any = copy.deepcopy(draft.values)
    removed: list[Path] = []
    while True:
        try:
            job = Job.model_validate(values)
            break
        except ValidationError as error:
            now: list[Path] = []  # at least one each time, so this ends
            for path, text in mistakes(error):
                if not _within(path, removed):
                    found.append(draft.problem(path, text))
                if not _within(path, now):
                    now.append(_remove(values, path))
            removed += now
    for path, text in checking.problems(job, draft.partial):
        if not _within(path, removed) and not any(_within(gone, [path]) for gone in removed):
            found.append(draft.problem(path, text))
    return job, sorted(found, key=lambda one: _order(draft, one))


def _within(path: Path, homes: list[Path]) -> bool:
    """Whether a path is one of `homes`, or lies in one."""
    return any(path[: len(home)] == home for home in homes)


def _remove(values: dict[str, Any], path: Path) -> Path:
    """Take out what a path leads to, or the innermost mapping that is there when it lacks a key; returns what went.

    A list whose item is wrong goes whole: its other items would change places.
    """
    end = next((index for index, part in enumerate(path) if isinstance(part, int)), len(path))
    path = path[:end]
    while path:
        home: Any = values
        for part in path[:-1]:
            home = home.get(part) if isinstance(home, dict) else None
        if isinstance(home, dict) and path[-1] in home:
            del home[path[-1]]
            return path
        path = path[:-1]
    values.clear()
    return ()


def _order(draft: Draft, problem: Problem) -> tuple[int, int]:
    """Flags first, then the file from its top to its bottom, then what is nowhere."""
    if draft.document is None or problem.place.startswith("-"):
        return (0, 0)
    path = problem.path
    while path and path not in draft.document.lines:
        path = path[:-1]
    return (1, draft.document.lines[path]) if path else (2, 0)


def _command(job: Job) -> tuple[str, ...]:
    spec = job.training_input
    if spec.python_module is None:
        return ()
    job_dir = ("--job-dir", spec.job_dir) if spec.job_dir else ()
    return ("python", "-m", spec.python_module, *(spec.args or ()), *job_dir)


def _replica(one: Replica) -> dict[str, Any]:
    machine = catalog().machines[one.machine.machine]
    found = {
        "role": one.role,
        "count": one.count,
        "machineType": machine.name,
        "vcpus": machine.vcpus,
        "memoryGb": machine.memory_gb,
        "accelerator": {"type": one.machine.accelerator, "count": one.machine.count}
        if one.machine.accelerator
        else None,
        "imageUri": one.image_uri,
        "containerCommand": list(one.container_command),
        "containerArgs": list(one.container_args),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}
