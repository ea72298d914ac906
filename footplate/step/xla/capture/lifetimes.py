"""Lifetimes of the memory of a captured step, by the rules of eager torch.

A lifetime is a stretch of operations during which a tensor's memory is taken. `needs.py` adds the lifetimes up for one
device. A plan of sharded training changes them first (`footplate.planning.rank_memory`).

Views share the memory of their tensor. The notes of `eager_operations.py` tell which nodes of the graph are one eager
operation.

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

_aten = torch.ops.aten
_VIEWS = {_aten._unsafe_view.default, _aten.reshape.default, torch.ops.prims.copy_strided.default}
# Conversions, copies and constants: compilers fuse them with other operations.
_FUSED = {
    _aten._to_copy, _aten.clone, _aten.copy, _aten.full, _aten.full_like, _aten.zeros, _aten.zeros_like, _aten.ones,
    _aten.ones_like, _aten.empty, _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_empty,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.arange,
}  # fmt: skip


@dataclass(frozen=True)
class Lifetime:
    """The time in which the memory of one tensor is taken.

    Attributes:
        nbytes: its size.
        first: the operation that allocates it.
        last: the last operation before it is freed.
        kind: "state" for what lasts from step to step (the batch too), "gradient" for what the optimizer's step uses as a
            gradient, "cast" for autocast's copy of a parameter, or "value".
        node: the node that makes it.
        parameter: for a gradient, the name of its parameter.
    """

    nbytes: int
    first: int
    last: int
    kind: str
    node: Node
    parameter: str = ""


@dataclass(frozen=True)
class Lifetimes:
    """All lifetimes of a step.

    Attributes:
        each: the lifetimes.
        position: the operation that each node belongs to. Operations are numbered in the order of the step.
        users: the operations that read the memory of a node's value, or of a view of it.
        operations: the number of operations.
        backward: the first operation of the backward pass.
        optimizer: the first operation after it.
    """

    each: tuple[Lifetime, ...]
    position: dict[Node, int]
    users: dict[Node, frozenset[int]]
    operations: int
    backward: int
    optimizer: int


def peak_of(lifetimes: Collection[Lifetime], operations: int) -> int:
    """Return the most bytes that are alive at once."""
    return max(alive(lifetimes, operations))


def alive(lifetimes: Collection[Lifetime], operations: int) -> list[int]:
    """Return the bytes that are alive in each operation."""
    # changes[i]: the bytes allocated for operation i, minus the bytes freed after operation i - 1.
    changes = [0] * (operations + 1)
    for lifetime in lifetimes:
        changes[lifetime.first] += lifetime.nbytes
        changes[lifetime.last + 1] -= lifetime.nbytes
    return list(itertools.accumulate(changes))[:operations]


@dataclass(eq=False)
class _Storage:
    """The memory that one tensor and all its views share.

    Attributes:
        nbytes: its size.
        users: the nodes that read it.
        lasts: it is there before and after the step, as state and batch are.
        gradient: the name of the parameter whose gradient it is, for the optimizer's step; None for other storages.
        same: another storage whose memory this one is, because an operation wrote its result into that.
    """

    nbytes: int
    users: set[Node] = field(default_factory=set)
    lasts: bool = False
    gradient: str | None = None
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
            root.gradient = mine.gradient if root.gradient is None else root.gradient
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


def lifetimes_of(nodes: Sequence[Node], parameters: Collection[Node]) -> Lifetimes:
    """Find the lifetimes of a step's tensors.

    Args:
        nodes: the nodes of the step's graph, in order.
        parameters: those that are parameters of the module.
    """
    operations = _operations(nodes)
    position = {node: operation.index for operation in operations for node in operation.nodes}
    storages = _storages(nodes)
    _overwrite(operations, position, storages)
    made: dict[_Storage, Node] = {}
    for node in nodes:
        for storage in storages[node]:
            made.setdefault(storage.root(), node)

    count = len(operations)
    numbers = [operation.index for operation in operations if operation.note("backward") is not None]
    backward, optimizer = (numbers[0], numbers[-1] + 1) if numbers else (0, count)
    casts = {
        storages[node][0].root()
        for node in nodes
        if node.target is _aten._to_copy.default and node.args[0] in parameters and position[node] < backward
    }

    each: list[Lifetime] = []
    for storage, node in made.items():
        first, users = position[node], {position[user] for user in storage.users}
        if storage.lasts:
            each.append(Lifetime(storage.nbytes, 0, count - 1, "state", node))
        elif users == {first}:
            continue  # a value within a kernel
        elif storage.gradient is not None:
            each.append(Lifetime(storage.nbytes, first, count - 1, "gradient", node, storage.gradient))
            each.append(Lifetime(storage.nbytes, 0, backward - 1, "gradient", node, storage.gradient))
        else:
            last = operations[max(users, default=first)].ends
            if storage in casts:
                last = max(last, backward - 1)
            each.append(Lifetime(storage.nbytes, first, last, "cast" if storage in casts else "value", node))

    users_of = {
        node: frozenset(position[user] for storage in storages[node] for user in storage.users) for node in parameters
    }
    return Lifetimes(tuple(each), position, users_of, count, backward, optimizer)


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
        if len(operation.nodes) == 1 and (adds or (kernels == "foreach" and is_elementwise(node))):
            (mine,) = storages[node]
            for used in node.all_input_nodes:
                for other in (storage.root() for storage in storages[used]):
                    unused = max(position[user] for user in other.users) == operation.index
                    temporary = not (other.lasts or other.gradient is not None) and other.nbytes == mine.nbytes
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
        elif is_view(node):
            storages[node] = storages[node.all_input_nodes[0]]
        else:
            # A value that isn't a tensor has 0 bytes. An optimizer with one kernel for all has no temporaries.
            value = node.meta.get("val")
            values = value if isinstance(value, (list, tuple)) else (value,)
            absent = node.meta.get("only_captured") or node.meta.get("optimizer") == "fused"
            sizes = [0 if absent else nbytes_of(result) for result in values]
            storages[node] = tuple(_Storage(nbytes, lasts=node.op == "placeholder") for nbytes in sizes)
        for storage in storages[node]:
            storage.gradient = node.meta.get("gradient", storage.gradient)
        for used in node.all_input_nodes if node.target is not operator.getitem else ():
            for storage in storages[used]:
                storage.users.add(node)
    return storages


def _is_attention(node: Node) -> bool:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.target is torch.ops.footplate.attention.default


def is_elementwise(node: Node) -> bool:
    """Return True for an operation that compilers fuse with others: elementwise ones, conversions, copies, constants."""
    if node.op != "call_function":
        return False
    if getattr(node.target, "overloadpacket", None) in _FUSED:
        return True
    return str(node.target).startswith("aten._foreach_") or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_view(node: Node) -> bool:
    """Return True for an operation whose result is in the memory of its operand."""
    if node.op != "call_function":
        return False
    return node.target is operator.getitem or getattr(node.target, "is_view", False) or node.target in _VIEWS


def nbytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a node's value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
