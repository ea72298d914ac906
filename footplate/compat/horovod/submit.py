"""Operations of the verbs: their arguments are checked, and their signatures made.

`reduce`, `gather`, `send` and `exchange` each return an `Operation`: `submit()` announces it and returns a handle,
`result()` waits for its result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from footplate.compat.horovod.engine import Handle
from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request
from footplate.compat.horovod.world import ProcessSet, context, global_process_set
from footplate.core.errors import ConfigError

Result = TypeVar("Result")


class ReduceOp(enum.StrEnum):
    """A reduction of the values of several ranks."""

    Average = "average"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "product"


Average = ReduceOp.Average
"""The mean over the ranks: `hvd.allreduce(tensor, op=hvd.Average)`, which is the default."""
Sum = ReduceOp.Sum
"""The sum over the ranks."""
Adasum = ReduceOp.Adasum
"""A sum of gradients that adapts to their directions: equal ones are averaged, orthogonal ones are added."""
Min = ReduceOp.Min
"""The least value of all ranks."""
Max = ReduceOp.Max
"""The greatest value of all ranks."""
Product = ReduceOp.Product
"""The product over the ranks."""

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


@dataclass(frozen=True)
class Operation(Generic[Result]):
    """An operation that a verb has made and not submitted.

    Attributes:
        request: the tensors and the signature.
        name: the operation's name on all ranks; None matches it by the order of calls.
        pack: makes the result of the output tensors.
        numbers: rows or splits, which may differ between ranks.
    """

    request: Request
    name: str | None
    pack: Callable[[list[Tensor]], Result]
    numbers: Sequence[int] = ()

    def in_place(self) -> Operation[Result]:
        """The same operation, with its results written into its inputs."""
        return replace(self, request=replace(self.request, in_place=True))

    def submit(self) -> Handle[Result]:
        """Announce the operation to rank 0, without waiting."""
        return context().engine.submit(self.request, self.name, self.numbers, self.pack)

    def result(self) -> Result:
        """Submit the operation, and wait for its result."""
        return synchronize(self.submit())


def synchronize(handle: Handle[Result] | Callable[[], Result]) -> Result:
    """Wait for an operation, and return its result.

    Raises:
        HorovodInternalError: the operation can't be completed; a `MismatchError` if the ranks disagree about it.

    Examples:
        >>> handle = hvd.allreduce_async(torch.tensor([1.0, 2.0]))
        >>> hvd.synchronize(handle)
        tensor([1., 2.])
    """
    return handle() if callable(handle) else context().engine.finish(handle)


def poll(handle: Handle[Any]) -> bool:
    """Return True if `synchronize` would return at once.

    Examples:
        >>> handle = hvd.allreduce_async(torch.tensor([1.0, 2.0]))
        >>> while not hvd.poll(handle):
        ...     pass  # compute something else meanwhile
        >>> hvd.synchronize(handle)
        tensor([1., 2.])
    """
    return context().engine.done(handle)


def first(operation: Operation[list[Tensor]]) -> Operation[Tensor]:
    """Turn an operation on a list of one tensor into an operation on the tensor."""
    return Operation(operation.request, operation.name, lambda outputs: outputs[0], operation.numbers)


def reduce(
    kind: str,
    tensors: Sequence[Tensor],
    op: ReduceOp,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation[list[Tensor]]:
    """Make an allreduce or a reducescatter of several tensors."""
    number = member(process_set)
    _check_reduction(kind, op, tensors, process_set)
    signature = signature_of(kind, tensors, number, op=str(op), prescale=float(prescale), postscale=float(postscale))
    return Operation(Request(signature, tensors), name, list)


def gather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation[list[Tensor]]:
    """Make an allgather of several tensors."""
    number = member(process_set)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ConfigError("allgather of a scalar: expected at least one dimension. Use tensor.reshape(1).")
    request = Request(signature_of("allgather", tensors, number, rows=False), tensors)
    return Operation(request, name, list, [len(tensor) for tensor in tensors])


def send(
    tensors: Sequence[Tensor],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    parts: str = "",
) -> Operation[list[Tensor]]:
    """Make a broadcast of several tensors; error texts name them as `parts`."""
    number = member(process_set)
    if root_rank not in process_set.ranks:
        raise ConfigError(f"root_rank={root_rank}: expected one of the ranks that take part, {process_set.ranks}.")
    signature = signature_of("broadcast", tensors, number, root=root_rank, parts=parts)
    return Operation(Request(signature, tensors), name, list)


def exchange(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation[tuple[Tensor, Tensor]]:
    """Make an alltoall. Its result is the received rows, and the number of rows from each rank."""
    number = member(process_set)
    sends = _splits(tensor, splits, len(process_set.ranks))
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    request = Request(signature_of("alltoall", [tensor], number, rows=False), [tensor])
    return Operation(request, name, lambda outputs: (outputs[0], outputs[1].to(like)), sends)


def _check_reduction(kind: str, op: ReduceOp, tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE))
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
            raise ConfigError(
                "reducescatter of a scalar: expected at least one dimension, which is divided between the ranks."
            )


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, ranks: int) -> list[int]:
    if tensor.dim() == 0:
        raise ConfigError("alltoall of a scalar: expected at least one dimension. Use tensor.reshape(1).")
    if splits is None:
        if len(tensor) % ranks:
            raise ConfigError(
                f"alltoall of {len(tensor)} rows to {ranks} ranks: equal parts are not possible. Give splits=."
            )
        return [len(tensor) // ranks] * ranks
    if isinstance(splits, Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"alltoall(splits=…) of {splits.dtype}: expected int32 or int64.")
    counts = [int(n) for n in splits]
    if len(counts) != ranks or sum(counts) > len(tensor) or min(counts) < 0:
        raise ConfigError(f"alltoall(splits={counts}): expected {ranks} numbers, {len(tensor)} rows together.")
    if sum(counts) < len(tensor):
        raise ConfigError(
            f"alltoall(splits={counts}): these are {sum(counts)} rows of {len(tensor)}. Cut the tensor first."
        )
    return counts


def member(process_set: ProcessSet) -> int:
    """The number of a process set that this rank belongs to.

    Raises:
        ConfigError: the set wasn't added, or this rank doesn't belong to it.
    """
    context()
    if process_set.process_set_id is None:
        raise ConfigError(f"{process_set!r} is not known: call hvd.add_process_set on all ranks first.")
    if not process_set.included():
        raise ConfigError(f"{process_set!r}: rank {context().world.rank} doesn't belong to it, so it can't take part.")
    return process_set.process_set_id


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction that `op`, or its older form `average`, stands for.

    Raises:
        ConfigError: both were given, or there is no such reduction.
    """
    if op is not None and average is not None:
        raise ConfigError("op and average were both given: use op alone.")
    if op is None:
        return Sum if average is False else Average
    if op not in list(ReduceOp):
        raise ConfigError(f"op={op!r}: expected hvd.Average, Sum, Adasum, Min, Max or Product.")
    return ReduceOp(op)


def signature_of(kind: str, tensors: Sequence[Tensor], process_set: int, rows: bool = True, **more: Any) -> Signature:
    """The signature of an operation. With `rows`, all ranks must agree on the first dimension too."""
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
        **more,
    )
