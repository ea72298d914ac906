"""What this machine has for jobs, what a job needs of it, and which devices each process gets.

`FOOTPLATE_CPUS` and `FOOTPLATE_MEMORY` set how many cores and how many GB of memory jobs may take. By default they may take
all that the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError
from footplate.hardware.machine import cgroup_limits, usable_cores
from footplate.hardware.nvml import NvmlError, find_driver
from footplate.jobs.execution import Role
from footplate.jobs.scheduling import Resources

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob


BASIC = Resources(cpus=1, memory_gb=2)  # what a job is charged for whose spec names no machine


def host() -> str:
    """The name of this machine, by which a shared store knows whose jobs are whose."""
    return os.uname().nodename


def resources() -> Resources:
    """What jobs may take.

    Raises:
        ConfigError: `FOOTPLATE_CPUS` or `FOOTPLATE_MEMORY` is no number.
    """
    cpus = _setting("FOOTPLATE_CPUS", "how many cores jobs may take, such as 4")
    memory_gb = _setting("FOOTPLATE_MEMORY", "how many GB of memory jobs may take, such as 64")
    if memory_gb is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_gb = round(min(memory, cgroup_limits().memory_bytes or memory) / 2**30, 1)
    return Resources(usable_cores() if cpus is None else cpus, _gpus(), memory_gb)


def needs(resolved: ResolvedJob) -> Resources:
    """What the machines of a spec have, together. A spec that names none (scale tier BASIC) is charged for little."""
    from footplate.jobs.catalog.rows import catalog

    if resolved.scale_tier == "BASIC":
        return BASIC
    total = Resources()
    for one in resolved.replicas:
        machine = catalog().machines[one.machine.machine]
        for _ in range(one.count):
            total = total + Resources(machine.vcpus or 0, one.machine.count or 0, machine.memory_gb or 0)
    return total


def shortages(wanted: Resources, machine: Resources) -> list[str]:
    """What a spec declares beyond this machine, in a sentence; nothing when it fits."""
    pairs = [
        (wanted.cpus, machine.cpus, "vCPU"),
        (wanted.gpus, machine.gpus, "accelerators"),
        (wanted.memory_gb, machine.memory_gb, "GB of memory"),
    ]
    short = [f"{asked:g} {what} (here: {there:g})" for asked, there, what in pairs if asked > there]
    if not short:
        return []
    return [f"The spec asks for {', '.join(short)}. The job runs with what there is here, when all of it is free."]


def choose_devices(count: int, taken: Iterable[int], machine: Resources) -> tuple[int, ...]:
    """The numbers of so many accelerators that nobody has, or of all that are left."""
    used = set(taken)
    return tuple(one for one in range(machine.gpus) if one not in used)[:count]


def share_devices(devices: Sequence[int], roles: Sequence[Role]) -> Iterator[tuple[int, ...]]:
    """A job's accelerators, dealt out to its processes in the order of its roles.

    Each gets as many as its machine was to have, as long as there are any; processes for which none is left share them all
    with others, one each, in turn.

    >>> list(share_devices([4, 5, 6], [Role("master", 1, 2), Role("worker", 2, 2), Role("parameter_server", 1)]))
    [(4, 5), (6,), (4,), ()]
    """
    left, turn = list(devices), 0
    for role in roles:
        for _ in range(role.count):
            mine, left = tuple(left[: role.gpus]), left[role.gpus :]
            if role.gpus and not mine and devices:
                mine, turn = (devices[turn % len(devices)],), turn + 1
            yield mine


def _setting(name: str, expected: str) -> float | None:
    given = os.environ.get(name)
    if not given:
        return None
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f'{name}="{given}": expected {expected}.')
    return number


def _gpus() -> int:
    try:
        return len(find_driver().gpus)
    except NvmlError:
        return 0
