"""Checks of what a user passes to `self.log`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from footplate.core.errors import ConfigError

REDUCTIONS = ("mean", "sum", "min", "max")


def known_reduction(name: str, reduce_fx: str | Callable[[Tensor], Tensor]) -> str | Callable[[Tensor], Tensor]:
    """Return the name of a reduction, or the function itself if it is the user's own."""
    if callable(reduce_fx):
        return reduce_fx.__name__ if reduce_fx in (torch.mean, torch.sum, torch.min, torch.max) else reduce_fx
    known = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
    if known not in REDUCTIONS:
        raise ConfigError(
            f'self.log("{name}", reduce_fx="{reduce_fx}"): expected {", ".join(REDUCTIONS)} or a function.'
        )
    return known


def reduction_name(reduce_fx: Any) -> Any:
    """Return the name of a reduction. None for a function, which other ranks can't receive."""
    return reduce_fx if isinstance(reduce_fx, str) else None


def check_value(name: str, value: Any) -> None:
    """Raise ConfigError if a value is not one number."""
    if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
        raise ConfigError(
            f'self.log("{name}", …): expected a number, a one-element tensor, a torchmetrics Metric or a dict of '
            f"these, got {type(value).__name__}."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f'self.log("{name}", …): a tensor of shape {tuple(value.shape)} is not one number. '
            f"Log its .mean(), or its items under names of their own."
        )
