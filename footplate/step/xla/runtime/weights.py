"""Where the weights are, and what else is part of the state.

On the devices, as the state of the programs; the module's own tensors on the host are older, until somebody may look:

    show()     the host has what the devices have          before a checkpoint is written
    lend()     … and from then on it is the host's         before a hook of somebody who may look or write

After `lend`, `put` takes the module's and the optimizers' tensors onto the devices again, whatever was done to them.

A program takes the memory of the state that it is given, so after one that failed half-way there may be none: that is said
when somebody asks for it.

Several processes begin with the weights of the first. Where the devices of all share the state out among them, no process
has it by itself: `show` and `lend` after a step are then calls that all make together, as they do before hooks and saves.
For an evaluation, which each makes by itself, `gather` brings parameters and buffers onto each process's own devices; after
it, until the next step, nobody needs the others. A process that fails is alone from then on: the module stays as it was
shown last.
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
    """The state of a step: parameters, buffers, what the optimizers remember, gradients of a window.

    Args:
        spec: what the step is made of.
        mesh: the devices that train.
        here: those of this process, which evaluate.

    Attributes:
        summed: batches of the window so far, whose gradients are in the state.
        weight: of these sums, where losses are sums; as the host knew it last.
        alone: whether the other processes are no longer to be asked for anything.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh, here: Mesh) -> None:
        self._spec, self._mesh, self._here = spec, mesh, here
        self._optimizers = trained_by(spec)
        self._apart = spec.sharded and mesh.size > here.size  # no process has all of the state
        self.summed = 0
        self.weight: torch.Tensor | None = None
        self.alone = False
        self._like = self._host_state()
        self._state: Arrays | None = None
        self._state_here: Arrays | None = None  # with several processes: on the devices of this one
        self._ahead = False  # the devices' weights are newer than the module's
        self._lost = False  # a step failed when it had taken the state's memory

    def put(self) -> Arrays:
        """The state on the devices.

        Raises:
            ConfigError: a step failed in the middle of changing it.
        """
        if self._lost:
            raise ConfigError("A step failed while it changed the weights: begin anew, or from a checkpoint.")
        if self._state is None:
            self._like = self._host_state()
            self._state = sharding.put_state(self._mesh, self._like, self._spec.sharded)
            self._state_here, self._ahead = None, False
        return self._state

    def on_here(self) -> Arrays:
        """The state on the devices of this process, as far as an evaluation needs it."""
        if self._mesh.size == self._here.size:
            return self.put()
        if self._state_here is None and self._apart:  # nothing has been trained since the host had everything
            self._state_here = sharding.put_state(self._here, _evaluated(self._host_state()), True)
        if self._state_here is None:
            self._state_here = {path: sharding.part_here(array, self._here) for path, array in self.put().items()}
        return self._state_here

    def gather(self) -> None:
        """Bring what an evaluation needs onto the devices of this process, where no process has all of it."""
        if self._apart and self._ahead and self._state_here is None:
            state = _evaluated(self.put())
            self._state_here = {path: self._brought(array) for path, array in state.items()}

    def _brought(self, array: jax.Array) -> jax.Array:
        """An array of all processes' devices on those of this one; all processes call it together."""
        spec = sharding.layout(array.shape, self._here.size, True)
        rows = np.array(self._mesh.devices).reshape(-1, self._here.size)  # (processes, devices of each)
        lying = NamedSharding(Mesh(rows, ("process", AXIS)), spec)
        return sharding.part_here(jax.block_until_ready(_relaid(lying)(array)), self._here, spec)

    def change(self, paths: Sequence[Path], program: Callable[..., Any]) -> tuple[Any, ...]:
        """Let a program change the state, which it is given in the order of `paths`; returns what it returns beside it."""
        state = self.put()
        try:
            after, *others = program(tuple(state[path] for path in paths))
        except Exception:
            self._lost = any(array.is_deleted() for array in state.values())
            raise
        self._state, self._state_here = dict(zip(paths, after, strict=True)), None
        self._ahead = True
        return tuple(others)

    def show(self) -> None:
        """Give the module and the optimizers, on the host, the state that the devices have.

        Raises:
            CheckpointError: a step failed in the middle of changing it.
        """
        if self._lost:
            raise CheckpointError("The step failed while it changed the weights: what the devices hold is lost.")
        if self._state is not None and self._ahead and not (self._apart and self.alone):
            self._load(self._fetched(self._state))
            self._ahead = False

    def _fetched(self, state: Arrays) -> State:
        if not self._apart:
            return tensors_like(self._like, state)
        return {path: to_tensor(self._brought(state[path]), like.dtype) for path, like in self._like.items()}

    def lend(self) -> None:
        """`show`, and take the host's as the state from then on; where it is lost, there is nothing to lend."""
        if not self._lost:
            self.show()
            self._state = self._state_here = None

    def state_dict(self) -> dict[str, Any]:
        """As the eager step's: the gradients of an unfinished window, so that another accelerator may finish it."""
        if not self.summed:
            return {}
        named = self._spec.module.named_parameters()
        state = {"accumulated": self.summed, "gradients": {name: p.grad for name, p in named if p.grad is not None}}
        return state if self.weight is None or not self.weight.item() else {**state, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`; module and optimizers have been loaded."""
        self._state, self._state_here, self._ahead = None, None, False
        self.summed = state.get("accumulated", 0)
        self.weight = state.get("weight")
        parameters = dict(self._spec.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].dtype)

    def begin_alike(self) -> None:
        """Give the modules and optimizers of all processes the state of the first one's."""
        if self._spec.group.is_distributed:
            self._load({path: self._spec.group.from_first(one.clone()) for path, one in self._host_state().items()})

    def _load(self, state: State) -> None:
        with torch.inference_mode(False), torch.no_grad():
            load_state(self._spec.module, self._optimizers, state)
        self.weight = state.get(WEIGHT)

    def _host_state(self) -> State:
        """The state in the module's and the optimizers' own tensors."""
        accumulates = self._spec.accumulate_grad_batches != 1
        state = state_of(self._spec.module, self._optimizers, gradients=accumulates, weight=self.weight)
        if self.summed:
            return state
        of_window = ("gradients", WEIGHT[0])
        return {path: torch.zeros_like(one) if path[0] in of_window else one for path, one in state.items()}


def _evaluated(state: dict[Path, Any]) -> dict[Path, Any]:
    """What of a state an evaluation reads."""
    return {path: one for path, one in state.items() if path[0] in ("params", "buffers")}


@functools.cache
def _relaid(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A function that lays an array out anew; one for each layout, so that it is compiled once for each shape."""
    return jax.jit(_same, out_shardings=sharding)


def _same(array: jax.Array) -> jax.Array:
    return array
