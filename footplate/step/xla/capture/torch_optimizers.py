"""Torch's own optimizers inside a captured step: their initial state, and how their code is traced.

No optimizer is written again here. Its own `step()` runs during capture, on the path that torch takes under
`torch.compile` and on CUDA graphs (`capturable`), where counts of steps are tensors. Three things are done for it:

- Its state is made before the first step, by its own `_init_group`, so that the first step is the same program as all
  others.
- Learning rates are tensors (`tensor_rate`), and so is a momentum (or first beta) that a schedule moves (OneCycleLR).
  `x.add_(y, alpha=rate)` would ask for the rate's value; `TensorRates` multiplies instead.
- SGD's momentum begins as the first gradient, undamped. With dampening, a buffer that has not begun holds NaN.
  `begin_momentum` replaces it by the value that makes the first step equal to torch's.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from footplate.step.torch_internals import tensor_rate
from footplate.step.xla.capture.other_optimizers import memory_of
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.torch_tracing import noting

CAPTURED = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD, Muon)

Optimizers = Optimizer | Sequence[Optimizer] | None
"""The optimizers of a capture: one, several with manual optimisation, or none."""


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """Return one optimizer, several or none as a list."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def named_groups(module: nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, Tensor, dict[str, Any], Optimizer]]:
    """Yield the name of each trained parameter, the parameter, its group and its optimizer.

    Raises:
        CaptureError: an optimizer of an unsupported class, one that trains tensors of others, or two that train the
            same parameter.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for optimizer in as_list(optimizers):
        kind = type(optimizer).__name__
        if type(optimizer).__module__.startswith("torch.") and not isinstance(optimizer, CAPTURED):
            known = ", ".join(supported.__name__ for supported in CAPTURED)
            raise CaptureError(f"{kind} can't be captured yet: of torch's, there are {known}.")
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
    """The state of a parameter before the first step, made by the optimizer's own code."""
    if not isinstance(optimizer, CAPTURED):
        return dict(memory_of(optimizer, parameter, group))
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
        if not group["dampening"] or (not isinstance(group["momentum"], Tensor) and not group["momentum"]):
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
    """Return True for a buffer of SGD that no step has filled. Eager torch has no buffer then."""
    return isinstance(optimizer, SGD) and bool(group["dampening"]) and bool(torch.isnan(memory).all())


def rates_of(optimizers: Optimizers) -> list[float]:
    """The numbers that each step is given: the learning rate of each group, and the momentum that a schedule moves."""
    rates = []
    for optimizer in as_list(optimizers):
        for group in optimizer.param_groups:
            rates.append(tensor_rate(optimizer, group))
            name = _cycled(group)
            if name is not None:
                rates.append(float(group[name][0] if name == "betas" else group[name]))
    return rates


def prepare(group: dict[str, Any], rates: Iterator[Tensor]) -> None:
    """Set a group so that its optimizer keeps all numbers in tensors, its rates (see `rates_of`) included."""
    group["lr"] = next(rates)
    name = _cycled(group)
    if name == "betas":
        group["betas"] = (next(rates).to(group["params"][0].dtype), *group["betas"][1:])
    elif name == "momentum":
        group["momentum"] = next(rates)
        group["momentum"]._is_momentum = True  # type: ignore[attr-defined]
    for name, value in (("foreach", False), ("fused", None), ("capturable", True)):
        if name in group:
            group[name] = value


def _cycled(group: Mapping[str, Any]) -> str | None:
    """The setting that OneCycleLR or CyclicLR moves together with the learning rate; None if neither does."""
    if "max_momentum" not in group:
        return None
    return "betas" if "betas" in group else "momentum"


def settings(optimizers: Optimizers) -> dict[str, Any]:
    """The constants of a program from the groups, by name: all plain settings except those that are rates."""
    return {
        f"{name} of {type(optimizer).__name__}'s group {number}": value
        for optimizer in as_list(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in _constants(group)
    }


def constants_reader(optimizers: Optimizers) -> Callable[[], list[Any]]:
    """Make a function that reads the values of `settings` quickly, in a fixed order.

    Each step calls it, to find out if a setting has changed.
    """
    watched = [
        (group, [name for name, _ in _constants(group) if name in group], _cycled(group))
        for optimizer in as_list(optimizers)
        for group in optimizer.param_groups
    ]

    def read() -> list[Any]:
        return [
            group[name][1:] if name == cycled else group[name] for group, names, cycled in watched for name in names
        ]

    return read


def _constants(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    cycled = _cycled(group)
    for name, value in group.items():
        if name == "params":
            yield "the number of parameters", len(value)
        elif name == cycled == "betas":
            yield name, value[1:]
        elif name not in _NOT_CONSTANT and name != cycled and not isinstance(value, Tensor):
            yield name, value


_NOT_CONSTANT = {
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "foreach",
    "fused",
    "capturable",
}


class TensorRates(TorchFunctionMode):
    """Lets an optimizer use tensors as rates where torch asks for their values.

    `alpha=` and `value=` are multiplied in. A momentum that is compared with 0 differs from it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AGAINST_ZERO and getattr(args[0], "_is_momentum", False):
            return True
        kwargs = dict(kwargs or {})
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), Tensor):
                first, scaled, *rest = args
                with noting(only_captured=True):
                    args = (first, scaled * kwargs.pop(name), *rest)
        return func(*args, **kwargs)


_AGAINST_ZERO = (Tensor.__ne__, Tensor.ne, Tensor.__gt__, Tensor.gt)
