"""Ranks and slots for the allocations of a cluster, as pure functions.

An allocation is what an engine reserves for one worker. A host group is a set of allocations whose workers may share
processes: on one machine, in one container.

Ranks are numbered host group by host group, so that local ranks, nodes and the order of the world agree, as with
torchrun. Host groups are in the order of their first allocation. A slot (a rank of the original world) gets its
allocation once for each group of agents. When a slot is given up, the other slots keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest


def sort_by_host_group(host_groups: Sequence[str]) -> list[int]:
    """Sort allocations, given the host group of each, so that those of one host group are together.

    >>> sort_by_host_group(["a", "b", "a"])
    [0, 2, 1]
    """
    return sorted(range(len(host_groups)), key=lambda allocation: host_groups.index(host_groups[allocation]))


def assign(slots: Sequence[int], host_groups: Sequence[str]) -> dict[int, int]:
    """Assign an allocation to each slot. There are as many slots as allocations.

    >>> assign([0, 1, 3], ["a", "b", "a"])
    {0: 0, 1: 2, 3: 1}
    """
    return dict(zip(slots, sort_by_host_group(host_groups), strict=True))


def ranks_by_host_group(allocations: Sequence[int], host_groups: Sequence[str]) -> list[tuple[int, ...]]:
    """List the ranks of each host group, in their order; `allocations` has the allocation of each rank.

    >>> ranks_by_host_group([0, 2, 1], ["a", "b", "a"])
    [(0, 1), (2,)]
    """
    grouped: dict[str, list[int]] = {}
    for rank, allocation in enumerate(allocations):
        grouped.setdefault(host_groups[allocation], []).append(rank)
    return [tuple(ranks) for ranks in grouped.values()]


def merged_devices(devices: Sequence[str | None]) -> str | None:
    """Merge the devices of a host group's allocations.

    The first device of each allocation comes first, because the local rank is an index into this list.

    >>> merged_devices(["0,1", "2,3"])
    '0,2,1,3'
    """
    lists = [[device for device in text.split(",") if device] for text in devices if text is not None]
    if not lists:
        return None
    rounds = zip_longest(*lists)
    return ",".join(dict.fromkeys(device for several in rounds for device in several if device is not None))


def device_environment(devices: Sequence[str | None], name: str) -> Mapping[str, str]:
    """The variable `name` for the workers of a host group with these devices; empty if no allocation has any."""
    merged = merged_devices(devices)
    return {} if merged is None else {name: merged}
