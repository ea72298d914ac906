"""The grid of ranks of a model-parallel training, and the ranks of a column of it as a `Group`.

torch makes a process group for each row and each column of a `DeviceMesh`. All ranks make them together. So a grid is made
once for each default process group, and later trainers and calls use it again: modules stay sharded over it.

A single process may have a grid of one rank, so that `configure_model` can be the same for any number of ranks. torch needs
a process group for that too, which connects to nobody.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from footplate.distributed.group import TIMEOUT, Group, leave
from footplate.distributed.world import World

# By device type, sizes and names; of the default process group for which they were made.
_meshes: dict[tuple[Any, ...], Any] = {}
# By the ranks of their columns.
_hosts: dict[tuple[tuple[int, ...], ...], Any] = {}
_default_group: Any = None


def device_mesh(device_type: str, sizes: tuple[int, int], names: tuple[str, str], backend: str) -> Any:
    """Return the grid of the ranks. All ranks call this, the first time.

    Args:
        device_type: of the ranks' devices.
        sizes: the length of each dimension.
        names: the name of each dimension.
        backend: of the collectives between devices, if this process is alone.
    """
    if not dist.is_initialized():
        backends = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend}"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backends, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        atexit.register(leave, dist.group.WORLD)
    forget_others()
    key = (device_type, sizes, names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return _meshes[key]


def column_of(group: Group, world: World, columns: Sequence[Sequence[int]], devices: Any) -> Group:
    """Return this rank's column as a `Group`. All ranks call this.

    Args:
        group: all ranks, which are several.
        world: rank and size of this process in its column.
        columns: the ranks of each column.
        devices: torch's process group of this column.
    """
    forget_others()
    key = tuple(map(tuple, columns))
    if key not in _hosts:
        made = [dist.new_group(list(ranks), backend="gloo", timeout=TIMEOUT, group_desc="hosts") for ranks in columns]
        _hosts[key] = next(made[index] for index, ranks in enumerate(columns) if group.world.rank in ranks)
    return Group(world, _hosts[key], devices)


def forget_others() -> None:
    """Forget what was made for a default process group that has ended."""
    global _default_group
    if _default_group is not dist.group.WORLD:
        _meshes.clear()
        _hosts.clear()
        _default_group = dist.group.WORLD
