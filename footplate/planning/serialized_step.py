"""A captured step as plain data: the message to the compiler's process, and the source of the cache's key.

An FX graph can't be pickled together with the shape and type of every value, which capturing records. Here each node
becomes a `SerializedNode`: the name of its operation, its arguments with references to other nodes, and the shape of its
value. `deserialize` makes a graph of these that `step/xla/lowering` accepts like the original. The message has no weights,
only the tensors that are constants of the step.

`fingerprint` is equal for two captures of the same step, also on different days and machines, because it hashes the names
node by node.
"""

from __future__ import annotations

import copyreg
import hashlib
import operator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from footplate.step.xla.capture import averaging_op  # noqa: F401  declares torch.ops.footplate.average
from footplate.step.xla.capture.attribute_guards import Reads
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.symbolic_scalars import Counted
from footplate.step.xla.capture.torch_tracing import pytree


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)


def _reduce_memory_format(memory_format: torch.memory_format) -> tuple[Any, tuple[str]]:
    return _memory_format, (str(memory_format).removeprefix("torch."),)


# torch pickles a memory format by a name that pickle then looks up in all modules. It may find the name in the caller's
# `__main__`, which the process that compiles doesn't have.
copyreg.pickle(torch.memory_format, _reduce_memory_format)


@dataclass(frozen=True)
class Ref:
    """A reference to the value of another node."""

    name: str


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SerializedNode:
    """A node. `target` is `aten.add.Tensor`, `getitem`, or the name of an input or constant."""

    name: str
    op: str
    target: str
    args: Any
    kwargs: Any
    value: Any


@dataclass(frozen=True)
class SerializedStep:
    """A captured step, without its weights and without the user's classes."""

    nodes: tuple[SerializedNode, ...]
    constants: dict[str, Tensor]
    others: dict[str, Any]


def serialize(captured: Captured) -> SerializedStep:
    """Convert a captured step to plain data."""
    graph = captured.graph
    nodes = tuple(_serialize_node(node) for node in graph.graph.nodes)
    constants = {node.target: getattr(graph, node.target) for node in nodes if node.op == "get_attr"}
    others = {field.name: getattr(captured, field.name) for field in fields(captured) if field.name != "graph"}

    # Trees may contain the user's classes, which the other process can't import. Lowering needs none of these fields.
    others |= {
        "batch": (None, captured.batch[1]),
        "output": None,
        "reads": Reads(),
        "counted": Counted(),
        "logs": {name: {} for name in captured.logs},
    }
    return SerializedStep(nodes, constants, others)


def deserialize(step: SerializedStep) -> Captured:
    """Make a captured step again. The values of its nodes are tensors on torch's meta device."""
    graph, nodes = Graph(), {}
    for node in step.nodes:
        resolve = lambda value: nodes[value.name] if isinstance(value, Ref) else value  # noqa: E731
        args, kwargs = _map_leaves(node.args, resolve), _map_leaves(node.kwargs, resolve)
        target = _operation(node.target) if node.op == "call_function" else node.target
        nodes[node.name] = graph.create_node(node.op, target, tuple(args), kwargs, node.name)
        nodes[node.name].meta["val"] = _map_leaves(node.value, _meta)

    owner = torch.nn.Module()
    for name, tensor in step.constants.items():
        owner.register_buffer(name, tensor)
    return Captured(graph=GraphModule(owner, graph), **step.others)


def fingerprint(step: SerializedStep) -> str:
    """Hash everything that determines the program of a step."""
    digest = hashlib.sha256()
    for node in step.nodes:
        digest.update(f"{node}\n".encode())
    for name, tensor in step.constants.items():
        digest.update(f"{name} {tensor.dtype} {tensor.tolist()}\n".encode())
    digest.update(f"{step.others['paths']} {step.others['rates']} {step.others['batch'][1]}".encode())
    return digest.hexdigest()


def _serialize_node(node: Node) -> SerializedNode:
    refer = lambda value: Ref(value.name) if isinstance(value, Node) else value  # noqa: E731
    target = node.target if isinstance(node.target, str) else _operation_name(node.target)
    return SerializedNode(
        node.name,
        node.op,
        target,
        _map_leaves(node.args, refer),
        _map_leaves(dict(node.kwargs), refer),
        _map_leaves(node.meta.get("val"), _shape),
    )


def _map_leaves(value: Any, change: Any) -> Any:
    """Change the leaves of nested lists, tuples and dictionaries; nodes and tensors are leaves."""
    return pytree.tree_map(change, _as_builtin(value))


def _as_builtin(value: Any) -> Any:
    """Convert FX's immutable lists and dictionaries to Python's."""
    if isinstance(value, dict):
        return {key: _as_builtin(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_as_builtin(item) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else items
    return value


def _shape(value: Any) -> Any:
    return Shape(tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, Tensor) else value


def _meta(value: Any) -> Any:
    if not isinstance(value, Shape):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


def _operation_name(target: Any) -> str:
    return "getitem" if target is operator.getitem else str(target)


def _operation(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    operation: Any = torch.ops
    for part in name.split("."):
        operation = getattr(operation, part)
    return operation
