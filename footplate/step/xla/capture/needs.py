"""Arithmetic, memory traffic and peak memory of a captured graph, counted without a compiler.

Plans use them for hardware without a compiler on this machine: GPUs, and eager training on CPUs. A training that has run
out of memory uses them to tell which batch fits.

    flops     of matrix products, convolutions and attention. All other operations count as free, as do products with the
              padding of a convolution and with the part that causal attention masks.
    traffic   the bytes that a step must move at least, if each chain of elementwise operations were free. Each product,
              reduction and gather reads its operands and writes its results. The step reads and writes its state.
    memory    the most bytes that are alive at once in an eager step, by the rules below.

Views share the memory of their tensor. The rules of memory are those of eager torch. The notes of `eager_operations.py`
tell which nodes of the graph are one eager operation.

- An operation allocates its result before its operands are freed. Only in-place operations overwrite an operand.
- A forward pass frees a tensor after its last use, unless the backward pass needs it. Autocast keeps its copies of the
  parameters until the forward pass ends.
- An autograd node frees its gradient, its saved tensors and its temporaries when it ends. Autograd adds a second gradient
  of a tensor to the first in place.
- Gradients stay until the backward pass of the next step begins.
- An optimizer overwrites its state. Its temporaries depend on its kernels. With `fused=True` there are none. With
  `foreach`, which is torch's default on a GPU, those of all parameters are alive at once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from footplate.step.xla.capture import attention_op, averaging_op  # noqa: F401  they declare torch.ops.footplate
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
    parameters = {node for node, path in zip(nodes, captured.paths, strict=False) if path[0] == "params"}
    averages = [node for node in nodes if node.target is AVERAGE]
    return Needs(
        flops=sum(map(flops_of, nodes)),
        convolution_flops=sum(map(convolution_flops_of, nodes)),
        traffic_bytes=_traffic(nodes),
        state_bytes=sum(inputs[:state]),
        batch_bytes=sum(inputs[state + captured.rates :]),
        peak_bytes=_peak(nodes, parameters),
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
    """The memory that one tensor and all its views share.

    Attributes:
        nbytes: its size.
        users: the nodes that read it.
        lasts: it is there before and after the step, as state and batch are.
        gradient: the optimizer's step uses it as a gradient.
        same: another storage whose memory this one is, because an operation wrote its result into that.
    """

    nbytes: int
    users: set[Node] = field(default_factory=set)
    lasts: bool = False
    gradient: bool = False
    same: _Storage | None = None

    def root(self) -> _Storage:
        """The storage that stands for all that are the same memory."""
        storage = self
        while storage.same is not None:
            storage = storage.same
        return storage

    def becomes(self, other: _Storage) -> None:
        """Make this storage the same memory as another."""
        mine, root = self.root(), other.root()
        if mine is not root:
            mine.same = root
            root.users |= mine.users
            root.gradient |= mine.gradient
            root.lasts |= mine.lasts


@dataclass(eq=False)
class _Operation:
    """An operation of eager torch: one kernel, which may be several nodes of the graph.

    Attributes:
        nodes: its nodes, in order.
        index: its position in the step.
        ends: the position of the last operation before eager torch frees the operands of this one: of the same autograd
            node, or of the same optimizer's step.
    """

    nodes: list[Node]
    index: int
    ends: int = 0

    def note(self, name: str) -> Any:
        """A note of `eager_operations.py`."""
        return self.nodes[-1].meta.get(name)


def _peak(nodes: Sequence[Node], parameters: Collection[Node]) -> int:
    operations = _operations(nodes)
    position = {node: operation.index for operation in operations for node in operation.nodes}
    storages = _storages(nodes)
    _overwrite(operations, position, storages)
    made: dict[_Storage, int] = {}
    for node in nodes:
        for storage in storages[node]:
            made.setdefault(storage.root(), position[node])

    backward = next((operation.index for operation in operations if operation.note("backward") is not None), 0)
    casts = {
        storages[node][0].root()
        for node in nodes
        if node.target is _aten._to_copy.default and node.args[0] in parameters and position[node] < backward
    }

    # changes[i]: the bytes allocated for operation i, minus the bytes freed after operation i - 1.
    changes = [0] * (len(operations) + 1)
    for storage, first in made.items():
        users = {position[user] for user in storage.users}
        if storage.lasts:
            changes[0] += storage.nbytes
        elif users == {first}:
            continue  # a value within a kernel
        elif storage.gradient:
            changes[first] += storage.nbytes
            changes[0] += storage.nbytes
            changes[backward] -= storage.nbytes
        else:
            last = operations[max(users, default=first)].ends
            if storage in casts:
                last = max(last, backward - 1)
            changes[first] += storage.nbytes
            changes[last + 1] -= storage.nbytes
    return max(itertools.accumulate(changes))


def _operations(nodes: Sequence[Node]) -> list[_Operation]:
    """Put the nodes of each eager operation together."""
    operations: list[_Operation] = []
    for node in nodes:
        number = node.meta.get("eager_operation")
        if operations and number is not None and number == operations[-1].note("eager_operation"):
            operations[-1].nodes.append(node)
        else:
            operations.append(_Operation([node], len(operations), len(operations)))

    for operation, after in reversed(list(itertools.pairwise(operations))):
        together = operation.note("backward") is not None and operation.note("backward") == after.note("backward")
        if together or operation.note("optimizer") == after.note("optimizer") == "foreach":
            operation.ends = after.ends
    return operations


def _overwrite(
    operations: list[_Operation], position: dict[Node, int], storages: dict[Node, tuple[_Storage, ...]]
) -> None:
    """Let operations that eager torch does in place overwrite their operands."""
    for operation in operations:
        for node in operation.nodes:
            changed = node.meta.get("overwrites")
            if changed in storages:
                for mine, other in zip(storages[node], storages[changed], strict=False):
                    mine.becomes(other)

            # Eager torch's attention lays out its result so that merging the heads is a view.
            if node.target is _aten.clone.default and _is_attention(node.all_input_nodes[0]):
                storages[node][0].becomes(storages[node.all_input_nodes[0]][0])

        # Autograd adds a second gradient to the first in place. So do optimizers with their temporaries.
        (*_, node), kernels = operation.nodes, operation.note("optimizer")
        adds = operation.note("backward") is not None and node.target is _aten.add.Tensor
        if len(operation.nodes) == 1 and (adds or (kernels == "foreach" and _is_elementwise(node))):
            (mine,) = storages[node]
            for used in node.all_input_nodes:
                for other in (storage.root() for storage in storages[used]):
                    unused = max(position[user] for user in other.users) == operation.index
                    temporary = not (other.lasts or other.gradient) and other.nbytes == mine.nbytes
                    if unused and temporary and mine.root() is mine:
                        mine.becomes(other)


def _storages(nodes: Sequence[Node]) -> dict[Node, tuple[_Storage, ...]]:
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
            # A value that isn't a tensor has 0 bytes. An optimizer with one kernel for all has no temporaries.
            value = node.meta.get("val")
            values = value if isinstance(value, (list, tuple)) else (value,)
            absent = node.meta.get("only_captured") or node.meta.get("optimizer") == "fused"
            sizes = [0 if absent else _nbytes(result) for result in values]
            storages[node] = tuple(_Storage(nbytes, lasts=node.op == "placeholder") for nbytes in sizes)
        for storage in storages[node]:
            storage.gradient |= "gradient" in node.meta
        for used in node.all_input_nodes if node.target is not operator.getitem else ():
            for storage in storages[used]:
                storage.users.add(node)
    return storages


def _is_attention(node: Node) -> bool:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node.target is torch.ops.footplate.attention.default


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
