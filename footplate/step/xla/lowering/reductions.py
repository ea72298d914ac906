"""Reductions: sums, means, extrema, norms, running sums, softmax, order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from footplate.step.xla.lowering.table import Context, aten, axes, lowers, wide


def _reducing(function: Callable[..., Any], *operations: Any) -> None:
    """Register a reduction that computes in the type of its result."""

    def lowering(context: Context, x: Any, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return function(x.astype(context.dtype), axis=axes(dims, x.ndim), keepdims=keepdim)

    lowers(*operations)(lowering)


_reducing(jnp.sum, aten.sum.default, aten.sum.dim_IntList)
_reducing(jnp.mean, aten.mean.default, aten.mean.dim)
_reducing(jnp.max, aten.amax.default, aten.max.default)
_reducing(jnp.min, aten.amin.default, aten.min.default)
_reducing(jnp.prod, aten.prod.default, aten.prod.dim_int)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(context: Context, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, axis=axes(dims, x.ndim), keepdims=keepdim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(context: Context, x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x, axis=axes(dims, x.ndim), keepdims=keepdim)


@lowers(aten.argmax.default)
def argmax(context: Context, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, axis=dim, keepdims=keepdim)


@lowers(aten.argmin.default)
def argmin(context: Context, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, axis=dim, keepdims=keepdim)


@lowers(aten.max.dim)
def max_with_place(context: Context, x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.max(x, axis=dim, keepdims=keepdim), jnp.argmax(x, axis=dim, keepdims=keepdim)


@lowers(aten.min.dim)
def min_with_place(context: Context, x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.min(x, axis=dim, keepdims=keepdim), jnp.argmin(x, axis=dim, keepdims=keepdim)


@lowers(aten.var.correction)
def variance(context: Context, x: Any, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(wide(x), axis=axes(dims, x.ndim), ddof=1 if correction is None else correction, keepdims=keepdim)


@lowers(aten.var_mean.correction)
def variance_and_mean(context: Context, x: Any, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    over = axes(dims, x.ndim)
    return variance(context, x, dims, correction=correction, keepdim=keepdim), jnp.mean(
        wide(x), axis=over, keepdims=keepdim
    )


@lowers(aten.linalg_vector_norm.default)
def vector_norm(context: Context, x: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
    over, size = axes(dims, x.ndim), jnp.abs(x.astype(context.dtype))
    if order == 0:
        return jnp.sum(size != 0, axis=over, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=over, keepdims=keepdim))
    if abs(order) == float("inf"):
        return (jnp.max if order > 0 else jnp.min)(size, axis=over, keepdims=keepdim)
    return jnp.sum(size**order, axis=over, keepdims=keepdim) ** (1 / order)


@lowers(aten.cumsum.default)
def running_sum(context: Context, x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumsum(x.astype(context.dtype), dim) if x.ndim else x


@lowers(aten.cumprod.default)
def running_product(context: Context, x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumprod(x.astype(context.dtype), dim) if x.ndim else x


@lowers(aten.histc.default)
def histogram(context: Context, x: Any, bins: int = 100, low: Any = 0, high: Any = 0) -> Any:
    """Torch's histogram: the default bounds are those of the elements, and the last bin includes its upper bound."""
    x = x.reshape(-1).astype(context.dtype)
    if low == high:
        low, high = jnp.min(x), jnp.max(x)
        low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    index = jnp.clip(jnp.floor((x - low) * bins / (high - low)), 0, bins - 1).astype(jnp.int32)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, context.dtype).at[index].add(inside.astype(context.dtype))


@lowers(aten._softmax.default)
def softmax(context: Context, x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.softmax(wide(x), axis=dim)


@lowers(aten._log_softmax.default)
def log_softmax(context: Context, x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.log_softmax(wide(x), axis=dim)


@lowers(aten.logsumexp.default)
def log_sum_exp(context: Context, x: Any, dims: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(x.astype(context.dtype), axis=axes(dims, x.ndim), keepdims=keepdim)


@lowers(aten.sort.default, aten.sort.stable)
def sort(context: Context, x: Any, dim: int = -1, descending: bool = False, *, stable: Any = True) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@lowers(aten.topk.default)
def top_k(context: Context, x: Any, k: int, dim: int = -1, largest: bool = True, sort: bool = True) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True, descending=largest)
    first = jax.lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, first, axis=dim), first
