"""Tensors made of numbers alone: fills, ranges, empty tensors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from footplate.step.xla.lowering.table import Context, aten, lowers


@lowers(aten.full.default)
def full(context: Context, size: Any, value: Any, **_: Any) -> Any:
    return jnp.full(context.shape, value, context.dtype)


@lowers(aten.full_like.default)
def full_like(context: Context, x: Any, value: Any, **_: Any) -> Any:
    return jnp.full(context.shape, value, context.dtype)


@lowers(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.zeros.default,
    aten.new_zeros.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def zeros(context: Context, *_: Any, **__: Any) -> Any:
    return jnp.zeros(context.shape, context.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(context: Context, *_: Any, **__: Any) -> Any:
    return jnp.ones(context.shape, context.dtype)


@lowers(aten.scalar_tensor.default)
def scalar(context: Context, value: Any, **_: Any) -> Any:
    return jnp.asarray(value, context.dtype)


@lowers(aten.arange.start_step)
def arange(context: Context, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    return jnp.arange(start, end, step, dtype=context.dtype)
