"""What a step reads and changes, by name.

The state is a flat dictionary from paths to tensors, in this order:

    ("params", "net.0.weight")                      each parameter once, also when it has several names
    ("buffers", "net.1.running_mean")
    ("optimizer", "net.0.weight", "exp_avg")        what the optimizer remembers of that parameter

The names are the module's and the optimizer's own, so a state from any hardware loads on any other. An optimizer makes
its state in its first step; here it is made before, with the values it would begin with, so that the first step is the
same program as all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from footplate.step.capture.refusals import CaptureError

Path = tuple[str, ...]
State = dict[Path, Tensor]


def _sgd(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    if not group["momentum"]:
        return {}
    if group["dampening"]:
        raise CaptureError(
            f"SGD(dampening={group['dampening']}): its first step differs from all others (the momentum begins undamped), "
            "so it can't be one program. Use dampening=0."
        )
    return {"momentum_buffer": torch.zeros_like(parameter)}


def _adam(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    return {"step": step, **{name: torch.zeros_like(parameter) for name in moments}}


_INITIAL: dict[type[Optimizer], Callable[[Tensor, Mapping[str, Any]], dict[str, Tensor]]] = {
    SGD: _sgd,
    Adam: _adam,
    AdamW: _adam,
}


def state_of(module: nn.Module, optimizer: Optimizer | None = None) -> State:
    """The state as it is now, of detached tensors that share their memory with the module's and the optimizer's.

    Raises:
        CaptureError: an optimizer of an unsupported class, or one that trains what isn't the module's.
    """
    state: State = {("params", name): parameter.detach() for name, parameter in module.named_parameters()}
    state |= {("buffers", name): buffer.detach() for name, buffer in module.named_buffers()}
    if optimizer is None:
        return state
    initial = _INITIAL.get(type(optimizer))
    if initial is None:
        known = ", ".join(one.__name__ for one in _INITIAL)
        raise CaptureError(f"{type(optimizer).__name__} can't be captured yet: there are {known}.")
    for name, parameter, group in named_groups(module, optimizer):
        if not parameter.requires_grad:
            continue
        kept = optimizer.state.get(parameter) or initial(parameter.detach(), group)
        for key in sorted(kept):
            if isinstance(kept[key], Tensor):
                state["optimizer", name, key] = kept[key].detach()
    return state


def named_groups(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Each parameter of an optimizer, with its name and its group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CaptureError(
                    f"{type(optimizer).__name__}: group {number} trains a tensor of shape {tuple(parameter.shape)} that is "
                    f"no parameter of {type(module).__name__}. Register it as one: self.name = nn.Parameter(…)."
                )
            yield names[id(parameter)], parameter, group


@torch.no_grad()
def load_state(module: nn.Module, optimizer: Optimizer | None, state: Mapping[Path, Tensor]) -> None:
    """Copy a state into the module and the optimizer, whose own state is made where it isn't there yet."""
    mine = state_of(module, optimizer)
    for path, tensor in mine.items():
        tensor.copy_(state[path])
    if optimizer is None:
        return
    for name, parameter, _ in named_groups(module, optimizer):
        for path, tensor in mine.items():
            if path[:2] == ("optimizer", name):
                optimizer.state[parameter].setdefault(path[2], tensor)


class Installed:
    """A module and its optimizer with other tensors in the place of their own; what they have become is read back."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, state: State, rates: list[Tensor]) -> None:
        self._module, self._optimizer = module, optimizer
        self._state, self._rates = state, rates

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Swap the tensors in, and the module's and optimizer's own back at the end, whatever happens."""
        module, optimizer = self._module, self._optimizer
        parameters = [(m, key, p) for m in module.modules() for key, p in m._parameters.items() if p is not None]
        buffers = [(m, key, b) for m in module.modules() for key, b in m._buffers.items() if b is not None]
        self._names = {id(p): name for name, p in module.named_parameters()}
        buffer_names = {id(b): name for name, b in module.named_buffers()}
        self._kept = (parameters, buffers)
        groups = [] if optimizer is None else [dict(group) for group in optimizer.param_groups]
        remembered = None if optimizer is None else optimizer.state
        try:
            for owner, key, parameter in parameters:
                owner._parameters[key] = self._state["params", self._names[id(parameter)]]  # type: ignore[assignment]
            for owner, key, buffer in buffers:
                owner._buffers[key] = self._state["buffers", buffer_names[id(buffer)]]
            if optimizer is not None:
                self._install_optimizer(optimizer)
            yield
        finally:
            for owner, key, parameter in parameters:
                owner._parameters[key] = parameter
            for owner, key, buffer in buffers:
                owner._buffers[key] = buffer
            if optimizer is not None:
                optimizer.state = remembered  # type: ignore[assignment]
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(before)

    def _install_optimizer(self, optimizer: Optimizer) -> None:
        """Traced parameters, state and learning rates, on the path that keeps all numbers in tensors."""
        optimizer.state = defaultdict(dict)
        for path, tensor in self._state.items():
            if path[0] == "optimizer":
                parameter = self._state["params", path[1]]
                # A count of steps in single precision makes 1 - beta**step wrong in the fifth digit.
                optimizer.state[parameter][path[2]] = tensor.double() if path[2] == "step" else tensor
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["params"] = [self._state["params", self._names[id(parameter)]] for parameter in group["params"]]
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
            group["fused"] = None
            group["foreach"] = "capturable" not in group  # SGD takes a rate that is a tensor in its foreach form alone

    def read(self) -> list[Tensor]:
        """The state as it has become, in the order of the state that was installed."""
        optimizer = self._optimizer
        buffers = dict(self._module.named_buffers())
        found: list[Tensor] = []
        for path, before in self._state.items():
            if path[0] == "params":
                found.append(before.detach())  # parameters are changed in place
            elif path[0] == "buffers":
                if path[1] not in buffers:
                    raise CaptureError(
                        f"the step removed the buffer {path[1]}; a captured step keeps its state's names."
                    )
                found.append(buffers[path[1]].detach())
            else:
                assert optimizer is not None
                found.append(optimizer.state[self._state["params", path[1]]][path[2]].detach().to(before.dtype))
        self._no_more(buffers)
        return found

    def _no_more(self, buffers: Mapping[str, Tensor]) -> None:
        new = [name for name in buffers if ("buffers", name) not in self._state]
        if self._optimizer is not None:
            names = {id(tensor): path[1] for path, tensor in self._state.items() if path[0] == "params"}
            for parameter, kept in self._optimizer.state.items():
                name = names.get(id(parameter), "?")
                new += [f"{key} of {name}" for key in kept if ("optimizer", name, key) not in self._state]
        if new:
            raise CaptureError(f"the step creates state that wasn't there before it: {', '.join(new)}.")
