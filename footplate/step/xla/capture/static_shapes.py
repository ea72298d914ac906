"""Static shapes for functions whose result's shape torch computes from values, although their arguments determine it.

`torch.bincount(x, minlength=n)` has n elements, unless a value is larger. In a captured step it always has n, and
larger values aren't counted. Classification metrics (torchmetrics' functional ones) use it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FixedShapes(TorchFunctionMode):
    """Gives `torch.bincount` the shape of its `minlength`, if there is one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.bincount, Tensor.bincount):
            return _bincount(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        return torch.bincount(input, weights)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif not weights.is_floating_point():
        weights = weights.double()
    counts = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    return counts.scatter_add(0, input.long(), weights)
