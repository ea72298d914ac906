"""Losses that are sums, with their weight: `return {"loss_sum": total, "weight": count}`.

A mean of means isn't the mean. Suppose that batches hold different numbers of tokens. Then the average of the batches' mean
losses, over accumulated batches or ranks, gives a token of a short batch more weight than a token of a long batch. A step
that returns the sum of its losses, and the weight of that sum, has no such error:

    gradient of a window  =  Σ ∇ loss_sum  /  Σ weight         both sums over all batches of the window and all ranks

The backward pass runs on the sum alone. The division comes once for each window, before clipping and the optimizer.
Strategies average gradients over the ranks, so they average the weight too: the quotient is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from footplate.core.errors import ConfigError

LOSS_SUM, WEIGHT = "loss_sum", "weight"


def loss_sum_of(output: Any, name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor] | None:
    """The sum of losses and its weight, if `training_step` returned them; else None.

    Args:
        output: the result of `training_step`.
        name: the module's class, for the error.
        dtype: of the weight: a type that counts exactly, on the device of the loss.

    Raises:
        ConfigError: one of the two is missing, or isn't a single number.
    """
    if type(output) is Tensor or not isinstance(output, Mapping) or LOSS_SUM not in output:
        return None
    total, weight = output[LOSS_SUM], output.get(WEIGHT)
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ConfigError(
            f'{name}.training_step() returned "loss_sum": {_described(total)}. Expected a tensor with one element: the sum '
            "of the losses."
        )
    if isinstance(weight, bool) or not isinstance(weight, (Tensor, int, float)):
        raise ConfigError(
            f'{name}.training_step() returned "loss_sum" with "weight": {_described(weight)}. Expected a number or a '
            'tensor with one element, such as the number of tokens that "loss_sum" adds up.'
        )
    if not isinstance(weight, Tensor):
        return total, total.new_full((), float(weight), dtype=dtype)
    if weight.numel() != 1:
        raise ConfigError(f'{name}.training_step() returned "weight": {_described(weight)}. Expected one element.')
    return total, weight.detach().reshape(()).to(total.device, dtype)


def refuse_loss_sum(output: Any, step_name: str) -> None:
    """Refuse a sum of losses from a step with manual optimisation, where nothing divides by its weight.

    Raises:
        ConfigError: the step returned one.
    """
    if isinstance(output, Mapping) and LOSS_SUM in output:
        raise ConfigError(
            f'{step_name}() returned "{LOSS_SUM}", which has no meaning with manual optimisation: divide the loss yourself '
            "before self.manual_backward(loss)."
        )


def mean(total: Tensor, weight: Tensor) -> Tensor:
    """`total / weight`; with a weight of 0, the total, which is then 0."""
    return total / divisor(weight).to(torch.promote_types(total.dtype, torch.float32))


def divisor(weight: Tensor) -> Tensor:
    """A weight to divide by: 1 instead of 0, so that a window with no weight has a gradient of zeros."""
    return torch.where(weight == 0, torch.ones_like(weight), weight)


@torch.no_grad()
def divide_gradients(parameters: Iterable[Tensor], weight: Tensor) -> None:
    """Divide the gradients of parameters by the weight of a window, in place.

    Args:
        parameters: the parameters of an optimizer.
        weight: of the whole window, averaged over the ranks; a tensor of one element, on any device.
    """
    weight = divisor(weight)
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        # The gradient may be a shard of FSDP's.
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if gradient.is_sparse:
            gradient.div_(weight.to(gradient.device))
        else:
            by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_div_(gradients, weight.to(device))  # pyright: ignore[reportPrivateImportUsage]


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
