"""What all translations share: the form of their outcome, of their refusal, and how a machine is called elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from footplate.core.errors import ConfigError
from footplate.jobs.catalog.rows import Accelerator, catalog
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import Replica

WORLD = ("master", "worker")
UNNAMED = "footplate-job"


@dataclass(frozen=True)
class Translation:
    """A job in another system's words.

    Attributes:
        document: what that system takes: plain values for JSON or YAML, or the text of a script.
        form: the form in which it is usually given.
        notes: what it leaves out, and what is still to be done; each a sentence.
    """

    document: dict[str, Any] | str
    form: Literal["json", "yaml", "script"]
    notes: tuple[str, ...] = ()


class Untranslatable(ConfigError):
    """A job that another system can't run as it is.

    Attributes:
        problems: why, each a sentence.
    """

    def __init__(self, system: str, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{system} can't run this job as it is: {count}:", *self.problems]))


def refuse_if(system: str, problems: Iterable[str]) -> None:
    """Raise if there are problems.

    Raises:
        Untranslatable: with all of them.
    """
    found = list(problems)
    if found:
        raise Untranslatable(system, found)


def machine_type(replica: Replica) -> str:
    """The name that a machine has at Compute Engine; legacy types were AI Platform's alone."""
    row = catalog().machines[replica.machine.machine]
    return row.compute_engine or row.name


def accelerator(replica: Replica) -> Accelerator | None:
    """The row of what each of a role's machines has."""
    name = replica.machine.accelerator
    return catalog().accelerators[name] if name else None


def gpus(replica: Replica) -> int:
    """How many GPUs each of a role's machines has."""
    row = accelerator(replica)
    return replica.machine.count if row and row.kind == "gpu" else 0


def command(job: ResolvedJob, replica: Replica) -> list[str]:
    """What runs on a machine of a role; empty for an image's own program."""
    if replica.container_command or replica.container_args:
        return [*replica.container_command, *replica.container_args]
    return list(job.command)


def no_tpus(job: ResolvedJob) -> Iterator[str]:
    """A problem, for systems that must be told more of a TPU than a spec says."""
    for one in job.replicas:
        row = accelerator(one)
        if row and row.kind == "tpu":
            yield f"The {spoken(one.role)} has {row.short}: their topology must be said, and a job's spec doesn't say it."


def no_tuning(job: ResolvedJob) -> Iterator[str]:
    """A problem, for systems that are given one training at a time."""
    if "hyperparameters" in job.spec:
        yield "hyperparameters: tuning is not translated. Leave that key out to translate one training."


def needs_program(job: ResolvedJob) -> Iterator[str]:
    """A problem, where neither a module nor an image is named."""
    for one in job.replicas:
        if not command(job, one) and not one.image_uri:
            yield f"The {spoken(one.role)} has no program: give --module-name, or an image with --master-image-uri."
            return


def no_entry_points(job: ResolvedJob) -> Iterator[str]:
    """A problem, for systems that run a command in an image, and not the image's own entry point."""
    one = job.replicas[0]
    if one.image_uri and not one.container_command and (one.container_args or not job.command):
        yield "It has to be told what to run in an image: give --module-name, or containerCommand."


def one_kind_of_machine(job: ResolvedJob) -> Iterator[str]:
    """A problem, for systems in which all machines of a job are alike: those of master and workers differ."""
    world = [one for one in job.replicas if one.role in WORLD]
    kinds = {str(one.machine): one for one in world}
    images = {one.image_uri for one in world}
    commands = {tuple(command(job, one)) for one in world}
    if len(kinds) > 1:
        listed = ", ".join(f"the {spoken(one.role)}'s {kind}" for kind, one in kinds.items())
        yield f"Its machines must be of one kind, and they are not: {listed}."
    if len(images) > 1 or len(commands) > 1:
        yield "All of its machines must run one image and one command: leave out workerConfig's own."


def no_servers(job: ResolvedJob, instead: str) -> Iterator[str]:
    """A problem, for systems that know ranks and nothing else."""
    roles = [spoken(one.role) for one in job.replicas if one.role not in WORLD]
    if roles:
        yield f"It has no {' and no '.join(roles)} as a role of its own: {instead}"


def left_out(job: ResolvedJob, system: str, **keys: str) -> Iterator[str]:
    """Notes about keys of the spec that a system has no word for: the key in Python's spelling, and what it means there."""
    for key, meaning in keys.items():
        path = [re.sub("_([a-z])", lambda found: found[1].upper(), part) for part in key.split("__")]
        home: Any = job.spec
        for part in path:
            home = home.get(part) if isinstance(home, dict) else None
        if home is not None:
            yield f"{'.'.join(path)} is left out: {system} {meaning}."


def spoken(role: str) -> str:
    """`parameter_server` as people say it."""
    return role.replace("_", " ")
