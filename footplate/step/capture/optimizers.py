"""Torch's own optimizers inside a captured step: what they remember from the beginning, and how their code is traced.

No optimizer is written anew here. Its own `step()` runs while the graph is made, on the path that torch takes under
`torch.compile` and on CUDA graphs (`capturable`), where counts of steps are tensors. Three things are done for it:

- What it remembers is made before the first step, by its own `_init_group`, so that the first step is the same program
  as all others.
- Learning rates are tensors. `x.add_(y, alpha=rate)` would ask for the rate's value; `TensorRates` multiplies instead.
- SGD's momentum begins as the first gradient, undamped. With dampening, a buffer that has not begun holds NaN, which
  `begin_momentum` replaces by what makes the first step torch's.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.overrides import TorchFunctionMode

from footplate.step.capture.refusals import CaptureError

CAPTURED = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD, Muon)

Optimizers = Optimizer | Sequence[Optimizer] | None
"""What captures take: one optimizer, several with manual optimisation, or none."""


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """One optimizer, several or none, as a list."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def named_groups(module: nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, Tensor, dict[str, Any], Optimizer]]:
    """Each parameter that is trained, with its name, its group and its optimizer.

    Raises:
        CaptureError: an optimizer of an unsupported class, one that trains what isn't the module's, or two that train the
            same parameter.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for optimizer in as_list(optimizers):
        kind = type(optimizer).__name__
        if not isinstance(optimizer, CAPTURED):
            known = ", ".join(one.__name__ for one in CAPTURED)
            raise CaptureError(f"{kind} can't be captured yet: there are {known}.")
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CaptureError(
                        f"{kind}: group {number} trains a tensor of shape {tuple(parameter.shape)} that is "
                        f"no parameter of {type(module).__name__}. Register it as one: self.name = nn.Parameter(…)."
                    )
                if id(parameter) in seen:
                    raise CaptureError(f"{names[id(parameter)]} is trained by two optimizers; a captured step has one.")
                seen.add(id(parameter))
                yield names[id(parameter)], parameter, group, optimizer


def initial_state(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer remembers of a parameter before its first step, by its own hand."""
    if isinstance(optimizer, SGD):
        if not group["momentum"]:
            return {}
        begins = float("nan") if group["dampening"] else 0.0
        return {"momentum_buffer": torch.full_like(parameter, begins)}
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    shadow.state = defaultdict(dict)
    stand_in = torch.zeros_like(parameter).requires_grad_()
    stand_in.grad = torch.zeros_like(parameter)
    plain = {name: False for name in ("capturable", "fused", "foreach") if name in group}
    lists = [[] for _ in list(inspect.signature(shadow._init_group).parameters)[1:]]  # type: ignore[attr-defined]
    shadow._init_group({**group, **plain, "params": [stand_in]}, *lists)  # type: ignore[attr-defined]
    return shadow.state[stand_in]


def begin_momentum(optimizer: Optimizer) -> None:
    """Give SGD's buffers that hold NaN the value that its step turns into the first gradient."""
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not (group["momentum"] and group["dampening"]):
            continue
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            buffer = optimizer.state[parameter]["momentum_buffer"]
            gradient = -parameter.grad if group["maximize"] else parameter.grad
            gradient = gradient + group["weight_decay"] * parameter.detach()
            before = gradient * (group["dampening"] / group["momentum"])
            optimizer.state[parameter]["momentum_buffer"] = torch.where(torch.isnan(buffer), before, buffer)


def not_begun(optimizer: Optimizer, group: Mapping[str, Any], memory: Tensor) -> bool:
    """Whether it is a buffer of SGD's that no step has filled: eager torch has none then."""
    return isinstance(optimizer, SGD) and bool(group["dampening"]) and bool(torch.isnan(memory).all())


def prepare(group: dict[str, Any], rate: Tensor) -> None:
    """Set a group so that its optimizer keeps all numbers in tensors; its learning rate is one too."""
    group["lr"] = rate
    group["foreach"], group["fused"] = False, None
    if "capturable" in group:
        group["capturable"] = True


def settings(optimizers: Optimizers) -> list[dict[str, Any]]:
    """What a program takes from each group as a constant: all plain settings, but for those that rates replace."""
    varying = {"lr", "initial_lr", "max_lr", "min_lr", "params", "foreach", "fused", "capturable"}
    return [
        {name: value for name, value in group.items() if name not in varying and not isinstance(value, Tensor)}
        for optimizer in as_list(optimizers)
        for group in optimizer.param_groups
    ]


class TensorRates(TorchFunctionMode):
    """`alpha=` and `value=` that are tensors are multiplied in, where torch would ask for their value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), Tensor):
                first, scaled, *rest = args
                args = (first, scaled * kwargs.pop(name), *rest)
        return func(*args, **kwargs)
