"""Data parallelism of a step over devices: each has its part of the batch, and gradients are averaged once.

Each device has a copy of the state, its part of the batch, and its own key, so that dropout differs between them. One
all-reduce for each number type averages gradients, loss, logs and floating-point buffers (BatchNorm's statistics, which
each device computes from its own part). So all copies stay equal, except for whole numbers in buffers that depend on
the rows. DDP does the same, but keeps the first rank's buffers. If devices have unequal numbers of valid targets, a
mean over them is a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from footplate.step.xla.capture import averaging_op  # noqa: F401  declares torch.ops.footplate.average
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.lowering.state_function import Arrays, lower
from footplate.step.xla.lowering.table import Context, lowers

AXIS = "data"


@lowers(torch.ops.footplate.average.default)
def average(context: Context, tensors: Any) -> Any:
    return lax.pmean(list(tensors), AXIS)


@lowers(torch.ops.footplate.extreme.default)
def extreme(context: Context, value: Any, kind: str) -> Any:
    return lax.pmin(value, AXIS) if kind == "min" else lax.pmax(value, AXIS)


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh of devices in one row, over which batches are split."""
    return Mesh(np.array(devices), (AXIS,))


def platform_of(mesh: Mesh) -> str:
    """The platform of a mesh, as JAX names it: "cpu", "tpu", …"""
    return mesh.devices.flat[0].platform


def data_parallel(captured: Captured, mesh: Mesh) -> Callable[..., Any]:
    """Lower a step for several devices.

    Args:
        captured: a training step, captured with `averages=True` and the batch of one device.
        mesh: see `mesh_of`.

    Returns:
        `(state, rates, key, batch) → (state, loss, logs)` with the batch of all devices: compiled at its first call, it
        spreads its arguments over the devices, and takes the state's memory for the new one's.
    """
    step = lower(captured, platform_of(mesh))

    def on_each(state: Arrays, rates: Sequence[Any], key: jax.Array, batch: Sequence[Any]) -> tuple[Arrays, Any, Any]:
        return step(state, rates, jax.random.fold_in(key, lax.axis_index(AXIS)), batch)

    whole, parts = PartitionSpec(), PartitionSpec(AXIS)
    specs = (whole, whole, whole, parts)
    several = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    everywhere = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.jit(several, in_shardings=everywhere, out_shardings=everywhere[0], donate_argnums=0)
