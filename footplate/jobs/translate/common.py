"""The parts that all translations share: the result, the error, and the names of machines and accelerators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from footplate.catalog.rows import Accelerator, catalog
from footplate.core.errors import ConfigError
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import Replica

WORLD = ("master", "worker")
UNNAMED = "footplate-job"


@dataclass(frozen=True)
class Translation:
    """A translated job.

    Attributes:
        document: the system's input: plain values for JSON or YAML, or the text of a script.
        form: its usual form.
        notes: what the translation leaves out, and what the user still has to do; one sentence each.
    """

    document: dict[str, Any] | str
    form: Literal["json", "yaml", "script"]
    notes: tuple[str, ...] = ()


class Untranslatable(ConfigError):
    """Another system can't run the job as it is.

    Attributes:
        problems: the reasons, one sentence each.
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
    problems = list(problems)
    if problems:
        raise Untranslatable(system, problems)


def refuse_without_package(job: ResolvedJob, system: str) -> None:
    """Raise if a system whose nodes run a job's Python package can't run this job.

    Raises:
        ConfigError: the job has no name.
        Untranslatable: it has no module, or has TPUs.
    """
    if job.name is None:
        raise ConfigError("a job needs a name.")
    problems = list(no_tpus(job))
    if not job.command:
        problems.append(
            f"It has no module, and on {system}'s nodes jobs run as Python packages: give --package-path and --module-name."
        )
    refuse_if(system, problems)


def without_image(job: ResolvedJob, system: str) -> Iterator[str]:
    """The notice of a system that runs the package and not the spec's container image."""
    if any(replica.image_uri for replica in job.replicas):
        yield f"On {system}'s nodes the package runs as it is, without the container image that the spec names."


def machine_type(replica: Replica) -> str:
    """The Compute Engine name of a machine. Only AI Platform used the legacy types."""
    row = catalog().machines[replica.machine.machine]
    return row.compute_engine or row.name


def accelerator(replica: Replica) -> Accelerator | None:
    """The catalog's row of the accelerators of a role's machines."""
    name = replica.machine.accelerator
    return catalog().accelerators[name] if name else None


def gpus(replica: Replica) -> int:
    """The number of GPUs of each of a role's machines."""
    row = accelerator(replica)
    return replica.machine.count if row and row.kind == "gpu" else 0


def command(job: ResolvedJob, replica: Replica) -> list[str]:
    """The command on a role's machines; empty for an image's own program."""
    if replica.container_command or replica.container_args:
        return [*replica.container_command, *replica.container_args]
    return list(job.command)


def no_tpus(job: ResolvedJob) -> Iterator[str]:
    """The problem of a system that needs the topology of TPUs, which a spec doesn't have."""
    for replica in job.replicas:
        row = accelerator(replica)
        if row and row.kind == "tpu":
            yield f"The {spoken(replica.role)} has {row.short}: expected their topology, which a job's spec doesn't have."


def no_tuning(job: ResolvedJob) -> Iterator[str]:
    """The problem of a system that runs one training at a time."""
    if "hyperparameters" in job.spec:
        yield "hyperparameters: tuning is not translated. Leave that key out to translate one training."


def needs_program(job: ResolvedJob) -> Iterator[str]:
    """The problem of a job that names neither a module nor an image."""
    for replica in job.replicas:
        if not command(job, replica) and not replica.image_uri:
            yield f"The {spoken(replica.role)} has no program: give --module-name, or an image with --master-image-uri."
            return


def no_entry_points(job: ResolvedJob) -> Iterator[str]:
    """The problem of a system that needs a command, since it doesn't run an image's own entry point."""
    replica = job.replicas[0]
    if replica.image_uri and not replica.container_command and (replica.container_args or not job.command):
        yield "It needs a command to run in the image: give --module-name, or containerCommand."


def one_kind_of_machine(job: ResolvedJob) -> Iterator[str]:
    """The problem of a system in which all machines of a job are equal, if those of master and workers differ."""
    world = [replica for replica in job.replicas if replica.role in WORLD]
    kinds = {str(replica.machine): replica for replica in world}
    images = {replica.image_uri for replica in world}
    commands = {tuple(command(job, replica)) for replica in world}
    if len(kinds) > 1:
        listed = ", ".join(f"the {spoken(replica.role)}'s {kind}" for kind, replica in kinds.items())
        yield f"Expected machines of one kind: {listed}."
    if len(images) > 1 or len(commands) > 1:
        yield "Expected one image and one command for all machines: leave out workerConfig's own."


def no_servers(job: ResolvedJob, instead: str) -> Iterator[str]:
    """The problem of a system that has ranks only."""
    roles = [spoken(replica.role) for replica in job.replicas if replica.role not in WORLD]
    if roles:
        yield f"It has no {' and no '.join(roles)} as a separate role: {instead}"


def left_out(job: ResolvedJob, system: str, **keys: str) -> Iterator[str]:
    """Notes about keys that a system lacks, by the key in Python's spelling: the words say what the system does instead."""
    for key, meaning in keys.items():
        path = [re.sub("_([a-z])", lambda match: match[1].upper(), part) for part in key.split("__")]
        home: Any = job.spec
        for part in path:
            home = home.get(part) if isinstance(home, dict) else None
        if home is not None:
            yield f"{'.'.join(path)} is left out: {system} {meaning}."


def spoken(role: str) -> str:
    """The name of a role in messages, such as `parameter server`."""
    return role.replace("_", " ")
