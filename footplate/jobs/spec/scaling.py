"""What a job's cluster is: the machines of a scale tier, or the roles of a CUSTOM one."""

from __future__ import annotations

from dataclasses import dataclass

from footplate.jobs.catalog.rows import catalog
from footplate.jobs.catalog.validity import Choice
from footplate.jobs.spec.model import ReplicaConfig, TrainingInput
from footplate.jobs.spec.reading import camel

ROLES = ("master", "worker", "parameter_server", "evaluator")
"""In the order in which a cluster is described. The master is the chief, and there is one."""


@dataclass(frozen=True)
class Replica:
    """The machines of one role.

    Attributes:
        role: one of `ROLES`.
        count: how many machines.
        machine: each one's type with its accelerators, built in or attached.
        image_uri: the container image; None for the runtime of the job.
        container_command: replaces the image's entry point.
        container_args: the arguments of that.
    """

    role: str
    count: int
    machine: Choice
    image_uri: str | None = None
    container_command: tuple[str, ...] = ()
    container_args: tuple[str, ...] = ()


def key_of(role: str, what: str) -> str:
    """The key of a role: `parameterServerType` for `parameter_server` and `Type`.

    >>> key_of("parameter_server", "Type")
    'parameterServerType'
    """
    return camel(role) + what


def tier_of(spec: TrainingInput) -> str:
    """The scale tier: as given; else CUSTOM where machines are named, and BASIC where nothing is."""
    if spec.scale_tier is not None:
        return spec.scale_tier
    named = any(machine_type(spec, role) or config(spec, role).accelerator_config for role in ROLES)
    return "CUSTOM" if named else "BASIC"


def machine_type(spec: TrainingInput, role: str) -> str | None:
    """The machine type that a spec names for a role."""
    return getattr(spec, f"{role}_type")


def config(spec: TrainingInput, role: str) -> ReplicaConfig:
    """What a spec says of a role's machines beside their type."""
    return getattr(spec, f"{role}_config") or ReplicaConfig()


def count(spec: TrainingInput, role: str) -> int:
    """How many machines a spec wants in a role."""
    return 1 if role == "master" else getattr(spec, f"{role}_count") or 0


def replicas(spec: TrainingInput) -> list[Replica]:
    """The roles of a spec that has been checked, with their machines; without those whose machines flags may still name."""
    tier = tier_of(spec)
    if tier != "CUSTOM":
        return [
            _replica(spec, row.role, row.count, Choice(row.machine_type, row.accelerator, row.accelerator_count))
            for row in catalog().tiers[tier]
        ]
    return [
        _replica(spec, role, count(spec, role), machine)
        for role in ROLES
        if count(spec, role) and (machine := choice(spec, role)) is not None
    ]


def choice(spec: TrainingInput, role: str) -> Choice | None:
    """The machine of a role with its accelerators, as a CUSTOM spec names it; None when it names none."""
    name = machine_type(spec, role)
    if name is None:
        return None
    machine, wanted = catalog().machines[name], config(spec, role).accelerator_config
    if machine.accelerator is not None:
        return Choice(name, machine.accelerator, machine.accelerator_count)
    if name == "cloud_tpu" and wanted is None:
        return Choice(name, "TPU_V2", 8)
    return Choice(name, wanted.type, wanted.count) if wanted else Choice(name)


def _replica(spec: TrainingInput, role: str, how_many: int, machine: Choice) -> Replica:
    own = config(spec, role)
    return Replica(
        role, how_many, machine,
        image_uri=own.image_uri or config(spec, "master").image_uri,
        container_command=tuple(own.container_command or ()),
        container_args=tuple(own.container_args or ()),
    )  # fmt: skip
