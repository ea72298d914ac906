"""Many tensors through few collectives: packed into flat buckets, sent, and unpacked in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from footplate.hardware.transfer import to_device

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's


def buckets(tensors: Iterable[Tensor], nbytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Tensors in groups of one type and device, each of about `nbytes` at most, in an order that depends on these alone."""
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
def send_from_first(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of rank 0; every rank has the same ones in the same order."""
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.broadcast(flat, src=0)
        _unpack(flat, bucket)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of some parameters over the ranks, in place.

    A parameter that got no gradient on this rank counts as zero here; one that got none on any rank keeps none, so that
    its optimizer passes it over. The parameters themselves tell who has one: a flag for each goes with its bucket.
    """
    world = dist.get_world_size()
    for bucket in buckets(parameters):
        present = torch.tensor([float(p.grad is not None) for p in bucket], dtype=bucket[0].dtype)  # type: ignore[union-attr]
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([*(tensor.reshape(-1) for tensor in found), present.to(bucket[0].device)])
        dist.all_reduce(flat)
        flags = flat[-len(bucket) :]
        missing = [index for index, p in enumerate(bucket) if p.grad is None]
        if missing:
            there = flags.tolist()
            for index in missing:
                if there[index]:
                    bucket[index].grad = found[index]
        _unpack(flat.div_(world), found)


def mean_over_ranks(number: Tensor) -> Tensor:
    """The mean of a tensor over the ranks; the same bits on all of them."""
    total = number.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """A bucket's tensors on another device, by one transfer; themselves where that is where they are."""
    if not tensors or tensors[0].device == device:
        return tensors
    return views(to_device(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), device), tensors)


def views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor that stand for some tensors, one after the other, in their shapes."""
    parts, start = [], 0
    for tensor in tensors:
        parts.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return parts


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, views(flat, tensors), strict=True):
        tensor.copy_(part)
