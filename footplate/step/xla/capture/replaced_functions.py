"""Functions of torch that a capture replaces: one table, and the mode that looks functions up in it.

    F.scaled_dot_product_attention      one operation of the graph (`attention_op.py`)
    torch.gru, torch.lstm, torch.rnn_…  one operation for each layer and direction (`recurrence_op.py`)
    parameter.data = value              a change of the traced parameter in place (`state.py`)
    torch.bincount                      has the shape of its `minlength`, if there is one
    F.dropout                           returns its input if it drops nothing; torch's decomposition would copy it

A replacement has the arguments of the function, and calls the function where there is nothing to replace. One mode has
them all, since torch calls the Python code of every mode for every function. A mode doesn't see what a function of torch
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from footplate.step.xla.capture.attention_op import attend, torchs_attention
from footplate.step.xla.capture.recurrence_op import CELLS, recurrent
from footplate.step.xla.capture.state import SET_DATA, set_data


class ReplacedFunctions(TorchFunctionMode):
    """Calls the replacement of a function, if there is one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        return torch.bincount(input, weights)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif not weights.is_floating_point():
        weights = weights.double()
    counts = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    return counts.scatter_add(0, input.long(), weights)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training is False or (isinstance(p, (int, float)) and p == 0):
        return input
    return F.dropout(input, p, training, inplace)


REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    torchs_attention: attend,
    **{function: partial(recurrent, function) for function in CELLS},
    SET_DATA: set_data,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    F.dropout: _dropout,
}
