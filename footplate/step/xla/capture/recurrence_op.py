"""Recurrent layers as one operation of the graph for each layer and direction, for any length of the sequence.

Torch decomposes `nn.GRU`, `nn.LSTM` and `nn.RNN` into the operations of every time step. A graph of 32 steps is then 32
times too long, and takes minutes to compile. During capture these layers become:

    gates = F.linear(x, w_ih, b_ih)          (steps, batch, gates)   all steps at once, outside of the recurrence
    states = footplate::recurrence(gates, …) (steps, batch, state)   one step after the other

A state is what one time step hands to the next: the hidden values, and the cell too with an LSTM. The backward pass
computes from the states, for all steps at once, what each step multiplied by the recurrent weight.
`footplate::recurrence_backward` goes back through the steps with it, and the weight's gradient is again one product.
The functions here define the operations in plain torch. `lowering/recurrence.py` computes them as a loop.

An LSTM with projections is left to torch, layer by layer. Packed sequences can't be captured, since their shapes are
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


def _simple(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda gates, products, state: function(gates + products)


def _gru(gates: Tensor, products: Tensor, state: Tensor) -> Tensor:
    (reset, update, new), (of_reset, of_update, of_new) = gates.chunk(3, -1), products.chunk(3, -1)
    new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
    return (state - new) * torch.sigmoid(update + of_update) + new


def _lstm(gates: Tensor, products: Tensor, state: Tensor) -> Tensor:
    let_in, forget, new, out = (gates + products).chunk(4, -1)
    cell = torch.sigmoid(forget) * state.chunk(2, -1)[1] + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.cat([torch.sigmoid(out) * torch.tanh(cell), cell], -1)


_CELLS = {"rnn_tanh": _simple(torch.tanh), "rnn_relu": _simple(torch.relu), "gru": _gru, "lstm": _lstm}


def _step(cell: str, gates: Tensor, products: Tensor, state: Tensor) -> Tensor:
    """Compute the state after a time step.

    Args:
        cell: the name of a cell.
        gates: the gates of the step.
        products: the hidden values before the step times the recurrent weight.
        state: the state before the step.
    """
    return _CELLS[cell](gates, products, state).to(state.dtype)


@torch.library.custom_op("footplate::recurrence", mutates_args=())
def recurrence(gates: Tensor, first: Tensor, weight: Tensor, bias: Tensor | None, cell: str) -> Tensor:
    """A recurrent layer in one direction.

    Args:
        gates: from the inputs of each time step, (steps, batch, gates).
        first: the state before the first step, (batch, state).
        weight: of the hidden values, (gates, hidden).
        bias: added to their products, (gates,).
        cell: "gru", "lstm", "rnn_tanh" or "rnn_relu".

    Returns:
        The state after each step, (steps, batch, state).
    """
    state, states = first.to(_type(gates, first)), []
    for gate in gates:
        products = F.linear(state[..., : weight.shape[1]].to(weight.dtype), weight, bias)
        state = _step(cell, gate, products, state)
        states.append(state)
    return torch.stack(states)


@torch.library.custom_op("footplate::recurrence_backward", mutates_args=())
def recurrence_backward(
    gradient: Tensor, gates: Tensor, products: Tensor, before: Tensor, weight: Tensor, cell: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a recurrent layer, from the last step back to the first.

    Args:
        gradient: of the states, (steps, batch, state).
        gates: as for `recurrence`.
        products: the terms that each step has added to its gates, (steps, batch, gates).
        before: the state before each step, (steps, batch, state).
        weight: as for `recurrence`.
        cell: as for `recurrence`.

    Returns:
        The gradients of the gates, of the products, and of the first state.
    """
    of_gates, of_products, of_state = [], [], torch.zeros_like(before[0])
    for at in reversed(range(len(gates))):
        pull: Any = torch.func.vjp(partial(_step, cell), gates[at], products[at], before[at])[1]
        of_gate, of_product, of_state = pull(gradient[at] + of_state)
        of_state[..., : weight.shape[1]] += of_product @ weight
        of_gates.append(of_gate)
        of_products.append(of_product)
    return torch.stack(of_gates[::-1]), torch.stack(of_products[::-1]), of_state


def _type(gates: Tensor, first: Tensor) -> torch.dtype:
    return torch.promote_types(gates.dtype, first.dtype)


@recurrence.register_fake
def _(gates: Tensor, first: Tensor, weight: Tensor, bias: Tensor | None, cell: str) -> Tensor:
    return first.new_empty((gates.shape[0], *first.shape), dtype=_type(gates, first))


@recurrence_backward.register_fake
def _(gradient: Tensor, gates: Tensor, products: Tensor, before: Tensor, weight: Tensor, cell: str) -> Any:
    return gates.new_empty(gates.shape), products.new_empty(products.shape), before.new_empty(before.shape[1:])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.cell = inputs
    ctx.save_for_backward(*tensors, output)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gates, first, weight, bias, states = ctx.saved_tensors
    before = torch.cat([first.to(states.dtype)[None], states[:-1]])
    hidden = before[..., : weight.shape[1]].to(weight.dtype)
    products = F.linear(hidden, weight, bias)
    of_gates, of_products, of_first = recurrence_backward(gradient, gates, products, before, weight, ctx.cell)
    flat = of_products.flatten(0, 1)
    of_bias = None if bias is None else flat.sum(0)
    return of_gates, of_first.to(first.dtype), flat.mT @ hidden.flatten(0, 1), of_bias, None


recurrence.register_autograd(_differentiate, setup_context=_remember)


def _flops(gates: Any, weight: Any) -> int:
    """Floating-point operations of the products of all steps; of shapes."""
    return 2 * math.prod(gates[:-1]) * math.prod(weight)


@register_flop_formula(torch.ops.footplate.recurrence)
def _(gates: Any, first: Any, weight: Any, *_: Any, **__: Any) -> int:
    return _flops(gates, weight)


@register_flop_formula(torch.ops.footplate.recurrence_backward)
def _(gradient: Any, gates: Any, products: Any, before: Any, weight: Any, *_: Any, **__: Any) -> int:
    return _flops(gates, weight)


CELLS: Mapping[Any, str] = {
    torch.gru: "gru", torch.lstm: "lstm", torch.rnn_tanh: "rnn_tanh", torch.rnn_relu: "rnn_relu",
}  # fmt: skip


def recurrent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of `CELLS`, as the operations above."""
    # A call with a packed sequence has other arguments.
    if len(args) == 9 and isinstance(args[3], bool):
        return _layers(CELLS[function], *args)
    return function(*args, **kwargs)


def _layers(
    cell: str, x: Tensor, hidden: Tensor | Sequence[Tensor], parameters: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`torch.gru` and the like: the last layer's hidden values, and the last states of all layers."""
    first = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    widths = [state.shape[-1] for state in first]
    run = _projected if len(set(widths)) > 1 else _layer
    directions = 2 if bidirectional else 1
    each = len(parameters) // (layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for layer in range(layers):
        if layer and train and dropout:
            x = F.dropout(x, dropout)
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = parameters[index * each : (index + 1) * each]
            values, end = run(cell, x.flip(0) if direction else x, [state[index] for state in first], own, has_biases)
            outputs.append(values.flip(0) if direction else values)
            ends.append(end)
        x = torch.cat(outputs, -1)
    x = x.transpose(0, 1) if batch_first else x
    return x, *torch.stack(ends).split(widths, -1)


def _layer(
    cell: str, x: Tensor, first: list[Tensor], parameters: Sequence[Tensor], has_biases: bool
) -> tuple[Tensor, Tensor]:
    """The hidden values of all steps, and the state after the last."""
    of_x, of_hidden, *biases = parameters
    gates = F.linear(x, of_x, biases[0] if biases else None)
    weight, bias = of_hidden.to(gates.dtype), biases[1].to(gates.dtype) if biases else None
    states = recurrence(gates, torch.cat(first, -1), weight, bias, cell)
    return states[..., : weight.shape[1]], states[-1]


def _projected(
    cell: str, x: Tensor, first: list[Tensor], parameters: Sequence[Tensor], has_biases: bool
) -> tuple[Tensor, Tensor]:
    """`_layer` for an LSTM with projections."""
    before = [state[None] for state in first]
    values, *ends = torch.lstm(x, before, list(parameters), has_biases, 1, 0.0, False, False, False)
    return values, torch.cat(ends, -1)[0]
