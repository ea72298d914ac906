"""Products of matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from footplate.step.lowering.table import Context, aten, lowers

# Full precision, as torch has it on every device by default; on a TPU, XLA would multiply in bfloat16 otherwise.
_PRECISION = lax.Precision.HIGHEST


@lowers(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(context: Context, a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=_PRECISION)


@lowers(aten.addmm.default, aten.baddbmm.default)
def add_matmul(context: Context, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = jnp.matmul(a, b, precision=_PRECISION)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)
