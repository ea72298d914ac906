"""The collectives: each with a form that waits, one that returns a handle (`_async`), and one in place (trailing `_`).

An operation is known by its name on all ranks; without one, by the order of calls of its kind. Results are averages unless
`op` says otherwise. Those that wait and don't work in place let gradients through, as Horovod's do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from footplate.compat.horovod.compression import Compression
from footplate.compat.horovod.engine import Handle
from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request
from footplate.compat.horovod.world import ProcessSet, context, global_process_set
from footplate.errors import ConfigError


class ReduceOp(enum.StrEnum):
    """How values of several ranks become one."""

    Average = "average"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "product"


Average, Sum, Adasum, Min, Max, Product = ReduceOp

REDUCIBLE = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}

_only = lambda outputs: outputs[0]  # noqa: E731
_all = lambda outputs: list(outputs)  # noqa: E731


def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Wait for an operation; its result.

    Raises:
        HorovodInternalError: it can't be completed; a `MismatchError` if the ranks don't agree on it.
    """
    return handle() if callable(handle) else context().engine.finish(handle)


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return context().engine.done(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set are here."""
    signature = Signature("barrier", process_set=_member(process_set))
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
    reduced = _Allreduce.apply(name, _op(op, average), prescale_factor, postscale_factor, process_set, travelling)[0]
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
    return _reduce("allreduce", [tensor], _op(op, average), name, prescale_factor, postscale_factor, process_set)


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
    return _reduce(
        "allreduce", [tensor], _op(op, average), name, prescale_factor, postscale_factor, process_set, in_place=True
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
    reduced = _Allreduce.apply(name, _op(op, average), prescale_factor, postscale_factor, process_set, *travelling)
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
    given = (_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return _reduce("allreduce", tensors, *given, pack=_all)


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
    given = (_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return _reduce("allreduce", tensors, *given, in_place=True, pack=_all)


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
    return _Allgather.apply(name, process_set, tensor)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """`allgather` that doesn't wait."""
    return _gather([tensor], name, process_set, _only)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation."""
    return list(_Allgather.apply(name, process_set, *tensors))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`grouped_allgather` that doesn't wait."""
    return _gather(tensors, name, process_set, _all)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of `root_rank` (a rank of the whole world, also in a process set), on all ranks."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


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
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`alltoall` that doesn't wait; its result is always the rows and how many came from each rank."""
    number = _member(process_set)
    sends = _splits(tensor, splits, len(process_set.ranks))
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    request = Request(_signature("alltoall", [tensor], number, rows=False), [tensor])
    return context().engine.submit(request, name, sends, lambda outputs: (outputs[0], outputs[1].to(like)))


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
    reduced = _Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, travelling)[0]
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
    return _reduce("reducescatter", [tensor], op, name, prescale_factor, postscale_factor, process_set)


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
    reduced = _Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *travelling)
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
    return _reduce("reducescatter", tensors, *given, pack=_all)


def send(
    tensors: Sequence[Tensor],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
    parts: str = "",
    pack: Callable[[list[Tensor]], Any] = _only,
) -> Handle:
    """Broadcast several tensors as one operation; `parts` names them in messages."""
    number = _member(process_set)
    if root_rank not in process_set.ranks:
        raise ConfigError(f"root_rank={root_rank}: expected one of the ranks that take part, {process_set.ranks}.")
    signature = _signature("broadcast", tensors, number, root=root_rank, parts=parts)
    return context().engine.submit(Request(signature, tensors, in_place), name, (), pack)


def _reduce(
    kind: str,
    tensors: Sequence[Tensor],
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool = False,
    pack: Callable[[list[Tensor]], Any] = _only,
) -> Handle:
    number = _member(process_set)
    _check_reduction(kind, op, tensors, process_set)
    signature = _signature(kind, tensors, number, op=str(op), prescale=float(prescale), postscale=float(postscale))
    return context().engine.submit(Request(signature, tensors, in_place), name, (), pack)


def _check_reduction(kind: str, op: ReduceOp, tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE:
            known = ", ".join(sorted(str(one).removeprefix("torch.") for one in REDUCIBLE))
            raise ConfigError(f"{kind} of a tensor of {tensor.dtype}: expected one of {known}. Convert it first.")
    if op == Adasum:
        ranks = len(process_set.ranks)
        if kind != "allreduce" or process_set.process_set_id != global_process_set.process_set_id:
            raise ConfigError("op=Adasum: supported in allreduce over all ranks only.")
        if ranks & (ranks - 1):
            raise ConfigError(f"op=Adasum: needs a number of ranks that is a power of two; there are {ranks}.")
    if kind == "reducescatter":
        if op not in (Average, Sum):
            raise ConfigError(f"reducescatter(op={op}): expected Average or Sum.")
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ConfigError("reducescatter of a scalar: expected at least one dimension, which is shared out.")


def _gather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, pack: Callable[[list[Tensor]], Any]
) -> Handle:
    number = _member(process_set)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ConfigError("allgather of a scalar: expected at least one dimension. Use tensor.reshape(1).")
    request = Request(_signature("allgather", tensors, number, rows=False), tensors)
    return context().engine.submit(request, name, [len(tensor) for tensor in tensors], pack)


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, ranks: int) -> list[int]:
    if tensor.dim() == 0:
        raise ConfigError("alltoall of a scalar: expected at least one dimension. Use tensor.reshape(1).")
    if splits is None:
        if len(tensor) % ranks:
            raise ConfigError(
                f"alltoall of {len(tensor)} rows to {ranks} ranks: give splits=, as they can't be equal parts."
            )
        return [len(tensor) // ranks] * ranks
    if isinstance(splits, Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"alltoall(splits=…) of {splits.dtype}: expected int32 or int64.")
    found = [int(n) for n in splits]
    if len(found) != ranks or sum(found) > len(tensor) or min(found) < 0:
        raise ConfigError(f"alltoall(splits={found}): expected {ranks} numbers, {len(tensor)} rows together.")
    if sum(found) < len(tensor):
        raise ConfigError(
            f"alltoall(splits={found}): these are {sum(found)} rows of {len(tensor)}. Cut the tensor first."
        )
    return found


def _member(process_set: ProcessSet) -> int:
    """The number of a process set which this rank belongs to."""
    context()
    if process_set.process_set_id is None:
        raise ConfigError(f"{process_set!r} is not known: call hvd.add_process_set on all ranks first.")
    if not process_set.included():
        raise ConfigError(f"{process_set!r}: rank {context().world.rank} doesn't belong to it, so it can't take part.")
    return process_set.process_set_id


def _op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    if op is not None and average is not None:
        raise ConfigError("op and average were both given: use op alone.")
    if op is None:
        return Sum if average is False else Average
    return ReduceOp(op)


def _signature(kind: str, tensors: Sequence[Tensor], process_set: int, rows: bool = True, **given: Any) -> Signature:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ConfigError(
            f"{kind}: tensors of {' and '.join(map(str, devices))} in one operation. Move them to one device."
        )
    return Signature(
        kind,
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        tuple(tuple(tensor.shape[0 if rows else 1 :]) for tensor in tensors),
        tuple(tensor.itemsize for tensor in tensors),
        next(iter(devices)).type if devices else "cpu",
        process_set=process_set,
        **given,
    )


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, *tensors: Tensor) -> Any:
        ctx.given = (op, prescale, postscale, process_set)
        handle = _reduce("allreduce", tensors, op, name, prescale, postscale, process_set, pack=tuple)
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.given
        if op not in (Average, Sum):
            raise ConfigError(f"allreduce(op={op}) lets no gradients through: only Average and Sum do.")
        handle = _reduce("allreduce", gradients, op, None, prescale, postscale, process_set, pack=tuple)
        return (None, None, None, None, None, *synchronize(handle))


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Tensor) -> Any:
        handle = _gather(tensors, name, process_set, tuple)
        ctx.process_set, ctx.rows = process_set, [len(tensor) for tensor in tensors]
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        process_set = ctx.process_set
        reduced = synchronize(grouped_allreduce_async(gradients, process_set=process_set))
        rows = allgather(torch.tensor([ctx.rows]), process_set=process_set)  # rows: (ranks, tensors)
        starts = rows[: process_set.rank()].sum(0).tolist()
        parts = [one[start : start + n] for one, start, n in zip(reduced, starts, ctx.rows, strict=True)]
        return (None, None, *parts)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = synchronize(allreduce_async(gradients[0], process_set=ctx.process_set))
        is_root = context().world.rank == ctx.root_rank
        return reduced if is_root else torch.zeros_like(reduced), None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received = process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        returned, _ = synchronize(alltoall_async(gradients[0], ctx.received, None, ctx.process_set))
        return returned, None, None, None


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, process_set: Any, prescale: Any, postscale: Any, *tensors: Tensor) -> Any:
        handle = _reduce("reducescatter", tensors, op, name, prescale, postscale, process_set, pack=tuple)
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * (len(process_set.ranks) if op == Sum else 1)
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        return (None, None, None, None, None, *synchronize(grouped_allgather_async(scaled, None, ctx.process_set)))
