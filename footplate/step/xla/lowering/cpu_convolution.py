"""Convolutions as XLA's compiler for CPUs makes fast programs of them. For other platforms see `convolution.py`.

A convolution has three arrays: an image, a kernel, a result. Each is had from the other two: the result, the gradient
of the image, the gradient of the kernel. A transposed convolution is the second of these, and so its gradients are the
other two. Written as one `lax.conv_general_dilated` most are compiled well, with five exceptions:

    what                          why it is slow                             instead
    a kernel of more pixels than  XLA lets the two change places, and then   the padding as an operation of its own,
    the image it is moved over    has no more than a plain loop for it       after which the kernel is the smaller one
    few pixels, many channels     the kernel is copied into another order,   patches of the image, and one product
                                  which takes longer than the sums           with the kernel as it lies
    each channel by itself        a plain loop                               a sum over the kernel's taps, fused
    the kernel's, in groups       a plain loop                               a convolution with other groups; of each
                                                                             channel by itself, products of copies
    in a loop, as of several      XLA puts only those outside of loops into  channels last, as it would have put them
    steps in a call               the order that its library takes

Sums are taken in at least single precision, as torch does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from footplate.step.xla.lowering.table import wide

MOST_TAPS = 128  # of a sum that is written out
MOST_COPIES = 16  # of a pixel in patches, where they are larger than the kernel
CHANNELS = 8  # of those by themselves, at a time: what is copied of them should stay in the caches

Sizes = tuple[int, ...]
Widths = list[tuple[int, int, int]]  # of each dimension: before, behind, between; as `lax.pad` takes them


@dataclass(frozen=True)
class Convolution:
    """What is moved over what: sizes and settings in the spatial dimensions, of a convolution that isn't transposed.

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
        """What is put around the image so that the kernel fits as often as there are pixels in the result."""
        sizes = zip(self.image, self.result, self.stride, self.padding, self._reach(), strict=True)
        return [(p, (n - 1) * s + reach + 1 - size - p, 0) for size, n, s, p, reach in sizes]

    def around_result(self) -> Widths:
        """What is put around the result, and between its pixels, so that the mirrored kernel fits once for each pixel
        of the image.
        """
        sizes = zip(self.image, self.result, self.stride, self.padding, self._reach(), strict=True)
        return [(reach - p, size + p - (n - 1) * s - 1, s - 1) for size, n, s, p, reach in sizes]

    def _reach(self) -> Sizes:
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))


def result_of(one: Convolution, image: Any, kernel: Any) -> Any:
    """The result, (rows, outer, …), of an image (rows, inner, …) and a kernel (outer, inner / groups, …)."""
    if _each_channel_alone(one, *kernel.shape[:2]):
        return _tapped(image, kernel, one.around_image(), one.stride, one.dilation)
    if _as_product(one, len(image), len(kernel)):
        result = _product(_patches(one, image), kernel.reshape(len(kernel), -1), 2, 1)
        return result.swapaxes(1, 2).reshape(len(image), len(kernel), *one.result).astype(image.dtype)
    return _convolve(image, kernel, one.around_image(), one.stride, one.dilation, one.groups)


def gradient_of_image(one: Convolution, gradient: Any, kernel: Any) -> Any:
    """Of the result's gradient; the result of a transposed convolution of it, too."""
    outer, inner = kernel.shape[:2]
    once = (1,) * len(one.kernel)
    if _each_channel_alone(one, outer, inner):
        return _tapped(gradient, _mirrored(kernel), one.around_result(), once, one.dilation)
    if _as_product(one, len(gradient), outer):
        shares = _product(_pixels_first(gradient), kernel.reshape(outer, -1), 2, 0)
        shares = shares.reshape(*shares.shape[:2], inner, -1).swapaxes(1, 2)  # (rows, inner, pixels, taps)
        shares = _read(shares.reshape(*shares.shape[:2], -1), _shares_of_pixels(one))
        return jnp.sum(shares, -1).reshape(len(gradient), inner, *one.image).astype(gradient.dtype)
    turned = kernel.reshape(one.groups, outer // one.groups, inner, *one.kernel).swapaxes(1, 2)
    turned = _mirrored(turned.reshape(one.groups * inner, outer // one.groups, *one.kernel))
    return _convolve(gradient, turned, one.around_result(), once, one.dilation, one.groups)


def gradient_of_kernel(one: Convolution, gradient: Any, image: Any) -> Any:
    """Of the result's gradient and the image."""
    rows, outer = gradient.shape[:2]
    inner = image.shape[1] // one.groups
    if _each_channel_alone(one, outer, inner):
        return _of_taps(one, gradient, image).reshape(outer, 1, *one.kernel).astype(image.dtype)
    if _as_product(one, rows, outer):
        patches = _patches(one, image)
        flat = _pixels_first(gradient).reshape(-1, outer)
        found = _product(flat, patches.reshape(len(flat), -1), 0, 0)
        return found.reshape(outer, inner, *one.kernel).astype(image.dtype)
    turned = image.reshape(rows, one.groups, inner, *one.image).swapaxes(0, 2)
    turned = turned.reshape(inner, one.groups * rows, *one.image)
    found = _convolve(turned, gradient.swapaxes(0, 1), one.around_image(), one.dilation, one.stride, one.groups)
    return found.swapaxes(0, 1)


def _convolve(image: Any, kernel: Any, widths: Widths, stride: Sizes, dilation: Sizes, groups: int) -> Any:
    between = (1,) * len(widths)
    if groups == 1 and math.prod(kernel.shape[2:]) > math.prod(image.shape[2:]):
        image = _padded(image, widths)
        image = lax.optimization_barrier(image)  # or XLA would take the padding back into the convolution
        padding = [(0, 0)] * len(widths)
    else:
        padding = [(before, behind) for before, behind, _ in widths]
        between = tuple(extra + 1 for *_, extra in widths)
    spatial = "DHW"[-len(widths) :]
    found = lax.conv_general_dilated(
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
    return jnp.moveaxis(found, -1, 1)


def _each_channel_alone(one: Convolution, outer: int, inner: int) -> bool:
    return 1 < one.groups == outer and inner == 1 and math.prod(one.kernel) <= MOST_TAPS


def _tapped(image: Any, kernel: Any, widths: Widths, stride: Sizes, dilation: Sizes) -> Any:
    """Each channel of an image with a kernel of its own: for each tap, the pixels that it meets times its weights."""
    padded, kernel = wide(_padded(image, widths)), wide(kernel)
    room = zip(padded.shape[2:], kernel.shape[2:], dilation, strict=True)
    last = [size - d * (k - 1) - 1 for size, k, d in room]  # where the first tap is in the end
    total: Any = None
    for tap in np.ndindex(*kernel.shape[2:]):
        first = [at * d for at, d in zip(tap, dilation, strict=True)]
        ends = [start + end + 1 for start, end in zip(first, last, strict=True)]
        met = lax.slice(padded, (0, 0, *first), (*padded.shape[:2], *ends), (1, 1, *stride))
        part = met * kernel[:, 0, *tap].reshape(-1, *(1,) * len(tap))
        total = part if total is None else total + part
    return total.astype(image.dtype)


def _of_taps(one: Convolution, gradient: Any, image: Any) -> Any:
    """The kernels' gradient of each channel by itself, (channels, taps but for the last dimension, taps along it).

    A tap is where the result's gradient, moved along all dimensions but the last, meets the image, moved along that
    one. So as many copies as a kernel has rows and columns give all of its taps, in one product of matrices.
    """
    *widths, along = one.around_image()
    *reach, last = zip(one.result, one.stride, one.dilation, strict=True)

    def of_channel(given: Any) -> Any:
        gradient, image = given  # (rows, …)
        image = lax.pad(image, np.zeros((), image.dtype)[()], [(0, 0, 0), *widths, along])
        moved = []
        for tap in np.ndindex(*one.kernel[:-1]):
            room = zip(tap, image.shape[1:-1], reach, strict=True)
            around = [(at * d, size - at * d - (n - 1) * s - 1, s - 1) for at, size, (n, s, d) in room]
            moved.append(lax.pad(gradient, np.zeros((), gradient.dtype)[()], [(0, 0, 0), *around, (0, 0, 0)]))
        n, s, d = last
        met = [lax.slice_in_dim(image, at * d, at * d + (n - 1) * s + 1, s, axis=-1) for at in range(one.kernel[-1])]
        moved, met = (jnp.stack(copies).reshape(len(copies), -1) for copies in (moved, met))
        return _product(moved, met, 1, 1)

    return lax.map(of_channel, (gradient.swapaxes(0, 1), image.swapaxes(0, 1)), batch_size=CHANNELS)


def _as_product(one: Convolution, rows: int, outer: int) -> bool:
    """Whether patches take no more memory than the kernel, or else would spare a slow loop at a moderate price."""
    taps, pixels = math.prod(one.kernel), math.prod(one.result)
    few = rows * pixels <= outer
    small = taps > min(pixels, math.prod(one.image)) and taps * pixels <= MOST_COPIES * math.prod(one.image)
    return one.groups == 1 and (few or small)


def _patches(one: Convolution, image: Any) -> Any:
    """What the kernel meets, (rows, the result's pixels, inner · taps)."""
    met = _read(image.reshape(*image.shape[:2], -1), _pixels_of_taps(one))  # (rows, inner, pixels, taps)
    return met.swapaxes(1, 2).reshape(len(image), math.prod(one.result), -1)


def _pixels_of_taps(one: Convolution) -> np.ndarray:
    """(the result's pixels, taps): which of the image's pixels is read; their number for one in the padding."""
    count = math.prod(one.image)
    found, inside = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
    for size, k, n, s, p, d in zip(
        one.image, one.kernel, one.result, one.stride, one.padding, one.dilation, strict=True
    ):
        read = np.arange(n)[:, None] * s + np.arange(k) * d - p
        found = (found[:, None, :, None] * size + read[None, :, None]).reshape(len(found) * n, -1)
        inside = (inside[:, None, :, None] & ((read >= 0) & (read < size))[None, :, None]).reshape(found.shape)
    return np.where(inside, found, count).astype(np.int32)


def _shares_of_pixels(one: Convolution) -> np.ndarray:
    """(the image's pixels, most taps that read one of them): in (the result's pixels · taps), who has read it; their
    number for nobody.
    """
    read = _pixels_of_taps(one)
    found = np.full((math.prod(one.image) + 1, read.shape[1]), read.size, np.int32)
    found[read, np.arange(read.shape[1])] = np.arange(read.size).reshape(read.shape)
    found = np.sort(found[:-1], 1)
    return found[:, : max(1, np.max(np.sum(found < read.size, 1)))]


def _read(flat: Any, places: np.ndarray) -> Any:
    """What is at places of the last dimension; zero beyond its end."""
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
    """(rows, pixels, channels)"""
    return image.reshape(*image.shape[:2], -1).swapaxes(1, 2)
