"""What a captured graph says by itself, without a compiler: its arithmetic, its traffic, its memory.

Three numbers, for hardware whose compiler isn't at hand (GPUs, and eager training on CPUs):

    flops     of matrix products, convolutions and attention; everything else is counted as free, as are products with a
              convolution's padding and with what causal attention hides
    traffic   the bytes that must at least be moved, if every chain of elementwise operations were free: each product,
              reduction and gather reads its operands and writes its results, and the step reads and writes its state
    memory    the most bytes that are alive at once, when operations run in the graph's order, which is the order of eager
              torch, and each tensor is let go after its last use

Views share their tensor's memory. An elementwise operation may write over an operand that nobody needs any more, as
in-place operations and fused optimizers do; with that, the new state takes the place of the old.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from footplate.step.xla.capture import (
    Captured,
    attention_op,  # noqa: F401  they declare torch.ops.footplate
    averaging_op,  # noqa: F401  they declare torch.ops.footplate
)

AVERAGE = torch.ops.footplate.average.default
_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_ATTENTION = {torch.ops.footplate.attention.default, torch.ops.footplate.attention_backward.default}
_VIEWS = {_aten._unsafe_view.default, _aten.reshape.default, torch.ops.prims.copy_strided.default}
_MADE_WITH_OTHERS = {  # conversions, copies and constants, which no kernel is spent on alone
    _aten._to_copy, _aten.clone, _aten.copy, _aten.full, _aten.full_like, _aten.zeros, _aten.zeros_like, _aten.ones,
    _aten.ones_like, _aten.empty, _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_empty,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.arange,
}  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """What one step needs on one device.

    Attributes:
        flops: floating-point operations; a multiplication with an addition is two.
        convolution_flops: those of convolutions among them.
        traffic_bytes: see the module's docstring.
        state_bytes: parameters, buffers and the optimizer's memory.
        batch_bytes: the batch.
        peak_bytes: the most that is alive at once, with state and batch.
        averaged_bytes: what devices exchange, on each of them: gradients, floating-point buffers, logs.
    """

    flops: float
    convolution_flops: float
    traffic_bytes: int
    state_bytes: int
    batch_bytes: int
    peak_bytes: int
    averaged_bytes: int


def needs(captured: Captured) -> Needs:
    """What a captured step needs."""
    nodes, state = list(captured.graph.graph.nodes), len(captured.paths)
    inputs = [_nbytes(node.meta["val"]) for node in nodes if node.op == "placeholder"]
    averages = [node for node in nodes if node.target is AVERAGE]
    return Needs(
        flops=sum(map(_flops, nodes)),
        convolution_flops=sum(map(_convolution_flops, nodes)),
        traffic_bytes=_traffic(nodes),
        state_bytes=sum(inputs[:state]),
        batch_bytes=sum(inputs[state + captured.rates :]),
        peak_bytes=_peak(nodes),
        averaged_bytes=sum(_nbytes(node.meta["val"]) for node in averages),
    )


def _flops(node: Node) -> float:
    if node.target in _CONVOLUTIONS:
        return _convolution_flops(node)
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    flops = float(count(*args, **kwargs, out_val=node.meta["val"]))
    return flops / 2 if node.target in _ATTENTION and node.args[-2] else flops


def _convolution_flops(node: Node) -> float:
    """Of a convolution or its backward pass; torch's own formula counts padding, and backwards each group as all."""
    if node.target not in _CONVOLUTIONS:
        return 0.0
    args: list[Any] = list(map_arg(node.args, lambda used: used.meta["val"]))
    if node.target is _aten.convolution.default:
        answer, times = node.meta["val"], 1
    else:
        answer, times = args.pop(0), sum(args[-1][:2])
    values, weights, _, strides, paddings, dilations, transposed = args[:7]
    fine, coarse = (answer, values) if transposed else (values, answer)
    flops = 2.0 * times * values.shape[0] * weights.shape[0] * weights.shape[1]
    for at, taps in enumerate(weights.shape[2:]):
        stride, padding, dilation = (given[at % len(given)] for given in (strides, paddings, dilations))
        starts = [tap * dilation - padding for tap in range(taps)]
        flops *= sum(_inside(start, stride, fine.shape[2 + at], coarse.shape[2 + at]) for start in starts)
    return flops


def _inside(start: int, stride: int, size: int, steps: int) -> int:
    """How many of so many steps from `start` are at least 0 and less than `size`."""
    first, behind = max(0, -(start // stride)), -((start - size) // stride)
    return max(0, min(steps, behind) - first)


def _traffic(nodes: list[Node]) -> int:
    total = 0
    for node in nodes:
        if node.op == "placeholder":
            total += _nbytes(node.meta["val"])
        elif node.op == "output":
            total += sum(_nbytes(used.meta["val"]) for used in node.all_input_nodes)
        elif node.op == "call_function" and not (_is_elementwise(node) or _is_view(node)):
            total += sum(_nbytes(used.meta.get("val")) for used in node.all_input_nodes) + _nbytes(node.meta.get("val"))
    return total


@dataclass(eq=False)
class _Storage:
    """Memory of one tensor and of all views of it."""

    nbytes: int
    users: set[Node] = field(default_factory=set)


def _peak(nodes: list[Node]) -> int:
    storages = _storages(nodes)
    place = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        for used in node.all_input_nodes:
            for storage in storages[used]:
                storage.users.add(node)
    ends: dict[int, list[_Storage]] = {}
    for storage in dict.fromkeys(one for found in storages.values() for one in found):
        if storage.users:
            ends.setdefault(max(place[user] for user in storage.users), []).append(storage)
    # Nothing is let go before the first operation: state and batch are there when it begins.
    begun: set[_Storage] = set()
    live = peak = 0
    for index, node in enumerate(nodes):
        new = [one for one in storages[node] if one not in begun]
        begun.update(new)
        freed = sum(one.nbytes for one in ends.get(index, ()))
        needed = sum(one.nbytes for one in new)
        over = _is_elementwise(node) or node.op == "output"
        peak = max(peak, live - freed + needed if over else live + needed, live)
        live += needed - freed
        live -= sum(one.nbytes for one in new if not one.users)
    return peak


def _storages(nodes: list[Node]) -> dict[Node, tuple[_Storage, ...]]:
    """The memory that each node's value lies in: one storage, or one for each of several results."""
    found: dict[Node, tuple[_Storage, ...]] = {}
    for node in nodes:
        if node.op == "output":
            found[node] = ()
        elif node.target is operator.getitem:
            whole, index = node.args
            several = found[whole]  # type: ignore[index]
            found[node] = (several[index],) if len(several) > 1 else several  # type: ignore[index]  # parts that are views
        elif _is_view(node):
            found[node] = found[node.all_input_nodes[0]]
        else:
            value = node.meta.get("val")
            values = value if isinstance(value, (list, tuple)) else (value,)
            found[node] = tuple(_Storage(_nbytes(one)) for one in values)  # of what isn't a tensor, 0 bytes
    return found


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if getattr(node.target, "overloadpacket", None) in _MADE_WITH_OTHERS:
        return True
    return str(node.target).startswith("aten._foreach_") or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target is operator.getitem or getattr(node.target, "is_view", False) or node.target in _VIEWS


def _nbytes(value: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
