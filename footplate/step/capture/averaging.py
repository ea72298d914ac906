"""The one point of a step at which devices meet: an operation that averages gradients over all of them.

While a step is captured it does nothing but stand in the graph, once for all gradients, so that whoever runs the graph
makes one collective of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("footplate::average", mutates_args=())
def average(gradients: list[Tensor]) -> list[Tensor]:
    """Gradients averaged over the devices that run the same program; of one device, themselves."""
    return [gradient.clone() for gradient in gradients]


@average.register_fake
def _(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(gradient) for gradient in gradients]


def average_gradients(parameters: list[Tensor]) -> None:
    """Put averaged gradients in the place of the parameters' own."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    averaged = average([parameter.grad for parameter in learning if parameter.grad is not None])
    for parameter, gradient in zip(learning, averaged, strict=True):
        parameter.grad = gradient
