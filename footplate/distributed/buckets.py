"""Flat buckets: many tensors through few collectives. Tensors are packed, sent, and unpacked in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from footplate.hardware.transfer import to_device

# The default of DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20
# From this size on, a tensor is sent alone, which needs no copy of it.
ALONE_BYTES = 2**20


def buckets(tensors: Iterable[Tensor], nbytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Group tensors of one type and device, of about `nbytes` at most. The order depends on the tensors alone."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        bucket: list[Tensor] = []
        filled = 0
        for tensor in kind:
            if bucket and filled + tensor.nbytes > nbytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.nbytes
        yield bucket


@torch.no_grad()
def send_from_first(tensors: Iterable[Tensor], group: Any = None) -> None:
    """Overwrite tensors with those of rank 0. Every rank passes the same tensors in the same order.

    Args:
        tensors: the tensors.
        group: a process group, whose first rank sends. Default: all ranks.
    """
    large: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors:
        (large if tensor.nbytes >= ALONE_BYTES and tensor.is_contiguous() else small).append(tensor)
    for tensor in large:
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    for bucket in buckets(small):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=0)
        _unpack(flat, bucket)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of some parameters over the ranks, in place.

    A parameter without a gradient on this rank counts as zero here. A parameter without a gradient on any rank keeps none,
    so its optimizer skips it. A flag for each parameter goes with its bucket and tells which ranks have a gradient.
    """
    world = dist.get_world_size()
    for bucket in buckets(parameters):
        present = torch.tensor([float(p.grad is not None) for p in bucket], dtype=bucket[0].dtype)  # type: ignore[union-attr]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), present.to(bucket[0].device)])
        dist.all_reduce(flat)
        flags = flat[-len(bucket) :]
        missing = [index for index, p in enumerate(bucket) if p.grad is None]
        if missing:
            ranks_with_gradient = flags.tolist()
            for index in missing:
                if ranks_with_gradient[index]:
                    bucket[index].grad = gradients[index]
        _unpack(flat.div_(world), gradients)


def mean_over_ranks(number: Tensor) -> Tensor:
    """The mean of a tensor over the ranks; the same bits on all of them."""
    total = number.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Move a bucket's tensors to a device in one transfer. Tensors that are there already are returned as they are."""
    if not tensors or tensors[0].device == device:
        return tensors
    return views(to_device(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), device), tensors)


def views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor with the shapes of `tensors`, one after the other."""
    parts, start = [], 0
    for tensor in tensors:
        parts.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return parts


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, views(flat, tensors), strict=True):
        tensor.copy_(part)
