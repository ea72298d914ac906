"""Arithmetic, memory traffic and peak memory of a captured graph, counted without a compiler.

Plans use them for hardware without a compiler on this machine: GPUs, and eager training on CPUs. A training that has run
out of memory uses them to tell which batch fits.

    flops     of matrix products, convolutions and attention. All other operations count as free, as do products with the
              padding of a convolution and with the part that causal attention masks.
    traffic   the bytes that a step must move at least, if each chain of elementwise operations were free. Each product,
              reduction and gather reads its operands and writes its results. The step reads and writes its state.
    memory    the most bytes that are alive at once, if operations run in the graph's order, as in eager torch, and each
              tensor is freed after its last use.

Views share the memory of their tensor. An elementwise operation may overwrite an operand that isn't used again, as in-place
operations and fused optimizers do. So the new state overwrites the old one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from footplate.step.xla.capture import averaging_op  # noqa: F401  it declares torch.ops.footplate.average
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.flops import convolution_flops_of, flops_of

AVERAGE = torch.ops.footplate.average.default
_aten = torch.ops.aten
_VIEWS = {_aten._unsafe_view.default, _aten.reshape.default, torch.ops.prims.copy_strided.default}
# Conversions, copies and constants: compilers fuse them with other operations.
_FUSED = {
    _aten._to_copy, _aten.clone, _aten.copy, _aten.full, _aten.full_like, _aten.zeros, _aten.zeros_like, _aten.ones,
    _aten.ones_like, _aten.empty, _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_empty,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.arange,
}  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """The needs of one step on one device.

    Attributes:
        flops: floating-point operations; a multiplication with an addition counts as two.
        convolution_flops: the part of convolutions in `flops`.
        traffic_bytes: see the docstring of this file.
        state_bytes: parameters, buffers and the optimizer's state.
        batch_bytes: the batch.
        peak_bytes: the most that is alive at once, with state and batch.
        averaged_bytes: the data that each device exchanges: gradients, floating-point buffers, logs.
    """

    flops: float
    convolution_flops: float
    traffic_bytes: int
    state_bytes: int
    batch_bytes: int
    peak_bytes: int
    averaged_bytes: int


def needs(captured: Captured) -> Needs:
    """Count the needs of a captured step."""
    nodes, state = list(captured.graph.graph.nodes), len(captured.paths)
    inputs = [_nbytes(node.meta["val"]) for node in nodes if node.op == "placeholder"]
    averages = [node for node in nodes if node.target is AVERAGE]
    return Needs(
        flops=sum(map(flops_of, nodes)),
        convolution_flops=sum(map(convolution_flops_of, nodes)),
        traffic_bytes=_traffic(nodes),
        state_bytes=sum(inputs[:state]),
        batch_bytes=sum(inputs[state + captured.rates :]),
        peak_bytes=_peak(nodes),
        averaged_bytes=sum(_nbytes(node.meta["val"]) for node in averages),
    )


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
    """The memory that one tensor and all its views share."""

    nbytes: int
    users: set[Node] = field(default_factory=set)


def _peak(nodes: list[Node]) -> int:
    storages = _storages(nodes)
    position = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        for used in node.all_input_nodes:
            for storage in storages[used]:
                storage.users.add(node)

    # The storages that are freed after each position.
    last_uses: dict[int, list[_Storage]] = {}
    for storage in dict.fromkeys(storage for of_node in storages.values() for storage in of_node):
        if storage.users:
            last_uses.setdefault(max(position[user] for user in storage.users), []).append(storage)

    # State and batch exist before the first operation, so nothing is freed before it.
    allocated: set[_Storage] = set()
    live = peak = 0
    for index, node in enumerate(nodes):
        new = [storage for storage in storages[node] if storage not in allocated]
        allocated.update(new)
        freed = sum(storage.nbytes for storage in last_uses.get(index, ()))
        needed = sum(storage.nbytes for storage in new)
        overwrites = _is_elementwise(node) or node.op == "output"
        peak = max(peak, live - freed + needed if overwrites else live + needed, live)
        live += needed - freed
        live -= sum(storage.nbytes for storage in new if not storage.users)
    return peak


def _storages(nodes: list[Node]) -> dict[Node, tuple[_Storage, ...]]:
    """Assign storages to the value of each node: one storage, or one for each of several results."""
    storages: dict[Node, tuple[_Storage, ...]] = {}
    for node in nodes:
        if node.op == "output":
            storages[node] = ()
        elif node.target is operator.getitem:
            # With one storage, the parts are views of it.
            whole, index = node.args
            parts = storages[whole]  # type: ignore[index]
            storages[node] = (parts[index],) if len(parts) > 1 else parts  # type: ignore[index]
        elif _is_view(node):
            storages[node] = storages[node.all_input_nodes[0]]
        else:
            # A value that isn't a tensor has 0 bytes.
            value = node.meta.get("val")
            values = value if isinstance(value, (list, tuple)) else (value,)
            storages[node] = tuple(_Storage(_nbytes(result)) for result in values)
    return storages


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if getattr(node.target, "overloadpacket", None) in _FUSED:
        return True
    return str(node.target).startswith("aten._foreach_") or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target is operator.getitem or getattr(node.target, "is_view", False) or node.target in _VIEWS


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
