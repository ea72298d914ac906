"""The collectives as autograd functions, with the gradients that Horovod defines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from footplate.compat.horovod.submit import Average, Sum, exchange, gather, reduce, send
from footplate.compat.horovod.world import context
from footplate.core.errors import ConfigError


class Allreduce(Function):
    """Allreduce; its gradient is reduced as the values were."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, *tensors: Tensor) -> Any:
        ctx.arguments = (op, prescale, postscale, process_set)
        return tuple(reduce("allreduce", tensors, op, name, prescale, postscale, process_set).result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.arguments
        if op not in (Average, Sum):
            raise ConfigError(f"allreduce(op={op}) lets no gradients through: only Average and Sum do.")
        reduced = reduce("allreduce", gradients, op, None, prescale, postscale, process_set).result()
        return (None, None, None, None, None, *reduced)


class Allgather(Function):
    """Allgather; its gradient is averaged, and each rank takes the rows of its own tensors."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Tensor) -> Any:
        operation = gather(tensors, name, process_set)
        ctx.process_set, ctx.rows = process_set, operation.numbers
        return tuple(operation.result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        process_set = ctx.process_set
        reduced = reduce("allreduce", gradients, Average, process_set=process_set).result()
        (rows,) = gather([torch.tensor([ctx.rows])], None, process_set).result()  # rows: (ranks, tensors)
        starts = rows[: process_set.rank()].sum(0).tolist()
        parts = [
            gradient[start : start + count] for gradient, start, count in zip(reduced, starts, ctx.rows, strict=True)
        ]
        return (None, None, *parts)


class Broadcast(Function):
    """Broadcast; its gradient is averaged on the root, and zero on the other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return send([tensor], root_rank, name, process_set).result()[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (reduced,) = reduce("allreduce", gradients, Average, process_set=ctx.process_set).result()
        is_root = context().world.rank == ctx.root_rank
        return reduced if is_root else torch.zeros_like(reduced), None, None, None


class Alltoall(Function):
    """Alltoall; the gradient of each row goes back to the rank that the row came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        output, received = exchange(tensor, splits, name, process_set).result()
        ctx.process_set, ctx.received = process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        returned, _ = exchange(gradients[0], ctx.received, None, ctx.process_set).result()
        return returned, None, None, None


class Reducescatter(Function):
    """Reducescatter; the gradients of all ranks' rows are gathered."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, process_set: Any, prescale: Any, postscale: Any, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * (len(process_set.ranks) if op == Sum else 1)
        return tuple(reduce("reducescatter", tensors, op, name, prescale, postscale, process_set).result())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        return (None, None, None, None, None, *gather(scaled, None, ctx.process_set).result())
