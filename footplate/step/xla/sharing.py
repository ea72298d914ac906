"""How a batch is spread over the devices of one process.

    rows 0 1 2 3 4 5 6 7 on 4 devices      0 1 │ 2 3 │ 4 5 │ 6 7

Every tensor of a batch is cut along its first dimension, the rows; a tensor of no dimension goes to all devices. A number
of rows that the devices don't divide (the last batch of an epoch, say) is cut into as many parts as its greatest common
divisor with the number of devices, and each part goes to as many devices:

    rows 0 1 2 3 4 5 on 4 devices          0 1 2 │ 0 1 2 │ 3 4 5 │ 3 4 5

Each row then counts as often as any other, so the mean over the devices is the mean over the rows: nothing is padded with
rows that a loss would have to be told to leave out. It costs time, for some rows are computed more than once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from footplate.errors import DataError
from footplate.step.capture.functional import pytree
from footplate.step.lowering.arrays import array_type, to_array
from footplate.step.lowering.parallel import AXIS

WHOLE = PartitionSpec()
ROWS = PartitionSpec(AXIS)
ROWS_OF_EACH = PartitionSpec(None, AXIS)


def without_text(batch: Any) -> tuple[Any, list[str]]:
    """A batch without what is no tensor, as far as it stands in dictionaries (names, say), and the keys of that."""
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
    """The rows of a batch that is to be split.

    Raises:
        DataError: its tensors disagree, so that nobody can tell which dimension the rows are.
    """
    counts = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(counts) != 1:
        raise DataError(
            f"a batch with tensors of shapes {', '.join(str(tuple(leaf.shape)) for leaf in leaves)} can't be split over "
            "several devices: the first dimension of each must be the batch's rows. Use devices=1, or bring them into that "
            "form."
        )
    return counts.pop()


def parts_of(rows: int, devices: int) -> int:
    """Into how many parts rows are cut, each of which goes to `devices // parts` devices."""
    return math.gcd(rows, devices)


def part(leaf: Tensor, parts: int) -> Tensor:
    """The first of a tensor's parts: the form of batch that a device is given."""
    return leaf[: leaf.shape[0] // parts] if leaf.ndim else leaf


def spread(array: np.ndarray, parts: int, devices: int) -> np.ndarray:
    """Rows in the order in which the devices, one after the other, take them."""
    if parts == devices or not array.ndim:
        return array
    cut = array.reshape(parts, array.shape[0] // parts, *array.shape[1:])
    return np.repeat(cut, devices // parts, axis=0).reshape(-1, *array.shape[1:])


def host_array(tensor: Tensor) -> np.ndarray:
    """A tensor's values as NumPy's, in the type that JAX has for them; shares the tensor's memory where it can."""
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(to_array(tensor))
    return np.asarray(tensor.numpy(), dtype=array_type(tensor.dtype))


def place(mesh: Mesh, arrays: Sequence[np.ndarray], spec: PartitionSpec) -> tuple[jax.Array, ...]:
    """Copies of arrays on the devices, cut as `spec` says; numbers go to all of them.

    A copy, since a loader may fill the same memory again while the devices still read.
    """
    shardings = [NamedSharding(mesh, spec if array.ndim >= len(spec) else WHOLE) for array in arrays]
    return tuple(jax.device_put([np.array(array, copy=True) for array in arrays], shardings))


def everywhere(mesh: Mesh, tensors: dict[Any, Tensor]) -> dict[Any, jax.Array]:
    """Tensors as arrays, a copy of each on every device."""
    arrays = place(mesh, [host_array(tensor) for tensor in tensors.values()], WHOLE)
    return dict(zip(tensors, arrays, strict=True))
