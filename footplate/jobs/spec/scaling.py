"""The cluster of a job: the machines of a scale tier, or the roles of a CUSTOM tier."""

from __future__ import annotations

from dataclasses import dataclass

from footplate.catalog.rows import catalog
from footplate.catalog.validity import Choice
from footplate.jobs.spec.model import ReplicaConfig, TrainingInput
from footplate.jobs.spec.reading import camel

ROLES = ("master", "worker", "parameter_server", "evaluator")
"""The roles, in the order of a cluster's description. The master is the chief, and there is exactly one."""


@dataclass(frozen=True)
class Replica:
    """The machines of a role.

    Attributes:
        role: one of `ROLES`.
        count: the number of machines.
        machine: the type of each, with its built-in or attached accelerators.
        image_uri: the container image; None for the job's runtime.
        container_command: replaces the image's entry point.
        container_args: the arguments of the entry point.
    """

    role: str
    count: int
    machine: Choice
    image_uri: str | None = None
    container_command: tuple[str, ...] = ()
    container_args: tuple[str, ...] = ()


def key_of(role: str, suffix: str) -> str:
    """The key of a role, such as `parameterServerType` for `parameter_server` and `Type`.

    >>> key_of("parameter_server", "Type")
    'parameterServerType'
    """
    return camel(role) + suffix


def tier_of(spec: TrainingInput) -> str:
    """The scale tier that was given. Without one: CUSTOM if the spec names machines, otherwise BASIC."""
    if spec.scale_tier is not None:
        return spec.scale_tier
    named = any(machine_type(spec, role) or config(spec, role).accelerator_config for role in ROLES)
    return "CUSTOM" if named else "BASIC"


def machine_type(spec: TrainingInput, role: str) -> str | None:
    """The machine type of a role."""
    return getattr(spec, f"{role}_type")


def config(spec: TrainingInput, role: str) -> ReplicaConfig:
    """The settings of a role's machines, besides their type."""
    return getattr(spec, f"{role}_config") or ReplicaConfig()


def count(spec: TrainingInput, role: str) -> int:
    """The number of machines of a role."""
    return 1 if role == "master" else getattr(spec, f"{role}_count") or 0


def replicas(spec: TrainingInput) -> list[Replica]:
    """The roles of a checked spec, with their machines. A role whose machine a flag may still name is left out."""
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
    """The machine of a role in a CUSTOM spec, with its accelerators; None if the spec names none."""
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
