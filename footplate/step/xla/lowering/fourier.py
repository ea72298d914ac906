"""Fourier transforms, and complex numbers: made of real numbers, taken apart, and computed with.

Complex numbers exist only inside a step. The state and the batch are real: `torch.view_as_complex` makes complex numbers of
pairs, and `torch.view_as_real` makes pairs of them.

Operations that are entered with `takes_complex` are right for complex numbers too. `missing_ops` lists any other operation
that a step gives complex numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, lowers, takes_complex

# torch's normalisation: nothing, the square root of the number of elements, or their number, divides the sum. JAX has names
# for the direction whose sum is divided, so they depend on the direction of the transform.
_FORWARD = ("backward", "ortho", "forward")
_INVERSE = ("forward", "ortho", "backward")

# jax.numpy transforms at most this many dimensions at once.
_MAX_DIMS = 3


def _transform(x: Any, dims: Sequence[int], normalisation: int, forward: bool) -> Any:
    for start in range(0, len(dims), _MAX_DIMS):
        axes = dims[start : start + _MAX_DIMS]
        if forward:
            x = jnp.fft.fftn(x, axes=axes, norm=_FORWARD[normalisation])
        else:
            x = jnp.fft.ifftn(x, axes=axes, norm=_INVERSE[normalisation])
    return x


@lowers(aten._fft_c2c.default)
def complex_to_complex(context: Context, x: Any, dims: Sequence[int], normalisation: int, forward: bool) -> Any:
    return _transform(x, dims, normalisation, forward)


@lowers(aten._fft_r2c.default)
def real_to_complex(context: Context, x: Any, dims: Sequence[int], normalisation: int, onesided: bool) -> Any:
    """The last of `dims` is halved if the transform is one-sided."""
    if not onesided:
        return _transform(x.astype(context.dtype), dims, normalisation, forward=True)
    *others, last = dims
    halved = jnp.fft.rfft(x, axis=last, norm=_FORWARD[normalisation])
    return _transform(halved, others, normalisation, forward=True)


@lowers(aten._fft_c2r.default)
def complex_to_real(context: Context, x: Any, dims: Sequence[int], normalisation: int, last_size: int) -> Any:
    """The last of `dims` has one half of its elements in `x`, and `last_size` elements in the result."""
    *others, last = dims
    halved = _transform(x, others, normalisation, forward=False)
    return jnp.fft.irfft(halved, n=last_size, axis=last, norm=_INVERSE[normalisation])


@lowers(aten.view_as_real.default)
def pairs(context: Context, x: Any) -> Any:
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers(aten.view_as_complex.default)
def of_pairs(context: Context, x: Any) -> Any:
    return lax.complex(x[..., 0], x[..., 1])


@lowers(aten.complex.default)
def of_parts(context: Context, real: Any, imaginary: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


@lowers(aten.polar.default)
def of_angles(context: Context, size: Any, angle: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(size * jnp.cos(angle), size * jnp.sin(angle)))


@lowers(aten._conj.default, aten._conj_physical.default)
def conjugate(context: Context, x: Any) -> Any:
    return jnp.conj(x)


takes_complex(
    aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default, aten.view_as_real.default,
    aten.view_as_complex.default, aten.complex.default, aten.polar.default, aten._conj.default,
    aten._conj_physical.default,
)  # fmt: skip
# Arithmetic.
takes_complex(
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
    aten.neg.default, aten.abs.default, aten.sgn.default, aten.mm.default, aten.bmm.default, aten.sum.dim_IntList,
    aten.where.self,
)  # fmt: skip
# Operations that create or move elements and compute with none.
takes_complex(
    aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default, aten.view.default,
    aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.slice.Tensor, aten.slice_scatter.default, aten.select.int, aten.cat.default,
    aten.constant_pad_nd.default, aten.full.default, aten.full_like.default, aten.zeros.default,
    aten.copy.default, aten.new_empty_strided.default, aten.scalar_tensor.default,
)  # fmt: skip
