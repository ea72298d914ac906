"""Placement of batches on the devices, by the step itself or by a prefetch thread.

    prefetched   thread: place(batch), kept under the batch's identity ──► step: take(batch) finds it
    otherwise                                                              step: take(batch) places it

The trainer passes on the batch as the loader gave it, so hooks can read it. Nothing is prefetched if a hook may change
a batch before its step, or for calls of several steps, whose batches go to the devices together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from footplate.core.errors import DataError
from footplate.step.base import StepSpec
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.step.xla.lowering.arrays import NotRepresentable, host_array
from footplate.step.xla.runtime import sharding
from footplate.step.xla.runtime.program_cache import ProgramCache
from footplate.step.xla.runtime.sharding import Flat


@dataclass(frozen=True)
class Placed:
    """A batch that is on the devices.

    Attributes:
        source: the batch as the loader gave it.
        own: its tensors.
        batch: the tensors of all processes, without values if each process has as many rows.
        arrays: the arrays on the devices; None if a process needs the rows of the others first.
    """

    source: Any
    own: Flat
    batch: Flat
    arrays: tuple[jax.Array, ...] | None


class BatchPlacement:
    """Moves the batches of a step to the devices: training batches to all, others to those of this process.

    Args:
        spec: the parts and settings of the step.
        programs: the step's programs, which decide how batches are cut.
    """

    def __init__(self, spec: StepSpec, programs: ProgramCache) -> None:
        self._spec, self._programs = spec, programs
        self._wide = spec.precision.name == "64-true"
        # Placed batches, by stage and by the identity of the batch.
        self._ahead: dict[str, dict[int, Placed]] = {}

    def mover(self, stage: str) -> Callable[[Any], Any] | None:
        """See `Step.mover`."""
        self.forget(stage)
        begins = "on_train_batch_start" if stage == "training" else f"on_{stage}_batch_start"
        if (stage == "training" and self._spec.iterations_per_loop > 1) or self._spec.hooks.weight_readers(begins):
            return None

        def move(batch: Any) -> Any:
            self._ahead.setdefault(stage, {})[id(batch)] = self.place(stage, batch)
            return batch

        return move

    def forget(self, stage: str) -> None:
        """Drop prefetched batches that nobody will ask for."""
        self._ahead.pop(stage, None)

    def take(self, stage: str, batch: Any) -> Placed:
        """A batch on the devices, where a prefetch thread may have put it already."""
        placed = self._ahead.get(stage, {}).pop(id(batch), None)
        return self.place(stage, batch) if placed is None or placed.source is not batch else placed

    def place(self, stage: str, batch: Any) -> Placed:
        """Move a batch to the devices; for training, as if every process had as many rows."""
        flat, programs = self.flat(batch), self._programs
        if stage != "training":
            parts = sharding.parts_to_evaluate(flat.leaves, programs.local_mesh.size)
            return Placed(batch, flat, flat, self._place(programs.local_mesh, flat, parts, parts))
        everyones = sharding.of_all(flat, programs.processes)
        parts = programs.parts(everyones)
        if not programs.divides(parts):
            return Placed(batch, flat, everyones, None)
        return Placed(batch, flat, everyones, self._place(programs.mesh, flat, parts, parts // programs.processes))

    def _place(self, mesh: Mesh, flat: Flat, parts: int, own_parts: int) -> tuple[jax.Array, ...]:
        with self.numbers():
            return sharding.place(mesh, self._arrays(flat, own_parts), sharding.spec_of(parts, sharding.ROWS))

    def place_all(self, batch: Any, own: Flat, everyones: Flat) -> Placed:
        """Move a training batch to the devices that every process has as a whole."""
        mesh, parts = self._programs.mesh, self._programs.parts(everyones)
        with self.numbers():
            cut = [sharding.spread(array, parts, mesh.size) for array in _host_arrays(everyones)]
            arrays = sharding.place_all(mesh, cut, sharding.spec_of(parts, sharding.ROWS))
        return Placed(batch, own, everyones, arrays)

    def place_together(self, batches: Sequence[Flat], parts: int) -> tuple[jax.Array, ...]:
        """Move batches of one form to the devices, for a call of several steps."""
        own_parts = parts // self._programs.processes
        stacked = [
            np.stack(arrays) for arrays in zip(*(self._arrays(batch, own_parts) for batch in batches), strict=True)
        ]
        return sharding.place(self._programs.mesh, stacked, sharding.spec_of(parts, sharding.ROWS_OF_EACH), copy=False)

    def flat(self, batch: Any) -> Flat:
        """The tensors of a batch, in the types of the step."""
        return sharding.flat(batch, self._spec.precision.convert_batch)

    def numbers(self) -> Any:
        """A context with 64-bit numbers for 64-true, and 32-bit numbers for all other precisions."""
        return jax.enable_x64(self._wide)

    def _arrays(self, batch: Flat, parts: int) -> list[np.ndarray]:
        """The values of a batch in the order in which this process's devices take its rows."""
        devices = self._programs.local_mesh.size
        return [sharding.spread(array, parts, devices) for array in _host_arrays(batch)]


def _host_arrays(batch: Flat) -> list[np.ndarray]:
    """The values of a batch's tensors.

    Raises:
        DataError: the devices can't represent the type or the values of a tensor.
    """
    arrays = []
    for index, leaf in enumerate(batch.leaves):
        try:
            arrays.append(host_array(leaf))
        except NotRepresentable as error:
            leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(batch.leaves, batch.tree))
            raise DataError(f"batch{pytree.keystr(leaves[index][0])}: {error}") from error
    return arrays
