"""The state of a step: all that it reads and changes, by name.

The state is a flat dictionary from paths to tensors, in this order:

    ("params", "net.0.weight")                      each parameter once, also when it has several names
    ("buffers", "net.1.running_mean")
    ("optimizer", "net.0.weight", "exp_avg")        the optimizer's state of that parameter
    ("gradients", "net.0.weight")                   the sum of the gradients of a window of batches; zeros at first
    ("window", "weight")                            the weight of these sums (`distributed/loss_sum.py`)

The names are the module's and the optimizer's own, so a state from any hardware loads on any other. An optimizer makes
its state in its first step. Here it is made before (`torch_optimizers.py`), so that the first step is the same program
as all others. Gradients and their weight are part of the state only if batches are accumulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from footplate.distributed.loss_sum import divisor
from footplate.step.xla.capture.refusals import CaptureError, calling_place
from footplate.step.xla.capture.torch_optimizers import (
    Optimizers,
    as_list,
    initial_state,
    named_groups,
    not_begun,
    prepare,
)

Path = tuple[str, ...]
State = dict[Path, Tensor]


WEIGHT: Path = ("window", "weight")


def state_of(
    module: nn.Module, optimizer: Optimizers = None, gradients: bool = False, weight: Tensor | None = None
) -> State:
    """The current state, of detached tensors that share their memory with the module's and the optimizer's.

    Args:
        module: the module with the parameters and buffers.
        optimizer: one, several (manual optimisation), or None for an evaluation.
        gradients: include the summed gradients of a window; zeros if there are none.
        weight: the weight of these sums; None for 0.

    Raises:
        CaptureError: an optimizer of an unsupported class, or one that trains tensors of others.
    """
    state: State = {("params", name): parameter.detach() for name, parameter in module.named_parameters()}
    state |= {("buffers", name): buffer.detach() for name, buffer in module.named_buffers()}
    trained = [entry for entry in named_groups(module, optimizer) if entry[1].requires_grad]
    for name, parameter, group, owner in trained:
        kept = owner.state.get(parameter) or initial_state(owner, parameter.detach(), group)
        for key in sorted(kept):
            if isinstance(kept[key], Tensor):
                state["optimizer", name, key] = kept[key].detach()
    if gradients:
        for name, parameter, _, _ in trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            state["gradients", name] = gradient.detach()
        state[WEIGHT] = torch.zeros(()) if weight is None else weight.float()
    return state


@torch.no_grad()
def load_state(module: nn.Module, optimizer: Optimizers, state: Mapping[Path, Tensor]) -> None:
    """Copy a state into the module and the optimizer. Optimizer state that isn't there yet is made.

    Gradients are loaded into `parameter.grad` if the state has them. A gradient of zeros doesn't replace None: eager
    torch leaves a parameter that no batch has used unchanged.
    """
    mine = state_of(module, optimizer, gradients=any(path[0] == "gradients" for path in state))
    for path, tensor in mine.items():
        tensor.copy_(state[path])
    remembered = by_parameter(mine)
    for name, parameter, group, owner in named_groups(module, optimizer):
        for key, tensor in remembered[name].items():
            if not not_begun(owner, group, tensor):
                owner.state[parameter].setdefault(key, tensor)
        if parameter.grad is None and ("gradients", name) in mine and mine["gradients", name].any():
            parameter.grad = mine["gradients", name]


def by_parameter(state: State) -> defaultdict[str, dict[str, Tensor]]:
    """The optimizers' state, by the parameter's name."""
    states: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, tensor in state.items():
        if path[0] == "optimizer":
            states[path[1]][path[2]] = tensor
    return states


class Installed:
    """A module and its optimizers with other tensors instead of their own. `read` gives the tensors after the step."""

    def __init__(self, module: nn.Module, optimizer: Optimizers, state: State, rates: list[Tensor]) -> None:
        self._module, self._optimizers = module, as_list(optimizer)
        self._state, self._rates = state, rates
        self._name = {id(tensor): path[1] for path, tensor in state.items() if path[0] == "params"}
        self._weight: Tensor | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Swap the tensors in, and the own tensors back at the end of the block."""
        module = self._module
        parameters = [(m, key, p) for m in module.modules() for key, p in m._parameters.items() if p is not None]
        buffers = [(m, key, b) for m in module.modules() for key, b in m._buffers.items() if b is not None]
        self._names = {id(p): name for name, p in module.named_parameters()}
        buffer_names = {id(b): name for name, b in module.named_buffers()}
        self._kept = (parameters, buffers)
        before = [
            (optimizer, optimizer.state, [dict(group) for group in optimizer.param_groups])
            for optimizer in self._optimizers
        ]
        try:
            for owner, key, parameter in parameters:
                owner._parameters[key] = self._state["params", self._names[id(parameter)]]  # type: ignore[assignment]
            for owner, key, buffer in buffers:
                owner._buffers[key] = self._state["buffers", buffer_names[id(buffer)]]
            self._install_optimizers()
            yield
        finally:
            for owner, key, parameter in parameters:
                owner._parameters[key] = parameter
            for owner, key, buffer in buffers:
                owner._buffers[key] = buffer
            for optimizer, remembered, groups in before:
                optimizer.state = remembered
                for group, settings in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(settings)

    def _install_optimizers(self) -> None:
        """Install traced parameters, state and learning rates. All numbers are tensors."""
        rates, remembered = iter(self._rates), by_parameter(self._state)
        for optimizer in self._optimizers:
            optimizer.state = defaultdict(dict)
            for group in optimizer.param_groups:
                group["params"] = [self._state["params", self._names[id(parameter)]] for parameter in group["params"]]
                prepare(group, rates)
                for parameter in group["params"]:
                    for key, tensor in remembered[self._name[id(parameter)]].items():
                        # A count of steps in single precision makes 1 - beta**step wrong in the fifth digit.
                        counts = not tensor.dim() and parameter.dim() > 0 and tensor.is_floating_point()
                        optimizer.state[parameter][key] = tensor.double() if counts or key == "step" else tensor

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizers."""
        return [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]

    def accumulate(self, weight: Tensor | None = None) -> None:
        """Add the gradients of earlier batches of the window to those of this one.

        Args:
            weight: the weight of this batch, if its loss is a sum. The weight of earlier batches is added.
        """
        if weight is not None:
            self._weight = self._state[WEIGHT] + weight if WEIGHT in self._state else weight
        for parameter in self.parameters:
            before = self._state.get(("gradients", self._name[id(parameter)]))
            if parameter.grad is not None and before is not None:
                parameter.grad = before + parameter.grad

    def divide_gradients(self) -> None:
        """Divide the gradients of the window by its weight."""
        assert self._weight is not None
        by = divisor(self._weight)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = (parameter.grad / by).to(parameter.grad.dtype)

    def read(self, ends_window: bool = True) -> list[Tensor]:
        """The state after the step, in the order of the installed state.

        Args:
            ends_window: the gradients have been used, so the next window begins with zeros.
        """
        buffers = dict(self._module.named_buffers())
        memory = {
            (self._name[id(parameter)], key): value
            for optimizer in self._optimizers
            for parameter, kept in optimizer.state.items()
            for key, value in kept.items()
        }

        tensors: list[Tensor] = []
        for path, before in self._state.items():
            if path[0] == "params":
                # The optimizer changes parameters in place, so the slots keep the tensors from before.
                tensors.append(before)
            elif path[0] == "buffers":
                if path[1] not in buffers:
                    raise CaptureError(
                        f"the step removed the buffer {path[1]}; a captured step keeps its state's names."
                    )
                now = buffers[path[1]]
                if (now.shape, now.dtype) != (before.shape, before.dtype):
                    raise CaptureError(
                        f"the step makes the buffer {path[1]} one of {now.dtype} of shape {tuple(now.shape)}, which was of "
                        f"{before.dtype} and {tuple(before.shape)}; a captured step keeps its state's types and shapes."
                    )
                tensors.append(now)
            elif path[0] == "optimizer":
                value = memory[path[1], path[2]]
                tensors.append(value if value.dtype == before.dtype else value.to(before.dtype))
            elif path == WEIGHT:
                weight = before if self._weight is None else self._weight.to(before.dtype)
                tensors.append(torch.zeros_like(before) if ends_window else weight)
            else:
                summed = self._state["params", path[1]].grad
                now = before if summed is None else summed.detach()
                tensors.append(torch.zeros_like(before) if ends_window else now)

        # State that is new after the step has no input in the graph.
        new = [name for name in buffers if ("buffers", name) not in self._state]
        new += [f"{key} of {name}" for name, key in memory if ("optimizer", name, key) not in self._state]
        if new:
            raise CaptureError(f"the step creates state that wasn't there before it: {', '.join(new)}.")
        return tensors


SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(before: Tensor, now: Tensor) -> None:
    """Make `parameter.data = value` change the traced parameter in place, as a teacher that follows its student needs.

    Otherwise the assignment would change the Python object, outside of the graph.
    """
    if (now.shape, now.dtype) != (before.shape, before.dtype):
        raise CaptureError(
            f"a tensor of shape {tuple(before.shape)} ({before.dtype}) is given data of shape {tuple(now.shape)} "
            f"({now.dtype}):\n    {calling_place()}\nA captured step keeps its state's types and shapes."
        )
    before.data.copy_(now)
