"""The initial state of optimizers of other packages, such as Lion.

Torch's own optimizers make their state in a function that can be called alone. Others make it in their first step, but
a captured step needs it before. Most begin with zeros, so this is tried on a small parameter, for two steps: once as
the optimizer does it, and once with zeros put there before. If both end alike, the state begins with zeros. Otherwise
the optimizer is
refused: it begins with a copy of the weights or of the first gradient, or counts in plain numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.torch_tracing import outside_of_capture

_GRADIENTS = (0.5, -0.75)


def memory_of(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter before the optimizer's first step: zeros.

    Raises:
        CaptureError: it begins with something else, or can't be tried.
    """
    kind = type(optimizer).__name__
    shape = tuple(min(length, 3) for length in parameter.shape)
    try:
        with outside_of_capture():
            alone, remembered = _two_steps(optimizer, group, shape, {})
            plain = [name for name, value in remembered.items() if not isinstance(value, Tensor)]
            if plain:
                raise CaptureError(
                    f"{kind} can't be captured: it keeps {', '.join(plain)} as plain numbers, which would never change."
                )
            zeros = {name: torch.zeros_like(value) for name, value in remembered.items()}
            begun, after = _two_steps(optimizer, group, shape, zeros)
            alike = torch.equal(alone, begun) and all(torch.equal(remembered[name], after[name]) for name in zeros)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{kind} can't be captured: trying it on a small parameter failed ({error}).") from error
    if not alike:
        raise CaptureError(f"{kind} can't be captured: its state doesn't begin with zeros.")
    return {
        name: torch.zeros(parameter.shape if zero.shape == shape else zero.shape, dtype=_type(zero, parameter))
        for name, zero in zeros.items()
    }


def _two_steps(
    optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], memory: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """A small parameter after two steps, and its optimizer state."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    parameter = torch.linspace(-1.0, 2.0, max(1, torch.Size(shape).numel())).reshape(shape).requires_grad_()
    shadow.state = defaultdict(dict)
    if memory:
        shadow.state[parameter] = {name: value.clone() for name, value in memory.items()}
    shadow.param_groups = [{**group, "params": [parameter]}]
    for size in _GRADIENTS:
        parameter.grad = torch.full(shape, size) * (1.0 + parameter.detach())
        shadow.step()
    return parameter.detach(), shadow.state[parameter]


def _type(zero: Tensor, parameter: Tensor) -> torch.dtype:
    """The parameter's type, if the small one's was used; otherwise the type that the optimizer has chosen."""
    return parameter.dtype if zero.dtype == torch.float32 else zero.dtype
