"""Convolution and pooling in torch's layout (batch, channels, …). XLA chooses the layout of the hardware.

The backward passes are JAX's derivatives of the forward passes. In a program for a CPU, `cpu_convolution.py` makes the
convolutions.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from footplate.step.xla.lowering import cpu_convolution as cpu
from footplate.step.xla.lowering.table import Context, aten, lowers


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """Return one number for each spatial dimension; a single number is repeated."""
    return tuple(value) * rank if len(value) == 1 else tuple(value)


def _convolve(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:
    rank = weight.ndim - 2
    stride, padding, dilation, extra = (
        _each(setting, rank) for setting in (stride, padding, dilation, output_padding or (0,))
    )
    spatial = "DHW"[-rank:]
    layout = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    options: dict[str, Any] = {
        "dimension_numbers": layout,
        "feature_group_count": groups,
        "rhs_dilation": dilation,
        "precision": lax.Precision.HIGHEST,
    }
    if not transposed:
        return lax.conv_general_dilated(x, weight, stride, [(width, width) for width in padding], **options)

    # A transposed convolution is the gradient of a convolution. Its weights are (in, out / groups, …), and are mirrored.
    inner, outer = weight.shape[0], weight.shape[1]
    kernel = weight.reshape(groups, inner // groups, outer, *weight.shape[2:]).swapaxes(1, 2)
    kernel = jnp.flip(kernel.reshape(groups * outer, inner // groups, *weight.shape[2:]), range(2, weight.ndim))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    widths = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    return lax.conv_general_dilated(x, kernel, (1,) * rank, widths, lhs_dilation=stride, **options)


def _gradients(gradient: Any, x: Any, weight: Any, settings: Any, wanted: Any) -> tuple[Any, Any]:
    of_x, of_weight = jax.vjp(lambda x, weight: _convolve(x, weight, *settings), x, weight)[1](gradient)
    return of_x if wanted[0] else None, of_weight if wanted[1] else None


def _described(x: Any, weight: Any, result: tuple[int, ...], settings: Any) -> cpu.Convolution:
    """Sizes and settings of a convolution; if it is transposed, those of the convolution whose gradient it is."""
    stride, padding, dilation, transposed, _, groups = settings
    stride, padding, dilation = (_each(setting, weight.ndim - 2) for setting in (stride, padding, dilation))
    pixels = x.shape[2:], tuple(result[2:])
    image, result = reversed(pixels) if transposed else pixels
    return cpu.Convolution(image, weight.shape[2:], result, stride, padding, dilation, groups)


def _convolve_on_cpu(x: Any, weight: Any, geometry: cpu.Convolution, transposed: bool) -> Any:
    return cpu.gradient_of_image(geometry, x, weight) if transposed else cpu.result_of(geometry, x, weight)


def _gradients_on_cpu(
    gradient: Any, x: Any, weight: Any, geometry: cpu.Convolution, transposed: bool, wanted: Any
) -> tuple[Any, Any]:
    of_result, image = (x, gradient) if transposed else (gradient, x)
    of_x = _convolve_on_cpu(gradient, weight, geometry, not transposed) if wanted[0] else None
    return of_x, cpu.gradient_of_kernel(geometry, of_result, image) if wanted[1] else None


@lowers(aten.convolution.default)
def convolution(context: Context, x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    if context.platform == "cpu":
        y = _convolve_on_cpu(x, weight, _described(x, weight, context.shape, settings), transposed=settings[3])
    else:
        y = _convolve(x, weight, *settings)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (weight.ndim - 2))


@lowers(aten.convolution_backward.default)
def convolution_backward(context: Context, gradient: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any) -> Any:
    *forward, wanted = settings
    if context.platform == "cpu":
        geometry = _described(x, weight, gradient.shape, forward)
        of_x, of_weight = _gradients_on_cpu(gradient, x, weight, geometry, forward[3], wanted)
    else:
        of_x, of_weight = _gradients(gradient, x, weight, forward, wanted)
    of_bias = jnp.sum(gradient, (0, *range(2, gradient.ndim))) if wanted[2] else None
    return of_x, of_weight, of_bias


def _windows(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> dict[str, Any]:
    """Arguments of `lax.reduce_window` for a pooling over the last dimensions.

    With `ceil`, the padding at the end grows until the last window is complete. That window must begin inside the input
    or the padding before it.
    """
    rank, lead = len(kernel), x.ndim - len(kernel)
    widths = []
    for size, k, s, p, d in zip(x.shape[lead:], kernel, stride, padding, dilation, strict=True):
        reach, behind = d * (k - 1) + 1, p
        if ceil:
            count = math.ceil((size + 2 * p - reach) / s) + 1
            if (count - 1) * s >= size + p:
                count -= 1
            behind = max(p, (count - 1) * s + reach - size - p)
        widths.append((p, behind))
    ones = (1,) * lead
    return {
        "window_dimensions": ones + tuple(kernel),
        "window_strides": ones + tuple(stride),
        "padding": [(0, 0)] * lead + widths,
        "window_dilation": (1,) * (lead + rank) if dilation is None else ones + tuple(dilation),
    }


def _lowest(dtype: Any) -> Any:
    return np.asarray(-np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)[()]


def _max_pool(rank: int, forward: Any, backward: Any) -> None:
    """Register max pooling over `rank` dimensions, and its backward pass."""

    @lowers(forward)
    def max_pool(
        context: Context,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        dilation: Any = (1,),
        ceil: bool = False,
    ) -> Any:
        """Return the maxima and their indices in the input's plane, counted row by row; of equal maxima, the first."""
        kernel, padding, dilation = _each(kernel, rank), _each(padding, rank), _each(dilation, rank)
        windows = _windows(x, kernel, _each(stride, rank) if stride else kernel, padding, dilation, ceil)
        plane = x.shape[-rank:]
        places = jnp.broadcast_to(jnp.arange(math.prod(plane), dtype=jnp.int32).reshape(plane), x.shape)

        def larger(left: Any, right: Any) -> Any:
            (a, i), (b, j) = left, right
            first = (a > b) | ((a == b) & (i < j)) | jnp.isnan(a)
            return jnp.where(first, a, b), jnp.where(first, i, j)

        nowhere = np.int32(math.prod(plane))
        return lax.reduce_window((x, places), (_lowest(x.dtype), nowhere), larger, **windows)

    @lowers(backward)
    def max_pool_backward(context: Context, gradient: Any, x: Any, *settings: Any) -> Any:
        return _to_places(gradient, x, settings[-1], rank)


def _to_places(gradient: Any, x: Any, places: Any, rank: int) -> Any:
    """Add the gradient of a max pooling at the indices of its maxima."""
    planes, size = math.prod(x.shape[:-rank]), math.prod(x.shape[-rank:])
    rows = jnp.arange(planes)[:, None]
    zeros = jnp.zeros((planes, size), gradient.dtype)
    return zeros.at[rows, places.reshape(planes, -1)].add(gradient.reshape(planes, -1)).reshape(x.shape)


_max_pool(2, aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
_max_pool(3, aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default)


def _average(
    rank: int, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, count_padding: bool, divisor: int | None
) -> Any:
    kernel, padding = _each(kernel, rank), _each(padding, rank)
    windows = _windows(x, kernel, _each(stride, rank) if stride else kernel, padding, (1,) * rank, ceil)
    total = lax.reduce_window(x, np.zeros((), x.dtype)[()], lax.add, **windows)
    if divisor:
        return total / divisor

    # A mean divides by the elements of its window that are inside the input, or inside the input and the padding that was
    # set; `ceil`'s additional padding never counts.
    inside = jnp.ones(x.shape[-rank:], x.dtype)
    if count_padding:
        inside = jnp.pad(inside, [(p, p) for p in padding], constant_values=1)
    widths, counted = windows["padding"][-rank:], [(p, p) if count_padding else (0, 0) for p in padding]
    rest = [(a - p, b - q) for (a, b), (p, q) in zip(widths, counted, strict=True)]
    lead = x.ndim - rank
    shape = {
        "window_dimensions": windows["window_dimensions"][lead:],
        "window_strides": windows["window_strides"][lead:],
        "padding": rest,
    }
    return total / lax.reduce_window(inside, np.zeros((), x.dtype)[()], lax.add, **shape)


def _average_pool(rank: int, forward: Any, backward: Any) -> None:
    """Register average pooling over `rank` dimensions, and its backward pass."""

    @lowers(forward)
    def average_pool(
        context: Context,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        ceil: bool = False,
        count_padding: bool = True,
        divisor: int | None = None,
    ) -> Any:
        return _average(rank, x, kernel, stride, padding, ceil, count_padding, divisor)

    @lowers(backward)
    def average_pool_backward(context: Context, gradient: Any, x: Any, *settings: Any) -> Any:
        return jax.vjp(lambda x: _average(rank, x, *settings), x)[1](gradient)[0]


_average_pool(2, aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
_average_pool(3, aten.avg_pool3d.default, aten.avg_pool3d_backward.default)


def _bounds(n: int, wanted: int) -> list[tuple[int, int]]:
    """Begin and end of each window of an adaptive pooling: floor(i·n/wanted) to ceil((i+1)·n/wanted)."""
    return [(i * n // wanted, -(-(i + 1) * n // wanted)) for i in range(wanted)]


def _adaptive_average(x: Any, size: Any) -> Any:
    """Average adaptively: for each dimension, multiply by a matrix of each element's share in each window."""
    for dim, wanted in zip(range(-len(size), 0), size, strict=True):
        n = x.shape[dim]
        if wanted == n:
            continue
        shares = np.zeros((n, wanted))
        for i, (start, end) in enumerate(_bounds(n, wanted)):
            shares[start:end, i] = 1 / (end - start)
        moved = jnp.moveaxis(x, dim, -1)
        x = jnp.moveaxis(jnp.matmul(moved, jnp.asarray(shares, x.dtype), precision=lax.Precision.HIGHEST), -1, dim)
    return x


def _adaptive_average_pool(rank: int, forward: Any, backward: Any) -> None:
    """Register adaptive average pooling over `rank` dimensions, and its backward pass."""

    @lowers(forward)
    def adaptive_average_pool(context: Context, x: Any, size: Any) -> Any:
        return _adaptive_average(x, size)

    @lowers(backward)
    def adaptive_average_pool_backward(context: Context, gradient: Any, x: Any) -> Any:
        return jax.vjp(lambda x: _adaptive_average(x, gradient.shape[-rank:]), x)[1](gradient)[0]


_adaptive_average_pool(2, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default)
_adaptive_average_pool(3, aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default)


@lowers(aten.adaptive_max_pool2d.default)
def adaptive_max_pool(context: Context, x: Any, size: Any) -> Any:
    """Return the maxima and their indices, as `max_pool` does.

    Windows differ in size: smaller windows are padded with minus infinity.
    """
    height, width = x.shape[-2:]
    rows, columns = (_elements(n, wanted) for n, wanted in zip((height, width), size, strict=True))
    places = rows[:, None, :, None] * width + columns[None, :, None, :]  # (out, out, window, window)
    inside = (rows[:, None, :, None] >= 0) & (columns[None, :, None, :] >= 0)
    places = np.where(inside, places, 0).reshape(*size, -1)
    values = x.reshape(*x.shape[:-2], -1)[..., places]
    values = jnp.where(inside.reshape(places.shape), values, _lowest(x.dtype))
    best = jnp.argmax(values, -1, keepdims=True)
    chosen = jnp.take_along_axis(jnp.broadcast_to(places, values.shape), best, -1)
    return jnp.take_along_axis(values, best, -1)[..., 0], chosen[..., 0]


def _elements(n: int, wanted: int) -> np.ndarray:
    """Indices of each window's elements, (wanted, longest window); -1 pads shorter windows."""
    bounds = _bounds(n, wanted)
    longest = max(end - start for start, end in bounds)
    return np.array([[at if at < end else -1 for at in range(start, start + longest)] for start, end in bounds])


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool_backward(context: Context, gradient: Any, x: Any, places: Any) -> Any:
    return _to_places(gradient, x, places, 2)
