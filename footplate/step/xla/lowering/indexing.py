"""Reads and writes of elements by index.

An index outside the tensor raises in torch. XLA has no exceptions: it reads the nearest element, and writes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from footplate.step.xla.lowering.table import Context, aten, lowers


@lowers(aten.embedding.default)
def embedding(context: Context, weight: Any, indices: Any, *_: Any) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowers(aten.index_select.default)
def index_select(context: Context, x: Any, dim: int, indices: Any) -> Any:
    return jnp.take(x, indices, axis=dim, mode="clip")


@lowers(aten.embedding_dense_backward.default)
def embedding_backward(
    context: Context, gradient: Any, indices: Any, rows: int, padding: int, by_frequency: bool
) -> Any:
    flat, gradient = indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    if by_frequency:
        gradient = gradient / jnp.zeros(rows, gradient.dtype).at[flat].add(1)[flat][:, None]
    gradient = jnp.where((flat == padding)[:, None], 0, gradient)
    return jnp.zeros((rows, gradient.shape[-1]), gradient.dtype).at[flat].add(gradient)


@lowers(aten.gather.default)
def gather(context: Context, x: Any, dim: int, indices: Any, **_: Any) -> Any:
    return _at(x, dim, indices, lambda ref: ref.get(mode="clip"))


@lowers(aten.scatter.value, aten.scatter.src)
def scatter(context: Context, x: Any, dim: int, indices: Any, source: Any) -> Any:
    return _at(x, dim, indices, lambda ref: ref.set(_fitting(x, indices, source)))


@lowers(aten.scatter_add.default)
def scatter_add(context: Context, x: Any, dim: int, indices: Any, source: Any) -> Any:
    return _at(x, dim, indices, lambda ref: ref.add(_fitting(x, indices, source)))


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    context: Context, x: Any, dim: int, indices: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    how = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    source = _fitting(x, indices, source)
    original = x
    if not include_self:
        x = _at(x, dim, indices, lambda ref: ref.set(_neutral(reduce, x.dtype)))
    x = _at(x, dim, indices, lambda ref: getattr(ref, how)(source))
    if reduce != "mean":
        return x
    counts = jnp.full(original.shape, int(include_self), jnp.int32)
    counts = jnp.maximum(_at(counts, dim, indices, lambda ref: ref.add(1)), 1)
    return x / counts if jnp.issubdtype(x.dtype, jnp.floating) else x // counts


def _neutral(reduce: str, dtype: Any) -> Any:
    """The neutral element of a reduction."""
    if reduce in ("amax", "amin"):
        ends = (
            (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.floating) else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        )
        return ends[reduce == "amin"]
    return 1 if reduce == "prod" else 0


@lowers(aten.masked_scatter.default)
def masked_scatter(context: Context, x: Any, mask: Any, source: Any) -> Any:
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.where(mask, source.reshape(-1)[_ordinals(mask)], x)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(context: Context, gradient: Any, mask: Any, sizes: Any) -> Any:
    mask = jnp.broadcast_to(mask, gradient.shape)
    zeros = jnp.zeros(math.prod(sizes), gradient.dtype)
    return zeros.at[_ordinals(mask)].add(jnp.where(mask, gradient, 0)).reshape(sizes)


def _ordinals(mask: Any) -> Any:
    """The number of True elements before each element."""
    return jnp.maximum(jnp.cumsum(mask.reshape(-1)) - 1, 0).reshape(mask.shape)


@lowers(aten.searchsorted.Tensor)
def search_sorted(
    context: Context,
    ordered: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, -1)
    side = side or ("right" if right else "left")
    if ordered.ndim == 1:
        return jnp.searchsorted(ordered, x, side=side)
    rows = jax.vmap(lambda ordered, x: jnp.searchsorted(ordered, x, side=side))
    return rows(ordered.reshape(-1, ordered.shape[-1]), x.reshape(-1, x.shape[-1])).reshape(x.shape)


@lowers(aten.bucketize.Tensor)
def bucketize(context: Context, x: Any, bounds: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return jnp.searchsorted(bounds, x, side="right" if right else "left")


def _at(x: Any, dim: int, indices: Any, do: Any) -> Any:
    """Torch's gather and scatter: in every dimension except `dim`, an element's index is its own position."""
    if not x.ndim:
        return do(x.reshape(1).at[indices.reshape(-1)]).reshape(x.shape)
    grid = list(jnp.meshgrid(*(jnp.arange(size) for size in indices.shape), indexing="ij"))
    grid[dim % x.ndim] = indices
    return do(x.at[tuple(grid)])


def _fitting(x: Any, indices: Any, source: Any) -> Any:
    source = jnp.asarray(source, x.dtype)
    return source[tuple(slice(size) for size in indices.shape)] if source.ndim else source


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(context: Context, x: Any, indices: Any) -> Any:
    return x[_places(indices)]


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(context: Context, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    values = values.astype(x.dtype)
    chosen = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(chosen) == 1 and chosen[0][1].dtype == bool:
        return _put_where(x, *chosen[0], values, accumulate)
    ref = x.at[_places(indices)]
    return ref.add(values) if accumulate else ref.set(values)


def _put_where(x: Any, dim: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """`x[mask] = values`: a mask over the dimensions from `dim` on, with the same values wherever it is true."""
    behind = x.ndim - dim - mask.ndim
    if values.ndim > behind:
        # The leading dimensions have the size 1.
        values = values.reshape(values.shape[values.ndim - behind :])
    mask = mask.reshape((1,) * dim + mask.shape + (1,) * behind)
    return jnp.where(mask, x + values if accumulate else values, x)


def _places(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)
