"""The resources of this machine for jobs, the resources that a job needs, and the devices of each process.

`FOOTPLATE_CPUS` and `FOOTPLATE_MEMORY` limit the cores and the GB of memory for jobs. By default jobs may use the whole
machine.
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


# The needs of a job whose spec names no machine.
BASIC = Resources(cpus=1, memory_gb=2)


def host() -> str:
    """The name of this machine. In a shared store, it tells whose jobs are whose."""
    return os.uname().nodename


def resources() -> Resources:
    """The resources that jobs may use.

    Raises:
        ConfigError: `FOOTPLATE_CPUS` or `FOOTPLATE_MEMORY` isn't a number.
    """
    cpus = _setting("FOOTPLATE_CPUS", "the number of cores for jobs, such as 4")
    memory_gb = _setting("FOOTPLATE_MEMORY", "the GB of memory for jobs, such as 64")
    if memory_gb is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_gb = round(min(memory, cgroup_limits().memory_bytes or memory) / 2**30, 1)
    return Resources(usable_cores() if cpus is None else cpus, _gpus(), memory_gb)


def needs(resolved: ResolvedJob) -> Resources:
    """The resources of a spec's machines, together. A spec that names no machine (scale tier BASIC) counts as small."""
    from footplate.catalog.rows import catalog

    if resolved.scale_tier == "BASIC":
        return BASIC
    total = Resources()
    for replica in resolved.replicas:
        machine = catalog().machines[replica.machine.machine]
        for _ in range(replica.count):
            total = total + Resources(machine.vcpus or 0, replica.machine.count or 0, machine.memory_gb or 0)
    return total


def shortages(wanted: Resources, machine: Resources) -> list[str]:
    """Explain what a spec asks for beyond this machine; empty if it fits."""
    pairs = [
        (wanted.cpus, machine.cpus, "vCPU"),
        (wanted.gpus, machine.gpus, "accelerators"),
        (wanted.memory_gb, machine.memory_gb, "GB of memory"),
    ]
    short = [f"{wanted:g} {unit} (this machine has {has:g})" for wanted, has, unit in pairs if wanted > has]
    if not short:
        return []
    return [f"The spec asks for {', '.join(short)}. The job uses all that this machine has, when that is free."]


def choose_devices(count: int, taken: Iterable[int], machine: Resources) -> tuple[int, ...]:
    """The numbers of `count` free accelerators, or of all free ones if there are fewer."""
    used = set(taken)
    return tuple(device for device in range(machine.gpus) if device not in used)[:count]


def share_devices(devices: Sequence[int], roles: Sequence[Role]) -> Iterator[tuple[int, ...]]:
    """Share a job's accelerators among its processes, in the order of the roles.

    Each process gets as many as its machine would have, as long as there are any. The remaining processes each share one
    accelerator with other processes, in turn.

    >>> list(share_devices([4, 5, 6], [Role("master", 1, 2), Role("worker", 2, 2), Role("parameter_server", 1)]))
    [(4, 5), (6,), (4,), ()]
    """
    left, turn = list(devices), 0
    for role in roles:
        for _ in range(role.count):
            own, left = tuple(left[: role.gpus]), left[role.gpus :]
            if role.gpus and not own and devices:
                own, turn = (devices[turn % len(devices)],), turn + 1
            yield own


def _setting(name: str, expected: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f'{name}="{text}": expected {expected}.')
    return number


def _gpus() -> int:
    try:
        return len(find_driver().gpus)
    except NvmlError:
        return 0
