"""Averaging of tensors over all devices: the operation of a step in which devices communicate.

During capture it only marks the point in the graph, once for gradients, statistics, logs and loss together, so that the
caller makes one collective of it. A log that is a minimum or maximum has an operation of its own. A log that is a sum
is averaged too: the caller knows the number of parts of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


@torch.library.custom_op("footplate::average", mutates_args=())
def average(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors averaged over the devices that run the same program; unchanged on one device."""
    return [tensor.clone() for tensor in tensors]


@average.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


@torch.library.custom_op("footplate::extreme", mutates_args=())
def extreme(value: Tensor, kind: str) -> Tensor:
    """The minimum ("min") or maximum ("max") of a number over the devices; unchanged on one device."""
    return value.clone()


@extreme.register_fake
def _(value: Tensor, kind: str) -> Tensor:
    return torch.empty_like(value)


def average_gradients(parameters: list[Tensor]) -> None:
    """Average the gradients of parameters over the devices."""
    learning = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for (parameter, _), mean in zip(learning, average([gradient for _, gradient in learning]), strict=True):
        parameter.grad = mean


def average_step(
    parameters: list[Tensor],
    loss: Tensor,
    logs: dict[str, Tensor],
    reductions: Mapping[str, str],
    buffers: list[Tensor],
) -> Tensor:
    """Average, in one operation, the results of the devices for their parts of the batch.

    Gradients and floating-point buffers (BatchNorm's statistics) are changed in place, and so is the dictionary of
    logs, where whole numbers become means too, but for those whose reduction is "min" or "max".

    Returns:
        The averaged loss, detached.
    """
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in learning if parameter.grad is not None]
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    means = _extremes(logs, logs, reductions)
    values = [logs[name] if logs[name].is_floating_point() else logs[name].to(loss.dtype) for name in means]
    averaged = iter(average([*gradients, *floating, *values, loss.detach()]))
    for parameter in learning:
        parameter.grad = next(averaged)
    with torch.no_grad():
        for buffer in floating:
            buffer.copy_(next(averaged))
    for name in means:
        logs[name] = next(averaged)
    return next(averaged)


def average_logs(logs: dict[str, Tensor], reductions: Mapping[str, str], names: list[str]) -> None:
    """Average, in place, the logs of these names, which hooks have logged after the backward pass."""
    means = _extremes(logs, names, reductions)
    if means:
        values = [logs[name] if logs[name].is_floating_point() else logs[name].float() for name in means]
        logs.update(zip(means, average(values), strict=True))


def _extremes(logs: dict[str, Tensor], names: Iterable[str], reductions: Mapping[str, str]) -> list[str]:
    """Replace each device's own extremes by those of all devices; return the names that are still to be averaged."""
    means = []
    for name in names:
        if reductions[name] in ("min", "max"):
            logs[name] = extreme(logs[name], reductions[name])
        else:
            means.append(name)
    return means
