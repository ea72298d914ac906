"""The collectives: each has a form that waits, a form that returns a handle (`_async`), and both in place (trailing `_`).

All ranks match an operation by its name; an operation without a name by the order of calls of its kind. Results are
averages unless `op` is given. The forms that wait and don't work in place are differentiable, as Horovod's are. `forms.py`
makes the other forms of a verb from one function, which has a leading underscore here.
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
    """Wait until all ranks of a process set have called this function.

    Examples:
        >>> hvd.barrier()
    """
    signature = Signature("barrier", process_set=member(process_set))
    Operation(Request(signature, []), None, lambda outputs: None).result()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and take part in sums with zeros until all ranks have joined.

    Averages are still over all ranks. `device` is accepted and not needed.

    Returns:
        The rank that joined last.

    Examples:
        >>> hvd.join()
        0
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
    """`allreduce` of several tensors as one operation.

    Examples:
        >>> hvd.grouped_allreduce([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], op=hvd.Sum)
        [tensor([1., 2.]), tensor([3.])]
    """
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
    """Average all ranks' tensors, which have one shape and type; or reduce them with `op`.

    Args:
        tensor: the tensor of this rank. It isn't changed.
        average: False is the same as `op=Sum`; use `op`.
        name: the operation's name on all ranks.
        compression: compresses the tensor before it is sent.
        op: Average, Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Examples:
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), name="losses")  # with several ranks, the mean of their tensors
        tensor([1., 2.])
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


allreduce_ = done(
    "allreduce_",
    in_place(_allreduce),
    """`allreduce` in place.

    Examples:
        >>> losses = torch.tensor([1.0, 2.0])
        >>> hvd.allreduce_(losses) is losses
        True
    """,
)
allreduce_async = begun(
    "allreduce_async",
    _allreduce,
    """`allreduce` that doesn't wait. The tensor must not change until it is synchronized.

    Examples:
        >>> handle = hvd.allreduce_async(torch.tensor([1.0, 2.0]))
        >>> hvd.synchronize(handle)
        tensor([1., 2.])
    """,
)
allreduce_async_ = begun(
    "allreduce_async_",
    in_place(_allreduce),
    """`allreduce` in place that doesn't wait.

    Examples:
        >>> losses = torch.tensor([1.0, 2.0])
        >>> hvd.synchronize(hvd.allreduce_async_(losses)) is losses
        True
    """,
)
grouped_allreduce_ = done(
    "grouped_allreduce_",
    in_place(_grouped_allreduce),
    """`grouped_allreduce` in place.

    Examples:
        >>> losses, rows = torch.tensor([1.0]), torch.tensor([64])
        >>> hvd.grouped_allreduce_([losses, rows], op=hvd.Sum)
        [tensor([1.]), tensor([64])]
    """,
)
grouped_allreduce_async = begun(
    "grouped_allreduce_async",
    _grouped_allreduce,
    """`grouped_allreduce` that doesn't wait.

    Examples:
        >>> handle = hvd.grouped_allreduce_async([torch.tensor([1.0]), torch.tensor([2.0])])
        >>> hvd.synchronize(handle)
        [tensor([1.]), tensor([2.])]
    """,
)
grouped_allreduce_async_ = begun(
    "grouped_allreduce_async_",
    in_place(_grouped_allreduce),
    """`grouped_allreduce` in place that doesn't wait.

    Examples:
        >>> losses, rows = torch.tensor([1.0]), torch.tensor([64])
        >>> hvd.synchronize(hvd.grouped_allreduce_async_([losses, rows], op=hvd.Sum))
        [tensor([1.]), tensor([64])]
    """,
)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Average or sum sparse tensors: indices and values are gathered. Return a function that waits for the result.

    Examples:
        >>> wait = hvd.sparse_allreduce_async(torch.tensor([0.0, 2.0, 0.0]).to_sparse())
        >>> wait().to_dense()
        tensor([0., 2., 0.])
    """
    sparse = tensor.coalesce()
    labels = (f"{name}.indices", f"{name}.values") if name else (None, None)
    indices = allgather_async(sparse.indices().t().contiguous(), labels[0], process_set)
    values = allgather_async(sparse.values(), labels[1], process_set)
    ranks = len(process_set.ranks)

    def finish() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / ranks
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, device=tensor.device).coalesce()

    return finish


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation.

    Examples:
        >>> hvd.grouped_allgather([torch.tensor([1, 2]), torch.tensor([3])])
        [tensor([1, 2]), tensor([3])]
    """
    return list(Allgather.apply(name, process_set, *tensors))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate all ranks' tensors along the first dimension, whose size alone may differ.

    Examples:
        >>> hvd.allgather(torch.tensor([[1, 2]])).shape  # a row from each rank
        torch.Size([1, 2])
    """
    return grouped_allgather([tensor], name, process_set)[0]


def _allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation[Tensor]:
    return first(gather([tensor], name, process_set))


allgather_async = begun(
    "allgather_async",
    _allgather,
    """`allgather` that doesn't wait.

    Examples:
        >>> handle = hvd.allgather_async(torch.tensor([1, 2]))
        >>> hvd.synchronize(handle)
        tensor([1, 2])
    """,
)
grouped_allgather_async = begun(
    "grouped_allgather_async",
    gather,
    """`grouped_allgather` that doesn't wait.

    Examples:
        >>> handle = hvd.grouped_allgather_async([torch.tensor([1, 2]), torch.tensor([3])])
        >>> hvd.synchronize(handle)
        [tensor([1, 2]), tensor([3])]
    """,
)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Send the tensor of rank `root_rank` (a rank of the whole world, in a process set too) to all ranks.

    Examples:
        >>> hvd.broadcast(torch.tensor([1, 2]), root_rank=0)
        tensor([1, 2])
    """
    return Broadcast.apply(tensor, root_rank, name, process_set)


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation[Tensor]:
    return first(send([tensor], root_rank, name, process_set))


broadcast_ = done(
    "broadcast_",
    in_place(_broadcast),
    """`broadcast` in place.

    Examples:
        >>> weights = torch.tensor([1.0, 2.0])
        >>> hvd.broadcast_(weights, root_rank=0) is weights
        True
    """,
)
broadcast_async = begun(
    "broadcast_async",
    _broadcast,
    """`broadcast` that doesn't wait.

    Examples:
        >>> handle = hvd.broadcast_async(torch.tensor([1, 2]), root_rank=0)
        >>> hvd.synchronize(handle)
        tensor([1, 2])
    """,
)
broadcast_async_ = begun(
    "broadcast_async_",
    in_place(_broadcast),
    """`broadcast` in place that doesn't wait.

    Examples:
        >>> weights = torch.tensor([1.0, 2.0])
        >>> hvd.synchronize(hvd.broadcast_async_(weights, root_rank=0)) is weights
        True
    """,
)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank, and receive rows from each rank.

    Args:
        tensor: the rows for rank 0, then the rows for rank 1, …
        splits: the number of rows for each rank (int32 or int64); None for equal parts.
        name: the operation's name on all ranks.
        process_set: the ranks that take part.

    Returns:
        The received rows, in the order of ranks; with `splits`, also the number of rows from each rank.

    Examples:
        >>> rows, counts = hvd.alltoall(torch.tensor([1, 2, 3]), splits=[3])  # one number for each rank
        >>> rows, counts
        (tensor([1, 2, 3]), tensor([3], dtype=torch.int32))
    """
    output, received = Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


alltoall_async = begun(
    "alltoall_async",
    exchange,
    """`alltoall` that doesn't wait. Its result is always the rows and the number of rows from each rank.

    Examples:
        >>> handle = hvd.alltoall_async(torch.tensor([1, 2, 3]))
        >>> hvd.synchronize(handle)
        (tensor([1, 2, 3]), tensor([3], dtype=torch.int32))
    """,
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
    """`reducescatter` of several tensors as one operation.

    Examples:
        >>> hvd.grouped_reducescatter([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        [tensor([1., 2.]), tensor([3.])]
    """
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
    """Average (or sum) all ranks' tensors, and return this rank's share of the rows; the first ranks may get one more.

    Examples:
        >>> hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum)
        tensor([1., 2.])
    """
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


reducescatter_async = begun(
    "reducescatter_async",
    _reducescatter,
    """`reducescatter` that doesn't wait.

    Examples:
        >>> handle = hvd.reducescatter_async(torch.tensor([1.0, 2.0]))
        >>> hvd.synchronize(handle)
        tensor([1., 2.])
    """,
)
grouped_reducescatter_async = begun(
    "grouped_reducescatter_async",
    _grouped_reducescatter,
    """`grouped_reducescatter` that doesn't wait.

    Examples:
        >>> handle = hvd.grouped_reducescatter_async([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        >>> hvd.synchronize(handle)
        [tensor([1., 2.]), tensor([3.])]
    """,
)


def _compressed(compression: Any, tensors: Sequence[Tensor], reduced: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
    """Compress tensors, reduce them, and decompress the results."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = reduced(*(compressed for compressed, _ in pairs))
    return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]
