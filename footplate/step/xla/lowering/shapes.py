"""Views, slices, joins and padding."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, lowers


@lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def reshape(context: Context, x: Any, *_: Any) -> Any:
    return jnp.reshape(x, context.shape)


@lowers(aten.expand.default)
def expand(context: Context, x: Any, size: Any, **_: Any) -> Any:
    return jnp.broadcast_to(x, context.shape)


@lowers(aten.permute.default)
def permute(context: Context, x: Any, dims: Any) -> Any:
    return jnp.transpose(x, [dim % x.ndim for dim in dims])


@lowers(aten.transpose.int)
def transpose(context: Context, x: Any, dim0: int, dim1: int) -> Any:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers(aten.t.default)
def matrix_transpose(context: Context, x: Any) -> Any:
    return x.T


@lowers(aten.slice.Tensor)
def slice_of(context: Context, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_along(x, dim, slice(start, end, step))]


@lowers(aten.slice_scatter.default)
def slice_scatter(
    context: Context, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_along(x, dim, slice(start, end, step))].set(source.astype(x.dtype))


@lowers(aten.select.int)
def select(context: Context, x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index % x.shape[dim], dim, keepdims=False)


@lowers(aten.select_scatter.default)
def select_scatter(context: Context, x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[_along(x, dim, index)].set(source.astype(x.dtype))


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % x.ndim) + (index,)


@lowers(aten.cat.default)
def concatenate(context: Context, several: Any, dim: int = 0) -> Any:
    some = [x.astype(context.dtype) for x in several if x.shape != (0,)]
    return jnp.concatenate(some, dim) if some else jnp.zeros(context.shape, context.dtype)


@lowers(aten.stack.default)
def stack(context: Context, several: Any, dim: int = 0) -> Any:
    return jnp.stack([x.astype(context.dtype) for x in several], dim)


@lowers(aten.split_with_sizes.default)
def split(context: Context, x: Any, sizes: Any, dim: int = 0) -> Any:
    return jnp.split(x, [int(end) for end in np.cumsum(sizes)[:-1]], dim)


@lowers(aten.unbind.int)
def unbind(context: Context, x: Any, dim: int = 0) -> Any:
    return [lax.index_in_dim(x, index, dim, keepdims=False) for index in range(x.shape[dim])]


@lowers(operator.getitem)
def one_of(context: Context, several: Any, index: int) -> Any:
    return several[index]


@lowers(aten.repeat.default)
def repeat(context: Context, x: Any, repeats: Any) -> Any:
    return jnp.tile(x, repeats)


@lowers(aten.flip.default)
def flip(context: Context, x: Any, dims: Any) -> Any:
    return jnp.flip(x, dims)


@lowers(aten.roll.default)
def roll(context: Context, x: Any, shifts: Any, dims: Any = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims) or None) if dims else jnp.roll(x, shifts[0])


@lowers(aten.constant_pad_nd.default)
def pad(context: Context, x: Any, padding: Any, value: Any = 0) -> Any:
    """Pad. Torch names the last dimension first; a negative width cuts."""
    pairs = [(before, after, 0) for before, after in zip(padding[::2], padding[1::2], strict=True)]
    widths = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


@lowers(aten.diagonal.default)
def diagonal(context: Context, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers(aten.tril.default)
def lower_triangle(context: Context, x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers(aten.triu.default)
def upper_triangle(context: Context, x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lowers(aten.unfold.default)
def windows(context: Context, x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dimension, with their elements in a new last dimension."""
    if not x.ndim:
        return x[None]
    at = dim % x.ndim
    starts = np.arange(0, x.shape[at] - size + 1, step)
    return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), axis=at), at + 1, -1)


@lowers(aten.as_strided.default)
def as_strided(context: Context, x: Any, size: Any, stride: Any, offset: int | None = None) -> Any:
    return _storage(x, context.strides)[_offsets(size, stride, offset)]


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(context: Context, x: Any, source: Any, size: Any, stride: Any, offset: int | None = None) -> Any:
    storage = _storage(x, context.strides).at[_offsets(size, stride, offset)].set(source.astype(x.dtype))
    order = _outermost_first(x, context.strides)
    return jnp.transpose(storage.reshape([x.shape[dim] for dim in order]), [order.index(dim) for dim in range(x.ndim)])


def _outermost_first(x: Any, strides: tuple[int, ...]) -> list[int]:
    return sorted(range(x.ndim), key=lambda dim: (strides[dim], x.shape[dim]), reverse=True)


def _storage(x: Any, strides: tuple[int, ...]) -> Any:
    """A dense tensor's elements in torch's memory order."""
    return jnp.transpose(x, _outermost_first(x, strides)).reshape(-1)


def _offsets(size: Any, stride: Any, offset: int | None) -> np.ndarray:
    """The memory offset of each element of a strided view."""
    places = np.full(size, offset or 0)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        places += (np.arange(length) * step).reshape([-1 if other == dim else 1 for other in range(len(size))])
    return places
