"""Compression of gradients before they are reduced.

A compressor of your own has the same two static methods. Its gradients are then reduced one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The contract of a compressor.

    Examples:
        >>> class Bfloat16(hvd.Compressor):
        ...     @staticmethod
        ...     def compress(tensor):
        ...         return tensor.bfloat16(), tensor.dtype
        ...
        ...     @staticmethod
        ...     def decompress(tensor, ctx):
        ...         return tensor.to(ctx)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=Bfloat16)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the compressed tensor, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Undo `compress`, after the reduction."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors by name.

    Examples:
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), compression=hvd.Compression.fp16)
        tensor([1., 2.])
    """

    none = NoneCompressor
    fp16 = FP16Compressor
