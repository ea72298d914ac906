"""The norm of gradients that are sharded over the dimensions of a grid of ranks, and clipping by it.

A gradient may be cut along both dimensions, along one, or along none. torch's `clip_grad_norm_` takes gradients of one
device mesh only. Here, each rank sums the squares of its own parts, and a sum goes over the dimensions along which the
parts were cut:

    norm² = Σ over kinds of gradients  (Σ over the ranks that hold different parts  Σ part²)

A kind is a mesh and the dimensions of it that cut. So there is one collective for each kind and dimension, whatever the
number of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from footplate.distributed.loss_sum import divide_gradients

Kind = tuple[Any, tuple[int, ...]]


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients, as if they were one vector; the same on all ranks. All ranks call it.

    Args:
        gradients: plain tensors, which are the same on all ranks, and sharded ones.
    """
    kinds: dict[Kind, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(_kind_of(gradient), []).append(local_part(gradient))

    squares: list[Tensor] = []
    for (mesh, dimensions), parts in kinds.items():
        norm = torch.nn.utils.get_total_norm(parts)
        square = norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
        for dimension in dimensions:
            dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return (
        torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt() if squares else torch.zeros(())
    )


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], value: float, algorithm: str) -> None:
    """Clip gradients in place, by their "norm" over all ranks or by "value". All ranks call it."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if algorithm == "value":
        for gradient in gradients:
            local_part(gradient).clamp_(-value, value)
        return
    # torch's clip_grads_with_norm_ multiplies by the inverse.
    divide_gradients(parameters, ((total_norm(gradients) + 1e-6) / value).clamp(min=1.0))


def clip_by_torch(parameters: Iterable[nn.Parameter], value: float, algorithm: str) -> None:
    """Clip gradients of one mesh, or of none, in place, by "norm" or by "value"."""
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)


def local_part(tensor: Any) -> Tensor:
    """The part of a sharded tensor that this rank holds, in the same memory; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _kind_of(gradient: Any) -> Kind:
    if not hasattr(gradient, "placements"):
        return None, ()
    cut = tuple(index for index, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.device_mesh, cut
