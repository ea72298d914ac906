"""Where the weights are, and what else is part of the state.

On the devices, as the state of the programs; the module's own tensors on the host are older, until somebody may look:

    show()     the host has what the devices have          before a checkpoint is written
    lend()     … and from then on it is the host's         before a hook of somebody who may look or write

After `lend`, `put` takes the module's and the optimizers' tensors onto the devices again, whatever was done to them.

A program takes the memory of the state that it is given, so after one that failed half-way there may be none: that is said
when somebody asks for it. Several processes begin with the weights of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import Mesh

from footplate.errors import CheckpointError, ConfigError
from footplate.step.base import StepSpec
from footplate.step.capture import load_state, state_of
from footplate.step.capture.state import Path, State
from footplate.step.lowering import tensors_like
from footplate.step.lowering.run import Arrays
from footplate.step.xla import sharing
from footplate.step.xla.programs import trained_by


class Weights:
    """The state of a step: parameters, buffers, what the optimizers remember, gradients of a window.

    Args:
        spec: what the step is made of.
        mesh: the devices that train.
        here: those of this process, which evaluate.

    Attributes:
        summed: batches of the window so far, whose gradients are in the state.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh, here: Mesh) -> None:
        self._spec, self._mesh, self._here = spec, mesh, here
        self._optimizers = trained_by(spec)
        self.summed = 0
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
            self._state = sharing.put_state(self._mesh, self._like, self._spec.sharded)
            self._state_here, self._ahead = None, False
        return self._state

    def on_here(self) -> Arrays:
        """The state on the devices of this process."""
        state = self.put()
        if self._mesh.size == self._here.size:
            return state
        if self._state_here is None:
            self._state_here = {path: sharing.part_here(array, self._here) for path, array in state.items()}
        return self._state_here

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
        if self._state is not None and self._ahead:
            self._load(tensors_like(self._like, self._state))
            self._ahead = False

    def lend(self) -> None:
        """`show`, and take the host's as the state from then on; where it is lost, there is nothing to lend."""
        if not self._lost:
            self.show()
            self._state = None

    def state_dict(self) -> dict[str, Any]:
        """As the eager step's: the gradients of an unfinished window, so that another accelerator may finish it."""
        if not self.summed:
            return {}
        named = self._spec.module.named_parameters()
        return {"accumulated": self.summed, "gradients": {name: p.grad for name, p in named if p.grad is not None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`; module and optimizers have been loaded."""
        self._state, self._ahead = None, False
        self.summed = state.get("accumulated", 0)
        parameters = dict(self._spec.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].dtype)

    def begin_alike(self) -> None:
        """Give the modules and optimizers of all processes the state of the first one's."""
        from jax.experimental.multihost_utils import broadcast_one_to_all

        state = self._host_state()
        first = broadcast_one_to_all([sharing.host_array(one) for one in state.values()])
        self._load(tensors_like(state, dict(zip(state, first, strict=True))))

    def _load(self, state: State) -> None:
        with torch.inference_mode(False), torch.no_grad():
            load_state(self._spec.module, self._optimizers, state)

    def _host_state(self) -> State:
        """The state in the module's and the optimizers' own tensors."""
        state = state_of(self._spec.module, self._optimizers, gradients=self._spec.accumulate_grad_batches != 1)
        if self.summed:
            return state
        return {path: torch.zeros_like(one) if path[0] == "gradients" else one for path, one in state.items()}
