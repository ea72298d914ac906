"""Recurrent layers as a loop over time. The loop is compiled once, for every length of the sequence.

`capture/recurrence_op.py` defines the operations. The derivative of a cell is JAX's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from footplate.step.xla.capture import recurrence_op as _declared  # noqa: F401  declares the operations
from footplate.step.xla.lowering.table import Context, lowers

Cell = Callable[[Any, Any, Any], Any]


def _simple(function: Callable[[Any], Any]) -> Cell:
    return lambda gates, products, state: function(gates + products)


def _gru(gates: Any, products: Any, state: Any) -> Any:
    (reset, update, new), (of_reset, of_update, of_new) = jnp.split(gates, 3, -1), jnp.split(products, 3, -1)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + of_reset) * of_new)
    return (state - new) * jax.nn.sigmoid(update + of_update) + new


def _lstm(gates: Any, products: Any, state: Any) -> Any:
    let_in, forget, new, out = jnp.split(gates + products, 4, -1)
    cell = jax.nn.sigmoid(forget) * jnp.split(state, 2, -1)[1] + jax.nn.sigmoid(let_in) * jnp.tanh(new)
    return jnp.concatenate([jax.nn.sigmoid(out) * jnp.tanh(cell), cell], -1)


_CELLS: dict[str, Cell] = {
    "rnn_tanh": _simple(jnp.tanh), "rnn_relu": _simple(jax.nn.relu), "gru": _gru, "lstm": _lstm,
}  # fmt: skip


def _step(cell: str, gates: Any, products: Any, state: Any) -> Any:
    """Compute a time step; `capture/recurrence_op.py` has the same function for torch."""
    return _CELLS[cell](gates, products, state).astype(state.dtype)


def _product(formula: str, a: Any, b: Any) -> Any:
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST)


@lowers(torch.ops.footplate.recurrence.default)
def recurrence(context: Context, gates: Any, first: Any, weight: Any, bias: Any, cell: str) -> Any:
    def forward(state: Any, gate: Any) -> tuple[Any, Any]:
        products = _product("bh,gh->bg", state[:, : weight.shape[1]].astype(weight.dtype), weight)
        state = _step(cell, gate, products if bias is None else products + bias, state)
        return state, state

    return lax.scan(forward, first.astype(context.dtype), gates)[1]


@lowers(torch.ops.footplate.recurrence_backward.default)
def recurrence_backward(
    context: Context, gradient: Any, gates: Any, products: Any, before: Any, weight: Any, cell: str
) -> Any:
    hidden = weight.shape[1]

    def backward(of_state: Any, inputs: Any) -> tuple[Any, Any]:
        gradient, *operands = inputs
        _, pull = jax.vjp(partial(_step, cell), *operands)
        of_gates, of_products, of_state = pull(gradient + of_state)
        back = _product("bg,gh->bh", of_products, weight).astype(of_state.dtype)
        return of_state.at[:, :hidden].add(back), (of_gates, of_products)

    of_first, of_inputs = lax.scan(
        backward, jnp.zeros_like(before[0]), (gradient, gates, products, before), reverse=True
    )
    return *of_inputs, of_first
