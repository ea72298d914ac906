"""Products of matrices, and those of experts: each group of rows, which follow each other, with a matrix of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, lowers

# Full precision, as torch has it on every device by default; on a TPU, XLA would multiply in bfloat16 otherwise.
_PRECISION = lax.Precision.HIGHEST


@lowers(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(context: Context, a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=_PRECISION)


@lowers(aten.addmm.default, aten.baddbmm.default)
def add_matmul(context: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = jnp.matmul(a, b, precision=_PRECISION)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


def _grouped(x: Any, several: Any, ends: Any) -> Any:
    """Rows (rows, n) times several matrices (groups, n, m): those of a group end where `ends` (groups,) says."""
    sums = jnp.promote_types(x.dtype, jnp.float32)
    sizes = jnp.diff(ends, prepend=0)
    return lax.ragged_dot(x, several, sizes, precision=_PRECISION, preferred_element_type=sums)


def _of_groups(x: Any, gradient: Any, ends: Any) -> Any:
    """For each group of rows, those of x (rows, n), transposed, times those of the gradient (rows, m)."""
    several = jnp.zeros((ends.shape[0], x.shape[1], gradient.shape[1]), gradient.dtype)
    return jax.vjp(lambda several: _grouped(x, several, ends).astype(x.dtype), several)[1](gradient)[0]


@lowers(aten._grouped_mm.default)
def grouped_matmul(context: Context, a: Any, b: Any, ends: Any = None, *_: Any) -> Any:
    """A group is of a's rows where b has a matrix for each, of b's columns likewise, or of what is summed over."""
    if a.ndim == b.ndim == 3:
        return jnp.matmul(a, b, precision=_PRECISION)
    if a.ndim == b.ndim == 2:
        return _of_groups(a.T, b, ends)
    return _grouped(a, b, ends) if b.ndim == 3 else _grouped(b.T, a.swapaxes(1, 2), ends).T


@lowers("transformers.grouped_mm_fallback.default")
def grouped_matmul_of_transformers(context: Context, x: Any, several: Any, ends: Any) -> Any:
    return _grouped(x, several, ends)


@lowers("transformers.grouped_mm_fallback_backward.default")
def grouped_matmul_of_transformers_backward(context: Context, x: Any, several: Any, ends: Any, gradient: Any) -> Any:
    return _grouped(gradient, several.swapaxes(1, 2), ends), _of_groups(x, gradient, ends)
