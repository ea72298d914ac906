"""The table of operations: a JAX function for each operation of ATen.

To add one, write a function in the family's file:

    @lowers(aten.relu.default)
    def relu(context, x):
        return jnp.maximum(x, 0)

The function gets the context, then the operation's arguments: tensors as JAX arrays, everything else as in torch (sizes,
dimensions that may be negative, `None`). It returns an array, or a tuple or list of arrays, in torch's shapes. The
interpreter casts the result to torch's type.

Then give the operation samples in `tests/step/xla/samples.py`, with which the tests compare it with torch, and run
`make tables`. If no family fits, add a file, and its name to `FAMILIES` in `__init__.py`. If the function is right for
complex numbers too, enter the operation with `takes_complex`, and give it a sample with some.

To see which operations are missing, train one step with `accelerator="xla"`. The error names them, including those of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

aten = torch.ops.aten
Lowering = Callable[..., Any]

LOWERINGS: dict[Any, Lowering] = {}
"""Lowerings by operation. Operations of other packages have their name as the key: their package may not be imported."""


COMPLEX: set[Any] = set()
"""Operations that may be given complex numbers."""


@dataclass(frozen=True)
class Context:
    """Facts about an operation beyond its arguments.

    Attributes:
        dtype: the type of the (first) result, by torch's rules of promotion.
        shape: the shape of the (first) result.
        common: the type in which torch compares its tensor arguments.
        key: a function that makes the operation's own key for random numbers.
        platform: the platform of the program, as JAX names it: "cpu", "tpu", …
        strides: the strides of the first argument in torch, in elements; empty if it is no tensor.
    """

    dtype: Any
    shape: tuple[int, ...]
    common: Any
    key: Callable[[], jax.Array]
    platform: str
    strides: tuple[int, ...] = ()


def lowering_of(operation: Any) -> Lowering | None:
    """The JAX function of an operation; None if the table lacks it."""
    return LOWERINGS.get(operation) or LOWERINGS.get(str(operation))


def lowers(*operations: Any) -> Callable[[Lowering], Lowering]:
    """Register a function in the table, under one operation or several."""

    def enter(function: Lowering) -> Lowering:
        for operation in operations:
            LOWERINGS[operation] = function
        return function

    return enter


def takes_complex(*operations: Any) -> None:
    """Enter operations whose functions are right for complex numbers, too."""
    COMPLEX.update(operations)


def elementwise(function: Callable[..., Any], *operations: Any) -> None:
    """Register a function of arrays that computes in the type of its result."""

    def lowering(context: Context, *args: Any, **kwargs: Any) -> Any:
        return function(
            *[cast(arg, context.dtype) for arg in args],
            **{name: cast(arg, context.dtype) for name, arg in kwargs.items()},
        )

    lowers(*operations)(lowering)


def comparing(function: Callable[..., Any], *operations: Any) -> None:
    """Register a comparison: a function of arrays whose result has another type than its operands."""

    def lowering(context: Context, *args: Any) -> Any:
        return function(*[cast(arg, context.common) for arg in args])

    lowers(*operations)(lowering)


def is_array(value: Any) -> bool:
    """Return True for a tensor, and False for a plain number."""
    return isinstance(value, jax.Array)


def cast(value: Any, dtype: Any) -> Any:
    """Cast an array. A plain number stays one, so that it takes the type of the array that it meets."""
    return value.astype(dtype) if is_array(value) and value.dtype != dtype else value


def axes(dims: Any, rank: int) -> tuple[int, ...]:
    """Dimensions as ATen gives them (one, several, none for all, negative), as a tuple from 0."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    several = dims if isinstance(dims, (list, tuple)) else (dims,)
    return tuple(dim % rank for dim in several) if rank else ()


def wide(x: Any) -> Any:
    """Cast an array to at least single precision, in which torch computes norms and softmax of half precision."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
