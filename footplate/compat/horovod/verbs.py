"""The collectives: each with a form that waits, one that returns a handle (`_async`), and one in place (trailing `_`).

An operation is known by its name on all ranks; without one, by the order of calls of its kind. Results are averages unless
`op` says otherwise. Those that wait and don't work in place let gradients through, as Horovod's do; the other forms of a
verb are made from one function, here with a leading underscore (`forms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from footplate.compat.horovod.compression import Compression
from footplate.compat.horovod.differentiable import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from footplate.compat.horovod.forms import begun, done, in_place
from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request
from footplate.compat.horovod.submit import (
    Average,
    Operation,
    ReduceOp,
    chosen_op,
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
    Operation(Request(signature, []), None, lambda outputs: None).result()


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and take part in the others' sums with zeros until all have said so.

    Averages are still taken over all ranks. `device` is accepted and not needed.

    Returns:
        The rank that joined last.
    """
    return context().engine.join()


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
    how = (name, chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, partial(Allreduce.apply, *how))


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
    how = (average, name, compression, op, prescale_factor, postscale_factor, process_set)
    return grouped_allreduce([tensor], *how)[0]


def _grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation[list[Tensor]]:
    return reduce("allreduce", tensors, chosen_op(op, average), name, prescale_factor, postscale_factor, process_set)


def _allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation[Tensor]:
    return first(_grouped_allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set))


allreduce_ = done("allreduce_", in_place(_allreduce), "`allreduce` in place.")
allreduce_async = begun(
    "allreduce_async", _allreduce, "`allreduce` that doesn't wait. The tensor must not change until it is synchronized."
)
allreduce_async_ = begun("allreduce_async_", in_place(_allreduce), "`allreduce` in place that doesn't wait.")
grouped_allreduce_ = done("grouped_allreduce_", in_place(_grouped_allreduce), "`grouped_allreduce` in place.")
grouped_allreduce_async = begun("grouped_allreduce_async", _grouped_allreduce, "`grouped_allreduce` that doesn't wait.")
grouped_allreduce_async_ = begun(
    "grouped_allreduce_async_", in_place(_grouped_allreduce), "`grouped_allreduce` in place that doesn't wait."
)


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


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation."""
    return list(Allgather.apply(name, process_set, *tensors))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors, put together along the first dimension, in which alone they may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


def _allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation[Tensor]:
    return first(gather([tensor], name, process_set))


allgather_async = begun("allgather_async", _allgather, "`allgather` that doesn't wait.")
grouped_allgather_async = begun("grouped_allgather_async", gather, "`grouped_allgather` that doesn't wait.")


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of `root_rank` (a rank of the whole world, also in a process set), on all ranks."""
    return Broadcast.apply(tensor, root_rank, name, process_set)


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation[Tensor]:
    return first(send([tensor], root_rank, name, process_set))


broadcast_ = done("broadcast_", in_place(_broadcast), "`broadcast` in place.")
broadcast_async = begun("broadcast_async", _broadcast, "`broadcast` that doesn't wait.")
broadcast_async_ = begun("broadcast_async_", in_place(_broadcast), "`broadcast` in place that doesn't wait.")


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


alltoall_async = begun(
    "alltoall_async",
    exchange,
    "`alltoall` that doesn't wait; its result is always the rows and how many came from each rank.",
)


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
    how = (name, op, process_set, prescale_factor, postscale_factor)
    return _compressed(compression, tensors, partial(Reducescatter.apply, *how))


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
    how = (name, compression, op, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], *how)[0]


def _grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation[list[Tensor]]:
    return reduce("reducescatter", tensors, op, name, prescale_factor, postscale_factor, process_set)


def _reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation[Tensor]:
    return first(_grouped_reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor))


reducescatter_async = begun("reducescatter_async", _reducescatter, "`reducescatter` that doesn't wait.")
grouped_reducescatter_async = begun(
    "grouped_reducescatter_async", _grouped_reducescatter, "`grouped_reducescatter` that doesn't wait."
)


def _compressed(compression: Any, tensors: Sequence[Tensor], reduced: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
    """What a reduction makes of tensors that travel compressed."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = reduced(*(travelling for travelling, _ in pairs))
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(outputs, pairs, strict=True)]
