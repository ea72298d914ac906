"""The collectives: each with a form that waits, one that returns a handle (`_async`), and one in place (trailing `_`).

An operation is known by its name on all ranks; without one, by the order of calls of its kind. Results are averages unless
`op` says otherwise. Those that wait and don't work in place let gradients through, as Horovod's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from footplate.compat.horovod.compression import Compression
from footplate.compat.horovod.differentiable import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from footplate.compat.horovod.engine import Handle
from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request
from footplate.compat.horovod.submit import (
    Average,
    ReduceOp,
    chosen_op,
    every,
    exchange,
    first,
    gather,
    member,
    reduce,
    send,
    synchronize,
)
from footplate.compat.horovod.world import ProcessSet, context, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set are here."""
    signature = Signature("barrier", process_set=member(process_set))
    synchronize(context().engine.submit(Request(signature, []), None, pack=lambda outputs: None))


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and take part in the others' sums with zeros until all have said so.

    Averages are still taken over all ranks. `device` is accepted and not needed.

    Returns:
        The rank that joined last.
    """
    return context().engine.join()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The average (or what `op` says) of all ranks' tensors, which have one shape and type.

    Args:
        tensor: this rank's; left as it is.
        average: False is the same as `op=Sum`; use `op`.
        name: by which it is known on all ranks.
        compression: what travels in its place.
        op: Average, Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.
    """
    travelling, ctx = compression.compress(tensor)
    reduced = Allreduce.apply(name, chosen_op(op, average), prescale_factor, postscale_factor, process_set, travelling)[
        0
    ]
    return compression.decompress(reduced, ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce` that doesn't wait. The tensor must not change until it is synchronized."""
    return reduce("allreduce", [tensor], chosen_op(op, average), name, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce` in place that doesn't wait."""
    return reduce(
        "allreduce",
        [tensor],
        chosen_op(op, average),
        name,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=True,
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    travelling = [one for one, _ in pairs]
    reduced = Allreduce.apply(name, chosen_op(op, average), prescale_factor, postscale_factor, process_set, *travelling)
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce` that doesn't wait."""
    given = (chosen_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return reduce("allreduce", tensors, *given, pack=every)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce` in place that doesn't wait."""
    given = (chosen_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return reduce("allreduce", tensors, *given, in_place=True, pack=every)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """The average or sum of sparse tensors: indices and values are gathered. Returns a function that waits for it."""
    sparse = tensor.coalesce()
    labels = (f"{name}.indices", f"{name}.values") if name else (None, None)
    indices = allgather_async(sparse.indices().t().contiguous(), labels[0], process_set)
    values = allgather_async(sparse.values(), labels[1], process_set)
    ranks = len(process_set.ranks)

    def finish() -> Tensor:
        found, places = synchronize(values), synchronize(indices)
        if op == Average:
            found = found / ranks
        return torch.sparse_coo_tensor(places.t(), found, tensor.shape, device=tensor.device).coalesce()

    return finish


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors, put together along the first dimension, in which alone they may differ."""
    return Allgather.apply(name, process_set, tensor)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """`allgather` that doesn't wait."""
    return gather([tensor], name, process_set, first)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation."""
    return list(Allgather.apply(name, process_set, *tensors))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`grouped_allgather` that doesn't wait."""
    return gather(tensors, name, process_set, every)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of `root_rank` (a rank of the whole world, also in a process set), on all ranks."""
    return Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast` that doesn't wait."""
    return send([tensor], root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast` in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast` in place that doesn't wait."""
    return send([tensor], root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give each rank some rows, and get some from each.

    Args:
        tensor: rows for rank 0, then those for rank 1, …
        splits: how many for each rank (int32 or int64); None for equal parts.
        name: by which it is known on all ranks.
        process_set: the ranks that take part.

    Returns:
        The rows that came, in the order of ranks; with `splits`, also how many came from each.
    """
    output, received = Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`alltoall` that doesn't wait; its result is always the rows and how many came from each rank."""
    return exchange(tensor, splits, name, process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The rows that this rank gets of the average (or sum) of all ranks' tensors; the first ranks may get one more."""
    travelling, ctx = compression.compress(tensor)
    reduced = Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, travelling)[0]
    return compression.decompress(reduced, ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter` that doesn't wait."""
    return reduce("reducescatter", [tensor], op, name, prescale_factor, postscale_factor, process_set)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    travelling = [one for one, _ in pairs]
    reduced = Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *travelling)
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`grouped_reducescatter` that doesn't wait."""
    given = (op, name, prescale_factor, postscale_factor, process_set)
    return reduce("reducescatter", tensors, *given, pack=every)
