"""The table of operations: for each of ATen's, what it is in JAX.

To add one, write a function in the family's file:

    @lowers(aten.relu.default)
    def relu(context, x):
        return jnp.maximum(x, 0)

and give it samples in `tests/xla/samples.py`, against which it is compared with torch. It gets the operation's
arguments, tensors as JAX arrays, everything else as torch has it (sizes, dimensions that may be negative, `None`). It
returns an array, or a tuple or list of them, in the shapes that torch would have; the interpreter casts it to torch's
type. Before that stands the context, which knows what torch said of the result.
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
"""By operation; those that another package declares, by name, since nobody may have imported it."""


@dataclass(frozen=True)
class Context:
    """What an operation may need to know beyond its arguments.

    Attributes:
        dtype: the type of the (first) result, by torch's rules of promotion.
        shape: the shape of the (first) result.
        common: the type in which torch compares or computes its tensor arguments, before it makes a result of them.
        key: a function that makes a key for random numbers, the operation's own.
        platform: what the program is compiled for, as JAX names it: "cpu", "tpu", …
        strides: how torch lays out the first argument, in elements; empty where that is no tensor.
    """

    dtype: Any
    shape: tuple[int, ...]
    common: Any
    key: Callable[[], jax.Array]
    platform: str
    strides: tuple[int, ...] = ()


def lowering_of(operation: Any) -> Lowering | None:
    """What an operation is in JAX; None where the table lacks it."""
    return LOWERINGS.get(operation) or LOWERINGS.get(str(operation))


def lowers(*operations: Any) -> Callable[[Lowering], Lowering]:
    """Enter a function into the table, under one operation or several."""

    def enter(function: Lowering) -> Lowering:
        for operation in operations:
            LOWERINGS[operation] = function
        return function

    return enter


def elementwise(function: Callable[..., Any], *operations: Any) -> None:
    """Enter a function of arrays that computes in the type of its result."""

    def lowering(context: Context, *args: Any, **kwargs: Any) -> Any:
        return function(
            *[cast(arg, context.dtype) for arg in args],
            **{name: cast(arg, context.dtype) for name, arg in kwargs.items()},
        )

    lowers(*operations)(lowering)


def comparing(function: Callable[..., Any], *operations: Any) -> None:
    """Enter a function of arrays whose result is of another type than what it computes with: comparisons."""

    def lowering(context: Context, *args: Any) -> Any:
        return function(*[cast(arg, context.common) for arg in args])

    lowers(*operations)(lowering)


def is_array(value: Any) -> bool:
    """Whether an argument is a tensor, not a plain number."""
    return isinstance(value, jax.Array)


def cast(value: Any, dtype: Any) -> Any:
    """An array in a type; a plain number stays one, so that it takes the type of what it meets."""
    return value.astype(dtype) if is_array(value) and value.dtype != dtype else value


def axes(dims: Any, rank: int) -> tuple[int, ...]:
    """Dimensions as ATen gives them (one, several, none for all, negative) as a tuple from 0."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    several = dims if isinstance(dims, (list, tuple)) else (dims,)
    return tuple(dim % rank for dim in several) if rank else ()


def wide(x: Any) -> Any:
    """An array in at least single precision, as torch computes norms and softmax of half-precision numbers."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
