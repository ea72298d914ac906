"""Check if a machine type takes a number of accelerators. If it doesn't, explain why, and find the nearest choices.

There are three kinds of machine types:

    n1-…                        accelerators are attached; a table of Google's guide has the valid counts
    a2-…, g2-…, ct5lp-…, …      a fixed number of one kind is built in, and nothing else fits
    standard_gpu, …             the same, and AI Platform takes no count for them: the type alone determines it

The guide's table follows from a limit: each number of accelerators allows a maximum of vCPUs and of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from footplate.catalog.lookup import all_of, any_of
from footplate.catalog.rows import Accelerator, Machine, catalog

NEAREST = 3


@dataclass(frozen=True)
class Choice:
    """A machine type with its accelerators, attached or built in.

    Examples:
        >>> from footplate.catalog import Choice
        >>> print(Choice("n1-standard-8", "NVIDIA_TESLA_T4", 2))
        n1-standard-8 with 2 T4
    """

    machine: str
    accelerator: str | None = None
    count: int = 0

    def __str__(self) -> str:
        if not self.accelerator:
            return self.machine
        return f"{self.machine} with {self.count} {catalog().accelerators[self.accelerator].short}"


@dataclass(frozen=True)
class Validity:
    """The result of a check.

    Attributes:
        problem: why the choice is invalid, in one or two sentences; None if it is valid.
        nearest: similar valid choices; empty if it is valid.

    Examples:
        >>> from footplate.catalog import check, find_accelerator, find_machine
        >>> validity = check(find_machine("n1-standard-8"), find_accelerator("V100"), 3)
        >>> print(validity.problem)
        n1-standard-8 can't take 3 V100: allowed counts are 1, 2, 4 and 8.
        >>> print(validity.nearest[0])
        n1-standard-8 with 4 V100
    """

    problem: str | None = None
    nearest: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        if self.problem is None:
            return "valid"
        return f"{self.problem} Nearest: {any_of(self.nearest)}." if self.nearest else self.problem


def check(machine: Machine, accelerator: Accelerator | None = None, count: int = 0) -> Validity:
    """Check if `machine` takes `count` of `accelerator`.

    Args:
        machine: the machine type.
        accelerator: the accelerator to attach; None for none.
        count: the number for each machine.

    Examples:
        >>> from footplate.catalog import check, find_accelerator, find_machine
        >>> print(check(find_machine("n1-standard-8"), find_accelerator("V100"), 2))
        valid
    """
    if accelerator is None:
        return Validity()
    if machine.accelerator is not None:
        return _check_built_in(machine, accelerator, count)
    counts = catalog().counts.get((machine.name, accelerator.name))
    if counts is None:
        return _check_unlisted(machine, accelerator, count)
    if count in counts:
        return Validity()
    return Validity(_refusal(machine, accelerator, count, counts), nearest(machine, accelerator, count))


def valid_choices(accelerator: Accelerator) -> list[Choice]:
    """All machine types that take this accelerator or have it built in, with each count. Legacy types are left out.

    Examples:
        >>> from footplate.catalog import find_accelerator, valid_choices
        >>> print(valid_choices(find_accelerator("H100"))[0])
        a3-highgpu-1g with 1 H100
    """
    attached = [
        Choice(machine, name, count)
        for (machine, name), counts in catalog().counts.items()
        if name == accelerator.name
        for count in counts
    ]
    built_in = [
        Choice(row.name, accelerator.name, row.accelerator_count)
        for row in catalog().machines.values()
        if row.accelerator == accelerator.name and not row.legacy
    ]
    return attached + built_in


def nearest(machine: Machine, accelerator: Accelerator, count: int) -> tuple[Choice, ...]:
    """Similar valid choices: at most two on the same machine, then similar machines, with the same count if possible."""
    choices = sorted(valid_choices(accelerator), key=lambda choice: _distance(choice, machine, count))
    same = [choice for choice in choices if choice.machine == machine.name][:2]
    others = [choice for choice in choices if choice.machine != machine.name]
    same_count = [choice for choice in others if choice.count == count]
    return tuple([*same, *(same_count or others)][:NEAREST])


def _distance(choice: Choice, machine: Machine, count: int) -> tuple[float, ...]:
    """The distance of a choice from the requested one: by count (fewer is further), size, and memory per vCPU."""
    other = catalog().machines[choice.machine]
    vcpus, memory_gb = machine.vcpus or 1, machine.memory_gb or 1
    size = abs((other.vcpus or 1) - vcpus) / vcpus
    shape = abs((other.memory_gb or 1) / (other.vcpus or 1) - memory_gb / vcpus)
    return (abs(choice.count - count) / max(count, 1) + size, choice.count < count, shape)


def _check_built_in(machine: Machine, accelerator: Accelerator, count: int) -> Validity:
    own = catalog().accelerators[machine.accelerator or ""]
    has = f"{machine.name} has {machine.accelerator_count} {own.short} built in"
    if machine.legacy:
        return Validity(
            f"{has}, and takes no acceleratorConfig: leave that out, or name a Compute Engine machine type."
        )
    if (accelerator.name, count) == (own.name, machine.accelerator_count):
        return Validity()
    return Validity(f"{has}, and can't take {count} {accelerator.short}.", nearest(machine, accelerator, count))


def _check_unlisted(machine: Machine, accelerator: Accelerator, count: int) -> Validity:
    takes = [name for name, _ in _takes(machine)]
    if not takes:
        problem = f"{machine.name} takes no accelerators."
    else:
        names = all_of(catalog().accelerators[name].short for name in takes)
        problem = f"{machine.name} can't take {accelerator.short}; it takes {names}."
    return Validity(problem, nearest(machine, accelerator, count))


def _takes(machine: Machine) -> list[tuple[str, tuple[int, ...]]]:
    """The accelerators that can be attached to a machine type, with their valid counts."""
    return [(name, counts) for (of, name), counts in catalog().counts.items() if of == machine.name and counts]


def _refusal(machine: Machine, accelerator: Accelerator, count: int, counts: tuple[int, ...]) -> str:
    limits = {limit.count: limit for limit in catalog().limits.values() if limit.accelerator == accelerator.name}
    size = f"{machine.vcpus} vCPU and {machine.memory_gb or 0:g} GB"
    if not counts:
        most = limits[max(limits)]
        return (
            f"{machine.name} can't take any {accelerator.short}: it has {size}, and even {most.count} of them come with "
            f"at most {most.max_vcpus} vCPU and {most.max_memory_gb} GB."
        )
    allowed = f"the only allowed count is {counts[0]}" if len(counts) == 1 else f"allowed counts are {all_of(counts)}"
    refused = f"{machine.name} can't take {count} {accelerator.short}: {allowed}"
    limit = limits.get(count)
    if limit is None:
        return f"{refused}."
    each = limits[min(limits)]
    return (
        f"{refused} (each {accelerator.short} allows at most {each.max_vcpus} vCPU and {each.max_memory_gb} GB, and "
        f"{machine.name} has {size})."
    )
