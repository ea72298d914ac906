"""Runs a ready operation on torch.distributed.

`launch` starts an operation and returns at once; `Launched.finish` waits and returns the results. Every member of a process
set calls both: `launch` in the thread that received the answer, in the same order on all ranks, and `finish` in the thread
that needs the result. Values that are only moved (gathered, broadcast, exchanged) are sent as bytes, so any type works.

A small reduction needs no transfer. Each rank sends its tensors, `packed`, with its message to rank 0. Rank 0 reduces them
with `reduced`, and `launch` gets the result.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from footplate.compat.horovod.adasum import combined
from footplate.compat.horovod.negotiation import FUSION_BYTES, Signature
from footplate.distributed.buckets import buckets

_OPS = {
    "average": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

_COMBINE = {
    "average": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}

# The rows or splits of each member.
Numbers = Sequence[Sequence[int]]
# The output tensors of each request.
Results = list[list[Tensor]]


@dataclass(frozen=True)
class Place:
    """The place of this rank in a process set.

    Attributes:
        members: the ranks of the set.
        index: the position of this rank among them.
        group: torch's process group; None for a set of one rank.
    """

    members: tuple[int, ...]
    index: int
    group: Any = None

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass
class Request:
    """An operation that this rank has submitted.

    Attributes:
        signature: the properties that all ranks must agree on.
        tensors: the inputs.
        in_place: True if the results are written into the inputs.
        ready: for CUDA tensors, the event after which they have their values.
    """

    signature: Signature
    tensors: Sequence[Tensor]
    in_place: bool = False
    ready: Any = None


class Launched:
    """A running operation.

    Args:
        works: the transfers of torch.distributed.
        results: makes the outputs when the transfers have ended.
        buffers: memory that the transfers and `results` use.
    """

    def __init__(self, works: Sequence[Any], results: Callable[[], Results], buffers: Sequence[Tensor] = ()) -> None:
        self.works = works
        self.results = results
        self.buffers = buffers
        self._lock = threading.Lock()
        self._outputs: Results | None = None

    @property
    def done(self) -> bool:
        """True if `finish` would not wait."""
        return all(work.is_completed() for work in self.works)

    def finish(self, tick_s: float, check: Callable[[], None]) -> Results:
        """Wait for the results. `check` is called every `tick_s` while waiting, and may raise."""
        with self._lock:
            if self._outputs is None:
                # On CUDA, only the stream waits, not this thread.
                on_cuda = any(buffer.is_cuda for buffer in self.buffers)
                for work in self.works:
                    work.wait() if on_cuda else _wait(work, tick_s, check)
                for buffer in self.buffers if on_cuda else ():
                    buffer.record_stream(torch.cuda.current_stream(buffer.device))
                self._outputs = self.results()
                self.works = self.buffers = ()
            return self._outputs


def zeros(signature: Signature) -> Request:
    """Make the request of a rank that has joined: zeros."""
    device = torch.device(signature.device)
    tensors = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for dtype, shape in zip(signature.dtypes, signature.shapes, strict=True)
    ]
    return Request(signature, tensors, in_place=True)


def launch(requests: Sequence[Request], numbers: Numbers, place: Place, data: bytes = b"") -> Launched:
    """Start requests of one kind; several requests are fused sums. `data`: the reduced values of a small request."""
    if data:
        return _small(requests[0], data, place)
    with _on_device(requests):
        return _KINDS[requests[0].signature.kind](requests, numbers, place)


def packed(request: Request) -> bytes:
    """The tensors of a small request as bytes, multiplied by `prescale`."""
    flats = [tensor.detach().reshape(-1).contiguous() for tensor in request.tensors]
    if request.signature.prescale != 1.0:
        flats = [flat.clone() for flat in flats]
        for flat in flats:
            _scale(flat, request.signature.prescale)
    return b"".join(_bytes(flat).numpy().tobytes() for flat in flats)


def reduced(signature: Signature, packs: Sequence[bytes]) -> bytes:
    """Reduce the packed tensors of several ranks with the signature's operation.

    >>> summed = reduced(Signature("allreduce", ("uint8",), ((3,),), (1,), op="sum"), [bytes([1, 2, 3]), bytes([4, 5, 6])])
    >>> list(summed)
    [5, 7, 9]
    """
    combine = _COMBINE[signature.op]
    columns = zip(*(_unpacked(signature, pack) for pack in packs), strict=True)
    return b"".join(_bytes(functools.reduce(combine, column)).numpy().tobytes() for column in columns)


def _unpacked(signature: Signature, data: bytes) -> list[Tensor]:
    """The flat tensors of packed data."""
    counts = [math.prod(shape) for shape in signature.shapes]
    sizes = [count * itemsize for count, itemsize in zip(counts, signature.itemsizes, strict=True)]
    pieces = torch.frombuffer(bytearray(data), dtype=torch.uint8).split(sizes)
    # A piece may begin at an address that its type doesn't allow, so it is copied.
    return [piece.clone().view(getattr(torch, dtype)) for piece, dtype in zip(pieces, signature.dtypes, strict=True)]


def _small(request: Request, data: bytes, place: Place) -> Launched:
    def results() -> Results:
        flats = _unpacked(request.signature, data)
        for flat in flats:
            _finish(flat, request.signature, place)
        return [
            _placed(request, [flat.view(tensor.shape) for flat, tensor in zip(flats, request.tensors, strict=True)])
        ]

    return Launched([], results)


def _allreduce(requests: Sequence[Request], numbers: Numbers, place: Place) -> Launched:
    signature = requests[0].signature
    if signature.op == "adasum":
        return _adasum(requests[0], place)
    pieces, works = [], []
    for bucket in buckets((tensor for request in requests for tensor in request.tensors), FUSION_BYTES):
        # A single tensor that is changed in place needs no copy.
        in_place = len(requests) == len(bucket) == 1 and requests[0].in_place and bucket[0].is_contiguous()
        flat = (
            bucket[0].detach().view(-1) if in_place else torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        )
        _scale(flat, signature.prescale)
        if place.group is not None:
            works.append(dist.all_reduce(flat, _OPS[signature.op], group=place.group, async_op=True))
        pieces.append((flat, bucket))

    def results() -> Results:
        outputs: dict[int, Tensor] = {}
        for flat, bucket in pieces:
            _finish(flat, signature, place)
            parts = flat.split([tensor.numel() for tensor in bucket])
            outputs.update({id(tensor): part.view(tensor.shape) for tensor, part in zip(bucket, parts, strict=True)})
        return [_placed(request, [outputs[id(tensor)] for tensor in request.tensors]) for request in requests]

    return Launched(works, results, [flat for flat, _ in pieces])


def _adasum(request: Request, place: Place) -> Launched:
    """Gather all ranks' tensors on every rank, and combine them there."""
    tensors = [tensor.detach().clone() for tensor in request.tensors]
    for tensor in tensors:
        _scale(tensor, request.signature.prescale)
    gathered = [[torch.empty_like(tensor) for _ in place.members] for tensor in tensors]
    works = []
    for tensor, all_ranks in zip(tensors, gathered, strict=True):
        if place.group is None:
            all_ranks[0].copy_(tensor)
        else:
            works.append(dist.all_gather(all_ranks, tensor, group=place.group, async_op=True))

    def results() -> Results:
        outputs = [combined(all_ranks) for all_ranks in gathered]
        for output in outputs:
            _scale(output, request.signature.postscale)
        return [_placed(request, outputs)]

    return Launched(works, results, tensors)


def _reducescatter(requests: Sequence[Request], numbers: Numbers, place: Place) -> Launched:
    (request,) = requests
    copies = Request(request.signature, [tensor.detach().clone() for tensor in request.tensors], in_place=True)
    whole = _allreduce([copies], numbers, place)

    def results() -> Results:
        outputs = []
        for tensor in whole.results()[0]:
            rows = shares(len(tensor), place.size)
            start = sum(rows[: place.index])
            outputs.append(tensor[start : start + rows[place.index]].clone())
        return [outputs]

    return Launched(whole.works, results, whole.buffers)


def _allgather(requests: Sequence[Request], numbers: Numbers, place: Place) -> Launched:
    (request,) = requests
    gathered, works = [], []
    for index, tensor in enumerate(request.tensors):
        rows = [member[index] for member in numbers]
        row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
        longest = max(rows) * row_bytes
        mine = _bytes(tensor.detach().contiguous())
        pieces = [mine]
        if place.group is not None:
            # All pieces of one all_gather must have the same length.
            padded = torch.cat([mine, mine.new_zeros(longest - len(mine))]) if len(mine) < longest else mine
            pieces = list(mine.new_empty(place.size, longest).unbind())
            if longest:
                works.append(dist.all_gather(pieces, padded, group=place.group, async_op=True))
        gathered.append((tensor.detach().new_empty(sum(rows), *tensor.shape[1:]), rows, pieces))

    def results() -> Results:
        for whole, rows, pieces in gathered:
            targets = _bytes(whole).split([n * len(_bytes(whole)) // max(1, sum(rows)) for n in rows])
            for target, source in zip(targets, pieces, strict=True):
                target.copy_(source[: len(target)])
        return [[whole for whole, _, _ in gathered]]

    return Launched(works, results, [piece for _, _, pieces in gathered for piece in pieces])


def _broadcast(requests: Sequence[Request], numbers: Numbers, place: Place) -> Launched:
    (request,) = requests
    root, rank = request.signature.root, place.members[place.index]

    # As bytes, tensors of all types fit into one buffer.
    flats = [_bytes(tensor.detach().contiguous()) for tensor in request.tensors]
    received: dict[int, Tensor] = {}
    works, buffers = [], []
    for bucket in buckets(flats, FUSION_BYTES):
        buffers.append(torch.cat(bucket))
        if place.group is not None and len(buffers[-1]):
            works.append(dist.broadcast(buffers[-1], src=root, group=place.group, async_op=True))
        parts = buffers[-1].split([len(flat) for flat in bucket])
        received.update({id(flat): part for flat, part in zip(bucket, parts, strict=True)})

    def results() -> Results:
        if rank == root and request.in_place:
            return [list(request.tensors)]
        pairs = zip(flats, request.tensors, strict=True)
        return [_placed(request, [_from_bytes(received[id(flat)], tensor) for flat, tensor in pairs])]

    return Launched(works, results, buffers)


def _alltoall(requests: Sequence[Request], numbers: Numbers, place: Place) -> Launched:
    (request,) = requests
    (tensor,) = request.tensors
    row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
    sends = numbers[place.index]
    receives = [member[place.index] for member in numbers]
    mine = tensor.detach().contiguous()
    if place.group is None:
        return Launched([], lambda: [[mine.clone(), torch.tensor(receives, dtype=torch.int32)]])
    received = mine.new_empty(sum(receives), *tensor.shape[1:])
    work = dist.all_to_all_single(
        _bytes(received), _bytes(mine), [n * row_bytes for n in receives], [n * row_bytes for n in sends],
        group=place.group, async_op=True,
    )  # fmt: skip
    return Launched([work], lambda: [[received, torch.tensor(receives, dtype=torch.int32)]], [received, mine])


def _barrier(requests: Sequence[Request], numbers: Numbers, place: Place) -> Launched:
    """Do nothing: a barrier is done when all ranks have started it."""
    return Launched([], lambda: [[]])


_KINDS = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "barrier": _barrier,
}


def shares(rows: int, size: int) -> list[int]:
    """The number of rows of a scattered tensor that each rank gets; the first ranks may get one more.

    >>> shares(5, 3)
    [2, 2, 1]
    """
    return [rows // size + (index < rows % size) for index in range(size)]


def _wait(work: Any, tick_s: float, check: Callable[[], None]) -> None:
    while True:
        try:
            work.wait(timedelta(seconds=tick_s))
            return
        except RuntimeError:
            # The time is over, or the transfer has failed.
            check()
            if work.is_completed():
                break
    # Raises the error of the transfer.
    work.wait()


def _placed(request: Request, outputs: list[Tensor]) -> list[Tensor]:
    """Write the outputs into the inputs of an operation in place; return the outputs."""
    if not request.in_place:
        return outputs
    with torch.no_grad():
        for tensor, output in zip(request.tensors, outputs, strict=True):
            if tensor.data_ptr() != output.data_ptr() or not tensor.is_contiguous():
                tensor.copy_(output)
    return list(request.tensors)


def _scale(flat: Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor).trunc_())


def _finish(flat: Tensor, signature: Signature, place: Place) -> None:
    """Divide an average by the number of ranks, and multiply by `postscale`."""
    if signature.op == "average":
        _divide(flat, place.size)
    _scale(flat, signature.postscale)


def _divide(flat: Tensor, size: int) -> None:
    """Divide in place; integers are rounded towards zero."""
    if size > 1:
        flat.div_(size) if flat.is_floating_point() else flat.div_(size, rounding_mode="trunc")


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as flat bytes in the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _from_bytes(flat: Tensor, like: Tensor) -> Tensor:
    # A piece may begin at an address that its type doesn't allow, so it is copied.
    return flat.clone().view(like.dtype).view(like.shape)


_streams: dict[torch.device, Any] = {}


@contextlib.contextmanager
def _on_device(requests: Sequence[Request]) -> Any:
    """For CUDA tensors: use a stream of our own, which waits until the tensors have their values."""
    tensors = [tensor for request in requests for tensor in request.tensors]
    if not tensors or not tensors[0].is_cuda:
        yield
        return
    device = tensors[0].device
    with torch.cuda.device(device):
        stream = _streams.setdefault(device, torch.cuda.Stream(device))
        for request in requests:
            if request.ready is not None:
                stream.wait_event(request.ready)
        for tensor in tensors:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield
