"""The matrix products in a graph, which are most of its arithmetic.

A convolution counts as one product: the rows are the positions of its output, the inner size is the number of values
that one position is computed from. Its backward pass counts as two products of the same sizes in another order. A
recurrent layer has one product in each time step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from footplate.hardware.tpu.pitfalls import Product
from footplate.step.xla.capture import recurrence_op as _declared  # noqa: F401  declares its operations

_aten = torch.ops.aten


def products_of(graph: GraphModule) -> list[Product]:
    """Return every matrix product, in the graph's order."""
    return [product for node in graph.graph.nodes if node.op == "call_function" for product in _of(node)]


def _of(node: Node) -> Iterator[Product]:
    target = getattr(node.target, "overloadpacket", None)
    if target in (_aten.mm, _aten.bmm):
        yield _product(_shape(node.args[0]), _shape(node.args[1]))
    elif target in (_aten.addmm, _aten.baddbmm):
        yield _product(_shape(node.args[1]), _shape(node.args[2]))
    elif target in (torch.ops.footplate.recurrence, torch.ops.footplate.recurrence_backward):
        yield _recurrent(node)
    elif target is _aten.convolution:
        yield _convolution(_shape(node), _shape(node.args[1]))
    elif target is _aten.convolution_backward:
        forward = _convolution(_shape(node.args[0]), _shape(node.args[2]))
        wanted: Any = node.args[-1]
        # The gradient of the input.
        if wanted[0]:
            yield Product(forward.rows, forward.columns, forward.inner)
        # The gradient of the weight.
        if wanted[1]:
            yield Product(forward.inner, forward.rows, forward.columns)


def _product(left: Sequence[int], right: Sequence[int]) -> Product:
    return Product(left[-2], left[-1], right[-1], math.prod(left[:-2]))


def _convolution(output: Sequence[int], weight: Sequence[int]) -> Product:
    return Product(output[0] * math.prod(output[2:]), math.prod(weight[1:]), weight[0])


def _recurrent(node: Node) -> Product:
    forward = node.target is torch.ops.footplate.recurrence.default
    gates, weight = (_shape(node.args[at]) for at in ((0, 2) if forward else (1, 4)))
    inner, columns = weight[::-1] if forward else weight
    return Product(gates[1], inner, columns, gates[0])


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
