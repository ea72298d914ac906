"""Interpolation: resizing of images, sampling at the points of a grid, and the gradient of padding with edges.

The backward passes are JAX's derivatives of the forward passes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, lowers

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _inside(at: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Move coordinates, in elements, into the image as the padding mode says."""
    if padding == _REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span <= 0:
            return jnp.zeros_like(at)
        distance = jnp.abs(at - low)
        turns, rest = jnp.floor(distance / span), jnp.fmod(distance, span)
        at = jnp.where(turns % 2 == 0, rest, span - rest) + low
    return at if padding == _ZEROS else jnp.clip(at, 0, size - 1)


def _cubic(distance: Any, a: float = -0.75) -> Any:
    """Weight of an element at a distance below 2."""
    x = jnp.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return jnp.where(x <= 1, near, ((x - 5) * x + 8) * x * a - 4 * a)


def _taps(at: Any, size: int, kind: int, padding: int, align_corners: bool) -> list[tuple[Any, Any]]:
    """The elements along one dimension that contribute to a coordinate, as (index, weight). Indices are floats."""
    if kind == _BICUBIC:
        first = jnp.floor(at)
        several = [(first + tap, _cubic(at - (first + tap))) for tap in (-1, 0, 1, 2)]
        return [(_inside(position, size, padding, align_corners), weight) for position, weight in several]
    at = _inside(at, size, padding, align_corners)
    if kind == _NEAREST:
        return [(jnp.round(at), jnp.ones_like(at))]
    first = jnp.floor(at)
    return [(first, 1 - (at - first)), (first + 1, at - first)]


def _sampled(x: Any, grid: Any, kind: int, padding: int, align_corners: bool) -> Any:
    """Sample x (images, channels, height, width) at grid (images, …, 2): points (column, row) from -1 to 1."""
    taps = []
    for axis, size in enumerate((x.shape[3], x.shape[2])):
        at = (grid[..., axis] + 1) / 2 * (size - 1) if align_corners else ((grid[..., axis] + 1) * size - 1) / 2
        taps.append(_taps(at, size, kind, padding, align_corners))
    columns, rows = taps
    total = jnp.zeros((x.shape[0], x.shape[1], *grid.shape[1:-1]), x.dtype)
    for column, of_column in columns:
        for row, of_row in rows:
            seen = (column >= 0) & (column < x.shape[3]) & (row >= 0) & (row < x.shape[2])
            i, j = (
                jnp.clip(index, 0, size - 1).astype(jnp.int32)
                for index, size in ((row, x.shape[2]), (column, x.shape[3]))
            )
            values = jax.vmap(lambda image, i, j: image[:, i, j])(x, i, j)
            total += values * jnp.where(seen, of_column * of_row, 0)[:, None]
    return total


@lowers(aten.grid_sampler_2d.default)
def grid_sample(context: Context, x: Any, grid: Any, kind: int, padding: int, align_corners: bool) -> Any:
    return _sampled(x, grid, kind, padding, align_corners)


@lowers(aten.grid_sampler_2d_backward.default)
def grid_sample_backward(
    context: Context, gradient: Any, x: Any, grid: Any, kind: int, padding: int, align_corners: bool, wanted: Any
) -> Any:
    _, pull = jax.vjp(lambda x, grid: _sampled(x, grid, kind, padding, align_corners), x, grid)
    of_x, of_grid = pull(gradient)
    return of_x if wanted[0] else None, of_grid


def _resized(operation: Any, x: Any, size: Any, align_corners: bool, scales: Any) -> Any:
    """Resize by multiplying with a matrix for each dimension. Torch's resizing of the unit vectors gives the matrix.

    For both dimensions the unit vectors are rows: torch 2.13 returns only the first element for an image that is one
    element wide.
    """
    for dim, wanted, scale in zip((-2, -1), size, scales, strict=True):
        n = x.shape[dim]
        units = torch.eye(n, dtype=torch.float64).reshape(n, 1, 1, n)
        shares = operation(units, [1, wanted], align_corners, None, scale).reshape(n, wanted).numpy()
        moved = jnp.matmul(jnp.moveaxis(x, dim, -1), jnp.asarray(shares, x.dtype), precision=lax.Precision.HIGHEST)
        x = jnp.moveaxis(moved, -1, dim)
    return x


def _resizing(forward: Any, backward: Any) -> None:
    """Register a resizing that is linear in the image, and its backward pass."""

    @lowers(forward)
    def resize(context: Context, x: Any, size: Any, align_corners: bool, *scales: Any) -> Any:
        return _resized(forward, x, size, align_corners, scales or (None, None))

    @lowers(backward)
    def resize_backward(
        context: Context, gradient: Any, size: Any, shape: Any, align_corners: bool, *scales: Any
    ) -> Any:
        x = jnp.zeros(shape, gradient.dtype)
        return jax.vjp(lambda x: _resized(forward, x, size, align_corners, scales or (None, None)), x)[1](gradient)[0]


_resizing(aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default)
_resizing(aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default)


def _edges_repeated(x: Any, padding: Any) -> Any:
    for number, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        dim = x.ndim - 1 - number
        x = jnp.take(x, jnp.clip(jnp.arange(-before, x.shape[dim] + after), 0, x.shape[dim] - 1), axis=dim)
    return x


@lowers(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def pad_with_edges_backward(context: Context, gradient: Any, x: Any, padding: Any) -> Any:
    return jax.vjp(lambda x: _edges_repeated(x, padding), x)[1](gradient)[0]
