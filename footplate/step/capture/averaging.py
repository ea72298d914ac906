"""The one point of a step at which devices meet: an operation that averages tensors over all of them.

While a step is captured it does nothing but stand in the graph, once for gradients, statistics, logs and loss together, so
that whoever runs the graph makes one collective of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("footplate::average", mutates_args=())
def average(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors averaged over the devices that run the same program; of one device, themselves."""
    return [tensor.clone() for tensor in tensors]


@average.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def average_gradients(parameters: list[Tensor]) -> None:
    """Average the gradients of parameters over the devices, where they have any."""
    learning = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for (parameter, _), mean in zip(learning, average([gradient for _, gradient in learning]), strict=True):
        parameter.grad = mean


def average_step(parameters: list[Tensor], loss: Tensor, logs: dict[str, Tensor], buffers: list[Tensor]) -> Tensor:
    """Average, all at once, what devices have each computed of their own part of the batch.

    Gradients and floating-point buffers (BatchNorm's statistics) are changed in place, and so is the dictionary of logs,
    where whole numbers become means too.

    Returns:
        The averaged loss, detached.
    """
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in learning if parameter.grad is not None]
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    values = [value if value.is_floating_point() else value.to(loss.dtype) for value in logs.values()]
    averaged = iter(average([*gradients, *floating, *values, loss.detach()]))
    for parameter in learning:
        parameter.grad = next(averaged)
    with torch.no_grad():
        for buffer in floating:
            buffer.copy_(next(averaged))
    for name in logs:
        logs[name] = next(averaged)
    return next(averaged)


def average_logs(logs: dict[str, Tensor], names: list[str]) -> None:
    """Average, in place, what hooks have logged of these names after the backward pass."""
    if names:
        values = [logs[name] if logs[name].is_floating_point() else logs[name].float() for name in names]
        logs.update(zip(names, average(values), strict=True))
