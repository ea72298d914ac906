"""Distribution of a batch and of the state over devices.

    rows 0 1 2 3 4 5 6 7 on 4 devices      0 1 │ 2 3 │ 4 5 │ 6 7

Every tensor of a batch is cut along its first dimension, the rows. A tensor of no dimension goes to all devices. If the
devices don't divide the number of rows (in the last batch of an epoch, for example), the batch is cut into as many
parts as the greatest common divisor of both numbers, and each part goes to several devices:

    rows 0 1 2 3 4 5 on 4 devices          0 1 2 │ 0 1 2 │ 3 4 5 │ 3 4 5

Each row then counts as often as any other, so the mean over the devices is the mean over the rows. No rows of padding
are needed, which a loss would have to leave out. The price is time: some rows are computed more than once.

The state is whole on every device. If it is sharded, each tensor of some size is cut along the longest dimension
that the devices divide.

With several processes, each brings its own rows, and holds the parts on its own devices. `batch_exchange.py` handles
rows that the processes don't divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from footplate.core.errors import DataError
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.step.xla.lowering.arrays import host_array
from footplate.step.xla.lowering.data_parallel import AXIS

WHOLE = PartitionSpec()
ROWS = PartitionSpec(AXIS)
ROWS_OF_EACH = PartitionSpec(None, AXIS)


def spec_of(parts: int, rows: PartitionSpec) -> PartitionSpec:
    """The layout of a batch in some parts: cut; or, for 0 parts, whole on each device."""
    return rows if parts else WHOLE


@dataclass(frozen=True)
class Flat:
    """A batch as its tensors and their tree. `left_out` has the keys of entries that are no tensors."""

    leaves: list[Tensor]
    tree: Any
    left_out: list[str]

    def alike(self, other: Flat) -> bool:
        """Return True if the other batch has the same form."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.tree == other.tree and all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def flat(batch: Any, convert: Callable[[Any], Any]) -> Flat:
    """A batch, converted to the types of the step.

    Raises:
        DataError: it holds something other than tensors, outside of dictionaries.
    """
    tensors, left_out = without_text(batch)
    leaves, tree = pytree.tree_flatten(convert(tensors))
    other = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
    if other is not None:
        raise DataError(
            f"a batch holds {other!r:.60}: a compiled step takes only tensors. Under a key of a dict it would be "
            "left out. Leave it out, or make it a tensor."
        )
    return Flat(leaves, tree, left_out)


def without_text(batch: Any) -> tuple[Any, list[str]]:
    """A batch without the entries of dictionaries that are no tensors (names, for example), and their keys."""
    if type(batch) is not dict:
        return batch, []
    kept: dict[Any, Any] = {}
    left_out: list[str] = []
    for key, value in batch.items():
        value, inside = without_text(value)
        left_out += inside
        if all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            kept[key] = value
        else:
            left_out.append(str(key))
    return kept, left_out


def rows_of(leaves: Sequence[Tensor]) -> int:
    """The number of rows of a batch.

    Raises:
        DataError: its tensors have different numbers of rows.
    """
    counts = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(counts) != 1:
        raise DataError(
            f"a batch with tensors of shapes {', '.join(str(tuple(leaf.shape)) for leaf in leaves)} can't be split over "
            "several devices: the first dimension of each must be the batch's rows. Use devices=1, or bring them into that "
            "form."
        )
    return counts.pop()


def parts_of(rows: int, devices: int, whole: bool) -> int:
    """The number of parts that rows are cut into. Each part goes to `devices // parts` devices; 0 gives all to each.

    Args:
        rows: the rows of the batch.
        devices: the number of devices.
        whole: the step computes on the whole batch, which is in equal parts or whole on each device.
    """
    return (0 if rows % devices else devices) if whole else math.gcd(rows, devices)


def parts_to_evaluate(leaves: Sequence[Tensor], devices: int) -> int:
    """The parts of a batch to evaluate: as many as devices, or 0 if every device gets the whole batch."""
    return devices if devices == 1 or all(leaf.shape[0] % devices == 0 for leaf in leaves if leaf.ndim) else 0


def part(leaf: Tensor, parts: int) -> Tensor:
    """The first part of a tensor, which has the form that a device is given."""
    return leaf[: leaf.shape[0] // parts] if leaf.ndim else leaf


def of_all(batch: Flat, processes: int) -> Flat:
    """The form of the global batch if each process has as many rows as this one: tensors without values."""
    if processes == 1:
        return batch
    shapes = [(leaf.shape[0] * processes, *leaf.shape[1:]) if leaf.ndim else () for leaf in batch.leaves]
    leaves = [
        torch.empty(shape, dtype=leaf.dtype, device="meta") for shape, leaf in zip(shapes, batch.leaves, strict=True)
    ]
    return Flat(leaves, batch.tree, batch.left_out)


def spread(array: np.ndarray, parts: int, devices: int) -> np.ndarray:
    """Rows in the order in which the devices take them."""
    if parts in (0, devices) or not array.ndim:
        return array
    cut = array.reshape(parts, array.shape[0] // parts, *array.shape[1:])
    return np.repeat(cut, devices // parts, axis=0).reshape(-1, *array.shape[1:])


def place(mesh: Mesh, arrays: Sequence[np.ndarray], spec: PartitionSpec, copy: bool = True) -> tuple[jax.Array, ...]:
    """Move arrays to the devices, cut as `spec` says. Numbers go to all devices.

    Args:
        mesh: the devices.
        arrays: the rows of this process.
        spec: the layout.
        copy: copy them first, since a loader may fill the same memory again while the devices still read it.
    """
    shardings = [NamedSharding(mesh, spec if array.ndim >= len(spec) else WHOLE) for array in arrays]
    copies = [np.array(array, copy=True) for array in arrays] if copy else list(arrays)
    if mesh.is_multi_process:
        pairs = zip(shardings, copies, strict=True)
        return tuple(jax.make_array_from_process_local_data(sharding, array) for sharding, array in pairs)
    return tuple(jax.device_put(copies, shardings))


def place_all(mesh: Mesh, arrays: Sequence[np.ndarray], spec: PartitionSpec) -> tuple[jax.Array, ...]:
    """Move arrays that every process has as a whole to the devices, cut as `spec` says. Numbers go to all devices."""
    return tuple(_placed_whole(mesh, array, spec if array.ndim >= len(spec) else WHOLE) for array in arrays)


def _placed_whole(mesh: Mesh, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
    copied = np.array(array, copy=True)
    return jax.make_array_from_callback(copied.shape, NamedSharding(mesh, spec), lambda index: copied[index])


# A tensor with fewer elements is whole on every device.
SMALL = 1024


def layout(shape: Sequence[int], devices: int, sharded: bool) -> PartitionSpec:
    """The layout of a tensor of the state."""
    divided = [dimension for dimension, length in enumerate(shape) if length % devices == 0]
    if not sharded or not divided or math.prod(shape) < SMALL:
        return WHOLE
    longest = max(divided, key=lambda dimension: shape[dimension])
    return PartitionSpec(*[AXIS if dimension == longest else None for dimension in range(longest + 1)])


def put_state(mesh: Mesh, tensors: dict[Any, Tensor], sharded: bool) -> dict[Any, jax.Array]:
    """Move a state to the devices."""
    placed: dict[Any, jax.Array] = {}
    put = place_all if mesh.is_multi_process else place
    for path, tensor in tensors.items():
        (placed[path],) = put(mesh, [host_array(tensor)], layout(tensor.shape, mesh.size, sharded))
    return placed


def local_part(array: jax.Array, mesh: Mesh, spec: PartitionSpec = WHOLE) -> jax.Array:
    """Return an array on this process's devices alone, from an array that each process cuts in the same way."""
    pieces = {piece.device: piece.data for piece in array.addressable_shards}
    on_each = [pieces[device] for device in mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, spec), on_each)
