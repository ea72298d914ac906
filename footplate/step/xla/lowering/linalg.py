"""Products of matrices, and grouped products of experts: each group of consecutive rows with its own matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, lowers

# Full precision is torch's default on every device. On a TPU, XLA would otherwise multiply in bfloat16.
_PRECISION = lax.Precision.HIGHEST


@lowers(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(context: Context, a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=_PRECISION)


@lowers(aten.addmm.default, aten.baddbmm.default)
def add_matmul(context: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = jnp.matmul(a, b, precision=_PRECISION)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


def _grouped(x: Any, several: Any, ends: Any) -> Any:
    """Rows (rows, n) times several matrices (groups, n, m). `ends` (groups,) has the end of each group's rows."""
    sums = jnp.promote_types(x.dtype, jnp.float32)
    sizes = jnp.diff(ends, prepend=0)
    return lax.ragged_dot(x, several, sizes, precision=_PRECISION, preferred_element_type=sums)


def _of_groups(x: Any, gradient: Any, ends: Any) -> Any:
    """Multiply, for each group, its rows of x (rows, n), transposed, by its rows of the gradient (rows, m)."""
    several = jnp.zeros((ends.shape[0], x.shape[1], gradient.shape[1]), gradient.dtype)
    return jax.vjp(lambda several: _grouped(x, several, ends).astype(x.dtype), several)[1](gradient)[0]


@lowers(aten._grouped_mm.default)
def grouped_matmul(context: Context, a: Any, b: Any, ends: Any = None, *_: Any) -> Any:
    """Groups are rows of a if b is three-dimensional, columns of b if a is, and parts of the sum if neither is."""
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
