"""Convolutions in the forms that XLA's compiler for CPUs compiles well. For other platforms see `convolution.py`.

A convolution has three arrays: an image, a kernel and a result. Three functions compute the result, the gradient of the
image and the gradient of the kernel. A transposed convolution is the gradient of the image, so its own gradients are the
other two functions.

Most convolutions are fast as one `lax.conv_general_dilated`. There are five exceptions:

    case                          why it is slow                             instead
    a kernel with more pixels     XLA swaps the two, and then uses a         the padding as a separate operation,
    than the image                plain loop                                 after which the kernel is the smaller
    few pixels, many channels     the kernel is copied into another order,   patches of the image, and one product
                                  which takes longer than the sums           with the kernel in its own order
    depthwise: one channel        a plain loop                               a sum over the kernel's taps, fused
    in each group
    the kernel's gradient,        a plain loop                               a convolution with other groups; if
    with groups                                                              depthwise, products of copies
    inside a loop, such as        XLA changes to the order of its library    channels last, the order that XLA
    several steps in a call       only outside of loops                      would have chosen

Sums are computed in at least single precision, as in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from footplate.step.xla.lowering.table import wide

MOST_TAPS = 128
"""The most taps of a depthwise kernel whose sum is unrolled."""
MOST_COPIES = 16
"""The most copies of each pixel in patches that are larger than the kernel."""
CHANNELS = 8
"""Depthwise channels that are processed at once: their copies should fit into the processor's caches."""

Sizes = tuple[int, ...]
Widths = list[tuple[int, int, int]]
"""Padding of each dimension as in `lax.pad`: before, after, and between elements."""


@dataclass(frozen=True)
class Convolution:
    """Sizes and settings of a convolution that isn't transposed, in its spatial dimensions.

    For the result's pixel p, the kernel's tap k reads the image's pixel p · stride + k · dilation - padding.
    """

    image: Sizes
    kernel: Sizes
    result: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int

    def around_image(self) -> Widths:
        """Padding of the image with which the kernel fits exactly once for each pixel of the result."""
        sizes = zip(self.image, self.result, self.stride, self.padding, self._reach(), strict=True)
        return [(p, (n - 1) * s + reach + 1 - size - p, 0) for size, n, s, p, reach in sizes]

    def around_result(self) -> Widths:
        """Padding around and between the result's pixels for the gradient of the image.

        With this padding, the mirrored kernel fits exactly once for each pixel of the image.
        """
        sizes = zip(self.image, self.result, self.stride, self.padding, self._reach(), strict=True)
        return [(reach - p, size + p - (n - 1) * s - 1, s - 1) for size, n, s, p, reach in sizes]

    def _reach(self) -> Sizes:
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))


def result_of(geometry: Convolution, image: Any, kernel: Any) -> Any:
    """Compute the result, (rows, outer, …), of an image (rows, inner, …) and a kernel (outer, inner / groups, …)."""
    if _each_channel_alone(geometry, *kernel.shape[:2]):
        return _tapped(image, kernel, geometry.around_image(), geometry.stride, geometry.dilation)
    if _as_product(geometry, len(image), len(kernel)):
        result = _product(_patches(geometry, image), kernel.reshape(len(kernel), -1), 2, 1)
        return result.swapaxes(1, 2).reshape(len(image), len(kernel), *geometry.result).astype(image.dtype)
    return _convolve(image, kernel, geometry.around_image(), geometry.stride, geometry.dilation, geometry.groups)


def gradient_of_image(geometry: Convolution, gradient: Any, kernel: Any) -> Any:
    """Compute the image's gradient from the result's gradient; also the result of a transposed convolution."""
    outer, inner = kernel.shape[:2]
    once = (1,) * len(geometry.kernel)
    if _each_channel_alone(geometry, outer, inner):
        return _tapped(gradient, _mirrored(kernel), geometry.around_result(), once, geometry.dilation)
    if _as_product(geometry, len(gradient), outer):
        shares = _product(_pixels_first(gradient), kernel.reshape(outer, -1), 2, 0)
        shares = shares.reshape(*shares.shape[:2], inner, -1).swapaxes(1, 2)  # (rows, inner, pixels, taps)
        shares = _read(shares.reshape(*shares.shape[:2], -1), _shares_of_pixels(geometry))
        return jnp.sum(shares, -1).reshape(len(gradient), inner, *geometry.image).astype(gradient.dtype)
    turned = kernel.reshape(geometry.groups, outer // geometry.groups, inner, *geometry.kernel).swapaxes(1, 2)
    turned = _mirrored(turned.reshape(geometry.groups * inner, outer // geometry.groups, *geometry.kernel))
    return _convolve(gradient, turned, geometry.around_result(), once, geometry.dilation, geometry.groups)


def gradient_of_kernel(geometry: Convolution, gradient: Any, image: Any) -> Any:
    """Compute the kernel's gradient from the result's gradient and the image."""
    rows, outer = gradient.shape[:2]
    inner = image.shape[1] // geometry.groups
    if _each_channel_alone(geometry, outer, inner):
        return _of_taps(geometry, gradient, image).reshape(outer, 1, *geometry.kernel).astype(image.dtype)
    if _as_product(geometry, rows, outer):
        patches = _patches(geometry, image)
        flat = _pixels_first(gradient).reshape(-1, outer)
        product = _product(flat, patches.reshape(len(flat), -1), 0, 0)
        return product.reshape(outer, inner, *geometry.kernel).astype(image.dtype)
    turned = image.reshape(rows, geometry.groups, inner, *geometry.image).swapaxes(0, 2)
    turned = turned.reshape(inner, geometry.groups * rows, *geometry.image)
    result = _convolve(
        turned, gradient.swapaxes(0, 1), geometry.around_image(), geometry.dilation, geometry.stride, geometry.groups
    )
    return result.swapaxes(0, 1)


def _convolve(image: Any, kernel: Any, widths: Widths, stride: Sizes, dilation: Sizes, groups: int) -> Any:
    between = (1,) * len(widths)
    if groups == 1 and math.prod(kernel.shape[2:]) > math.prod(image.shape[2:]):
        image = _padded(image, widths)
        # Without the barrier, XLA would merge the padding into the convolution again.
        image = lax.optimization_barrier(image)
        padding = [(0, 0)] * len(widths)
    else:
        padding = [(before, behind) for before, behind, _ in widths]
        between = tuple(extra + 1 for *_, extra in widths)
    spatial = "DHW"[-len(widths) :]
    result = lax.conv_general_dilated(
        jnp.moveaxis(image, 1, -1),
        jnp.moveaxis(kernel, (0, 1), (-1, -2)),
        stride,
        padding,
        lhs_dilation=between,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )
    return jnp.moveaxis(result, -1, 1)


def _each_channel_alone(geometry: Convolution, outer: int, inner: int) -> bool:
    return 1 < geometry.groups == outer and inner == 1 and math.prod(geometry.kernel) <= MOST_TAPS


def _tapped(image: Any, kernel: Any, widths: Widths, stride: Sizes, dilation: Sizes) -> Any:
    """Convolve each channel of an image with its own kernel: the sum, over the taps, of shifted pixels times weight."""
    padded, kernel = wide(_padded(image, widths)), wide(kernel)
    room = zip(padded.shape[2:], kernel.shape[2:], dilation, strict=True)
    # The last position of the first tap.
    last = [size - d * (k - 1) - 1 for size, k, d in room]
    total: Any = None
    for tap in np.ndindex(*kernel.shape[2:]):
        first = [at * d for at, d in zip(tap, dilation, strict=True)]
        ends = [start + end + 1 for start, end in zip(first, last, strict=True)]
        met = lax.slice(padded, (0, 0, *first), (*padded.shape[:2], *ends), (1, 1, *stride))
        part = met * kernel[:, 0, *tap].reshape(-1, *(1,) * len(tap))
        total = part if total is None else total + part
    return total.astype(image.dtype)


def _of_taps(geometry: Convolution, gradient: Any, image: Any) -> Any:
    """Compute the gradient of the channels' own kernels: (channels, leading taps, taps in the last dimension).

    A tap's gradient is the product of the result's gradient, shifted along all dimensions except the last, and the image,
    shifted along the last. One product of matrices gives all taps: it needs a copy of the gradient for each leading tap,
    and a copy of the image for each tap in the last dimension.
    """
    *widths, along = geometry.around_image()
    *reach, last = zip(geometry.result, geometry.stride, geometry.dilation, strict=True)

    def of_channel(channel: Any) -> Any:
        gradient, image = channel  # (rows, …)
        image = lax.pad(image, np.zeros((), image.dtype)[()], [(0, 0, 0), *widths, along])
        moved = []
        for tap in np.ndindex(*geometry.kernel[:-1]):
            room = zip(tap, image.shape[1:-1], reach, strict=True)
            around = [(at * d, size - at * d - (n - 1) * s - 1, s - 1) for at, size, (n, s, d) in room]
            moved.append(lax.pad(gradient, np.zeros((), gradient.dtype)[()], [(0, 0, 0), *around, (0, 0, 0)]))
        n, s, d = last
        met = [
            lax.slice_in_dim(image, at * d, at * d + (n - 1) * s + 1, s, axis=-1) for at in range(geometry.kernel[-1])
        ]
        moved, met = (jnp.stack(copies).reshape(len(copies), -1) for copies in (moved, met))
        return _product(moved, met, 1, 1)

    return lax.map(of_channel, (gradient.swapaxes(0, 1), image.swapaxes(0, 1)), batch_size=CHANNELS)


def _as_product(geometry: Convolution, rows: int, outer: int) -> bool:
    """Return True if patches take no more memory than the kernel, or replace a slow loop at a moderate cost in memory."""
    taps, pixels = math.prod(geometry.kernel), math.prod(geometry.result)
    few = rows * pixels <= outer
    small = taps > min(pixels, math.prod(geometry.image)) and taps * pixels <= MOST_COPIES * math.prod(geometry.image)
    return geometry.groups == 1 and (few or small)


def _patches(geometry: Convolution, image: Any) -> Any:
    """The pixels that the kernel reads for each pixel of the result: (rows, the result's pixels, inner · taps)."""
    met = _read(image.reshape(*image.shape[:2], -1), _pixels_of_taps(geometry))  # (rows, inner, pixels, taps)
    return met.swapaxes(1, 2).reshape(len(image), math.prod(geometry.result), -1)


def _pixels_of_taps(geometry: Convolution) -> np.ndarray:
    """Index of the pixel that each tap reads, (the result's pixels, taps); the number of pixels stands for padding."""
    count = math.prod(geometry.image)
    indices, inside = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
    for size, k, n, s, p, d in zip(
        geometry.image,
        geometry.kernel,
        geometry.result,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        strict=True,
    ):
        read = np.arange(n)[:, None] * s + np.arange(k) * d - p
        indices = (indices[:, None, :, None] * size + read[None, :, None]).reshape(len(indices) * n, -1)
        inside = (inside[:, None, :, None] & ((read >= 0) & (read < size))[None, :, None]).reshape(indices.shape)
    return np.where(inside, indices, count).astype(np.int32)


def _shares_of_pixels(geometry: Convolution) -> np.ndarray:
    """Indices of the reads of each pixel of the image, among (the result's pixels · taps).

    Returns:
        (the image's pixels, most reads of a pixel). Shorter lists are padded with the number of all reads.
    """
    read = _pixels_of_taps(geometry)
    indices = np.full((math.prod(geometry.image) + 1, read.shape[1]), read.size, np.int32)
    indices[read, np.arange(read.shape[1])] = np.arange(read.size).reshape(read.shape)
    indices = np.sort(indices[:-1], 1)
    return indices[:, : max(1, np.max(np.sum(indices < read.size, 1)))]


def _read(flat: Any, places: np.ndarray) -> Any:
    """Take elements along the last dimension; zero for an index beyond its end."""
    return flat.at[..., places].get(mode="fill", fill_value=0)


def _product(a: Any, b: Any, along_a: int, along_b: int) -> Any:
    kind = jnp.promote_types(a.dtype, jnp.float32)
    along = (((along_a,), (along_b,)), ((), ()))
    return lax.dot_general(a, b, along, precision=lax.Precision.HIGHEST, preferred_element_type=kind)


def _padded(image: Any, widths: Widths) -> Any:
    return lax.pad(image, np.zeros((), image.dtype)[()], [(0, 0, 0), (0, 0, 0), *widths])


def _mirrored(kernel: Any) -> Any:
    return jnp.flip(kernel, range(2, kernel.ndim))


def _pixels_first(image: Any) -> Any:
    """Reshape an image to (rows, pixels, channels)."""
    return image.reshape(*image.shape[:2], -1).swapaxes(1, 2)
