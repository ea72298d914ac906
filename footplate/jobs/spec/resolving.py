"""Resolve a draft: return the job as it would be submitted, or raise all of its problems at once.

1  reading.py finds values of a wrong type, and leaves them out
2  checking.py finds values that don't fit together; a value that reading.py has left out doesn't count as missing
3  without a problem, the scale tier becomes machines, and the job's directory becomes an argument of the program
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from footplate.catalog.rows import catalog
from footplate.catalog.validity import Choice
from footplate.core.errors import did_you_mean
from footplate.jobs.spec import checking
from footplate.jobs.spec.draft import Draft
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import Path, Problem, SpecError
from footplate.jobs.spec.reading import Reading, keys, mapping_in, plain
from footplate.jobs.spec.scaling import Replica, replicas, tier_of

# Seven days, as on AI Platform.
DEFAULT_MAX_RUNNING_TIME = "604800s"


@dataclass(frozen=True)
class ResolvedJob:
    """A job as it would be submitted, with nothing left to look up.

    Attributes:
        name: its name; None if the file has none.
        scale_tier: the given one, or the one that follows from the machines.
        replicas: the machines, master first.
        command: the command on each machine, with `--job-dir`; empty if the image has its own.
        spec: all keys of TrainingInput that were given, in the API's form.
        labels: name → value.
        notices: facts that the user should know.
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
        """Return the job as plain values, for YAML and JSON."""
        return {
            "jobId": self.name,
            "scaleTier": self.scale_tier,
            "region": self.region,
            "jobDir": self.job_dir,
            "replicas": [_replica(replica) for replica in self.replicas],
            "command": list(self.command),
            "maxRunningTime": self.max_running_time,
            "labels": dict(self.labels),
            "trainingInput": copy.deepcopy(self.spec),
            "notices": list(self.notices),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ResolvedJob:
        """Undo `to_dict`."""
        return cls(
            name=values["jobId"],
            scale_tier=values["scaleTier"],
            region=values["region"],
            job_dir=values["jobDir"],
            replicas=tuple(_to_replica(replica) for replica in values["replicas"]),
            command=tuple(values["command"]),
            max_running_time=values["maxRunningTime"],
            spec=copy.deepcopy(values["trainingInput"]),
            labels=dict(values["labels"]),
            notices=tuple(values["notices"]),
        )


def resolve(draft: Draft) -> ResolvedJob:
    """Check a draft, and resolve it. Even a partial draft must name all of its machines.

    Raises:
        SpecError: the draft has problems. The error lists all of them.
    """
    job, faults = _checked(draft, machines_may_follow=False)
    if faults:
        raise SpecError(faults)
    spec = job.training_input
    return ResolvedJob(
        name=job.job_id,
        scale_tier=tier_of(spec),
        region=spec.region,
        job_dir=spec.job_dir,
        replicas=tuple(replicas(spec)),
        command=_command(job),
        max_running_time=(spec.scheduling and spec.scheduling.max_running_time) or DEFAULT_MAX_RUNNING_TIME,
        spec=plain(spec),
        labels=dict(job.labels or {}),
        notices=tuple(checking.notices(job)),
    )


def checked(draft: Draft) -> Job:
    """Check a draft, and return it as a job. A partial draft may lack keys that flags can give.

    Raises:
        SpecError: the draft has problems. The error lists all of them.
    """
    job, faults = _checked(draft, draft.partial)
    if faults:
        raise SpecError(faults)
    return job


def problems(draft: Draft) -> list[Problem]:
    """Return all problems of a draft; empty if it can be resolved, or, if it is partial, completed by flags."""
    return _checked(draft, draft.partial)[1]


def _checked(draft: Draft, machines_may_follow: bool) -> tuple[Job, list[Problem]]:
    faults = list(draft.document.problems) if draft.document else []
    reading = Reading(unknown)
    job = reading.read(Job, draft.values)
    faults += [draft.problem(path, text) for path, text in reading.mistakes]
    for path, text in checking.problems(job, draft.partial, machines_may_follow):
        if not any(_leads_to(path, gone) or _leads_to(gone, path) for gone in reading.left_out):
            faults.append(draft.problem(path, text))
    return job, sorted(faults, key=lambda problem: _order(draft, problem))


def keys_of(path: Iterable[str | int]) -> list[str]:
    """The keys of the mapping at a path; empty if there is no mapping."""
    kind: type[Any] | None = Job
    for part in path:
        if isinstance(part, str):
            known = keys(kind) if kind else {}
            kind = mapping_in(known[part].hint) if part in known else None
    return list(keys(kind)) if kind else []


def unknown(path: Path) -> str:
    """The message for the unknown key at a path."""
    key, home = str(path[-1]), path[:-1]
    other = {("trainingInput",): (), (): ("trainingInput",)}.get(home)
    if other is not None and key in keys_of(other):
        return f"belongs {'under ' + other[0] if other else 'at the top, beside trainingInput'}, not here."
    hint = did_you_mean(key[:60], keys_of(home))
    return f"there is no such key. {hint.partition('? ')[0]}?" if "? " in hint else f"there is no such key. {hint}"


def _leads_to(path: Path, other: Path) -> bool:
    """Return True if `path` is a prefix of `other`, or equal to it."""
    return other[: len(path)] == path


def _order(draft: Draft, problem: Problem) -> tuple[int, int]:
    """Flags first, then the file from top to bottom, then problems without a place."""
    if draft.document is None or problem.place in draft.origins.values():
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


def _replica(replica: Replica) -> dict[str, Any]:
    machine = catalog().machines[replica.machine.machine]
    values = {
        "role": replica.role,
        "count": replica.count,
        "machineType": machine.name,
        "vcpus": machine.vcpus,
        "memoryGb": machine.memory_gb,
        "accelerator": {"type": replica.machine.accelerator, "count": replica.machine.count}
        if replica.machine.accelerator
        else None,
        "imageUri": replica.image_uri,
        "containerCommand": list(replica.container_command),
        "containerArgs": list(replica.container_args),
    }
    return {key: value for key, value in values.items() if value not in (None, [])}


def _to_replica(values: dict[str, Any]) -> Replica:
    attached = values.get("accelerator")
    return Replica(
        role=values["role"],
        count=values["count"],
        machine=Choice(values["machineType"], *((attached["type"], attached["count"]) if attached else ())),
        image_uri=values.get("imageUri"),
        container_command=tuple(values.get("containerCommand", ())),
        container_args=tuple(values.get("containerArgs", ())),
    )
