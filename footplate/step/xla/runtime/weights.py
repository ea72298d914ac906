"""The state on the devices: weights, optimizer state, and the gradients of a window.

The state is the input and output of the programs. The module's own tensors on the host are older, until they are
fetched:

    fetch()                 copy the state to the host, before a checkpoint is written
    fetch(may_change=True)  the same, and the host's state is the newest from then on: before a hook that may change it
    put()                   copy the host's state to the devices, if it is the newest

A program reuses the memory of the state that it is given. If it fails half-way, the state may be lost: the next access
raises.

Several processes begin with the weights of the first. With sharded weights no process has the whole state, so `fetch`
after a step is a call that all processes make together, as they do before hooks and saves. For an evaluation, which
each process makes alone, `gather` brings parameters and buffers onto the devices of each process. After that, until the
next step, no process needs the others. A process that has failed fetches nothing any more: the module keeps the weights
of the last fetch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

from footplate.core.errors import CheckpointError, ConfigError
from footplate.step.base import StepSpec
from footplate.step.xla.capture import load_state, state_of
from footplate.step.xla.capture.state import WEIGHT, Path, State
from footplate.step.xla.lowering import tensors_like
from footplate.step.xla.lowering.arrays import to_tensor
from footplate.step.xla.lowering.data_parallel import AXIS
from footplate.step.xla.lowering.state_function import Arrays
from footplate.step.xla.runtime import sharding
from footplate.step.xla.runtime.program_cache import trained_by


class Weights:
    """The state of a step: parameters, buffers, optimizer state, and the gradients of a window.

    Args:
        spec: the parts and settings of the step.
        mesh: the devices that train.
        local_mesh: the devices of this process, which evaluate.

    Attributes:
        summed: batches of the window so far. Their gradients are in the state.
        weight: the weight of these gradients if losses are sums, as last fetched.
        alone: this process has failed, and must not wait for others.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh, local_mesh: Mesh) -> None:
        self._spec, self._mesh, self._local_mesh = spec, mesh, local_mesh
        self._optimizers = trained_by(spec)
        # True if no process has the whole state.
        self._apart = spec.sharded and mesh.size > local_mesh.size
        self.summed = 0
        self.weight: torch.Tensor | None = None
        self.alone = False
        self._like = self._host_state()
        self._state: Arrays | None = None
        # The state on the devices of this process, for evaluations.
        self._local_state: Arrays | None = None
        # True if the devices' weights are newer than the module's.
        self._ahead = False
        # True if a step has failed after it had reused the state's memory.
        self._lost = False

    def put(self) -> Arrays:
        """Return the state on the devices. Copy it there if it isn't there yet.

        Raises:
            ConfigError: a step failed in the middle of changing it.
        """
        if self._lost:
            raise ConfigError(
                "A step failed while it changed the weights, which are lost. Begin again, or from a checkpoint."
            )
        if self._state is None:
            self._like = self._host_state()
            self._state = sharding.put_state(self._mesh, self._like, self._spec.sharded)
            self._local_state, self._ahead = None, False
        return self._state

    def local_state(self) -> Arrays:
        """Return the part of the state that an evaluation needs, on the devices of this process."""
        if self._mesh.size == self._local_mesh.size:
            return self.put()
        # Nothing has been trained since the host had the whole state.
        if self._local_state is None and self._apart:
            self._local_state = sharding.put_state(self._local_mesh, _evaluated(self._host_state()), True)
        if self._local_state is None:
            self._local_state = {
                path: sharding.local_part(array, self._local_mesh) for path, array in self.put().items()
            }
        return self._local_state

    def gather(self) -> None:
        """Gather the parameters and buffers on the devices of this process, if no process has all of them."""
        if self._apart and self._ahead and self._local_state is None:
            state = _evaluated(self.put())
            self._local_state = {path: self._brought(array) for path, array in state.items()}

    def _brought(self, array: jax.Array) -> jax.Array:
        """An array of all processes' devices, on the devices of this process. All processes call it together."""
        spec = sharding.layout(array.shape, self._local_mesh.size, True)
        rows = np.array(self._mesh.devices).reshape(-1, self._local_mesh.size)  # (processes, devices of each)
        lying = NamedSharding(Mesh(rows, ("process", AXIS)), spec)
        return sharding.local_part(jax.block_until_ready(_relaid(lying)(array)), self._local_mesh, spec)

    def change(self, paths: Sequence[Path], program: Callable[..., Any]) -> tuple[Any, ...]:
        """Run a program on the state in the order of `paths`; keep the new state, and return the other results."""
        state = self.put()
        try:
            after, *results = program(tuple(state[path] for path in paths))
        except Exception:
            self._lost = any(array.is_deleted() for array in state.values())
            raise
        self._state, self._local_state = dict(zip(paths, after, strict=True)), None
        self._ahead = True
        return tuple(results)

    def fetch(self, may_change: bool = False) -> None:
        """Copy the state of the devices to the module and the optimizers on the host.

        Args:
            may_change: somebody may change it there: `put` copies it back. If the state is lost, nothing happens.

        Raises:
            CheckpointError: a step failed in the middle of changing it.
        """
        if self._lost and may_change:
            return
        if self._lost:
            raise CheckpointError("The step failed while it changed the weights: the state on the devices is lost.")
        if self._state is not None and self._ahead and not (self._apart and self.alone):
            self._load(self._fetched(self._state))
            self._ahead = False
        if may_change:
            self._state = self._local_state = None

    def _fetched(self, state: Arrays) -> State:
        if not self._apart:
            return tensors_like(self._like, state)
        return {path: to_tensor(self._brought(state[path]), like.dtype) for path, like in self._like.items()}

    def state_dict(self) -> dict[str, Any]:
        """The gradients of an unfinished window, in the eager step's form.

        Another accelerator can finish the window.
        """
        if not self.summed:
            return {}
        named = self._spec.module.named_parameters()
        state = {"accumulated": self.summed, "gradients": {name: p.grad for name, p in named if p.grad is not None}}
        return state if self.weight is None or not self.weight.item() else {**state, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Module and optimizers are loaded already."""
        self._state, self._local_state, self._ahead = None, None, False
        self.summed = state.get("accumulated", 0)
        self.weight = state.get("weight")
        parameters = dict(self._spec.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].dtype)

    def begin_alike(self) -> None:
        """Copy the state of the first process to all processes."""
        if self._spec.group.is_distributed:
            self._load(
                {path: self._spec.group.from_first(tensor.clone()) for path, tensor in self._host_state().items()}
            )

    def _load(self, state: State) -> None:
        with torch.inference_mode(False), torch.no_grad():
            load_state(self._spec.module, self._optimizers, state)
        self.weight = state.get(WEIGHT)

    def _host_state(self) -> State:
        """The state in the tensors of the module and the optimizers."""
        accumulates = self._spec.accumulate_grad_batches != 1
        state = state_of(self._spec.module, self._optimizers, gradients=accumulates, weight=self.weight)
        if self.summed:
            return state
        of_window = ("gradients", WEIGHT[0])
        return {path: torch.zeros_like(tensor) if path[0] in of_window else tensor for path, tensor in state.items()}


def _evaluated(state: dict[Path, Any]) -> dict[Path, Any]:
    """The part of a state that an evaluation reads."""
    return {path: array for path, array in state.items() if path[0] in ("params", "buffers")}


@functools.cache
def _relaid(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A function that changes the layout of an array. Cached, so that JAX compiles it once for each shape."""
    return jax.jit(_same, out_shardings=sharding)


def _same(array: jax.Array) -> jax.Array:
    return array
