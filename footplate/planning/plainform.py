"""A captured step as plain data: what is sent to the process that compiles, and what the cache's key is made of.

An FX graph can't be pickled with what capturing knows of it, the shape and type of every value. Here each node becomes a
`PlainNode`: its operation by name, its arguments with references to other nodes, its value's shapes. `restored` makes a
graph of it that `step/lowering` takes like the original. Weights never travel; only tensors that the step has as
constants do.

`fingerprint` is equal for two captures of the same step, also on different days and machines: node by node it says the
same words.
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

from footplate.step.xla.capture import averaging  # noqa: F401  declares torch.ops.footplate.average
from footplate.step.xla.capture.attribute_guards import Reads
from footplate.step.xla.capture.captured import Captured
from footplate.step.xla.capture.functional import pytree
from footplate.step.xla.capture.symbolic_scalars import Counted


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)


def _reduce_memory_format(memory_format: torch.memory_format) -> tuple[Any, tuple[str]]:
    return _memory_format, (str(memory_format).removeprefix("torch."),)


# torch pickles a memory format by a name that pickle then looks up in all modules. It may find the name in the caller's
# `__main__`, which the process that compiles doesn't have.
copyreg.pickle(torch.memory_format, _reduce_memory_format)


@dataclass(frozen=True)
class Ref:
    """The value of another node."""

    name: str


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PlainNode:
    """A node; `target` is `aten.add.Tensor`, `getitem`, or the name of an input or constant."""

    name: str
    op: str
    target: str
    args: Any
    kwargs: Any
    value: Any


@dataclass(frozen=True)
class PlainStep:
    """A captured step, without its weights and without the user's classes."""

    nodes: tuple[PlainNode, ...]
    constants: dict[str, Tensor]
    others: dict[str, Any]


def plain(captured: Captured) -> PlainStep:
    """A captured step as plain data."""
    graph = captured.graph
    nodes = tuple(_plain_node(node) for node in graph.graph.nodes)
    constants = {node.target: getattr(graph, node.target) for node in nodes if node.op == "get_attr"}
    others = {one.name: getattr(captured, one.name) for one in fields(captured) if one.name != "graph"}
    # Trees may hold the user's classes, which the other process can't import; lowering asks for none of it.
    others |= {
        "batch": (None, captured.batch[1]),
        "output": None,
        "reads": Reads(),
        "counted": Counted(),
        "logs": {name: {} for name in captured.logs},
    }
    return PlainStep(nodes, constants, others)


def restored(step: PlainStep) -> Captured:
    """The step that `plain` was given, with tensors of torch's meta device as the values that its nodes remember."""
    graph, made = Graph(), {}
    for node in step.nodes:
        back = lambda value: made[value.name] if isinstance(value, Ref) else value  # noqa: E731
        args, kwargs = _mapped(node.args, back), _mapped(node.kwargs, back)
        target = _operation(node.target) if node.op == "call_function" else node.target
        made[node.name] = graph.create_node(node.op, target, tuple(args), kwargs, node.name)
        made[node.name].meta["val"] = _mapped(node.value, _meta)
    owner = torch.nn.Module()
    for name, tensor in step.constants.items():
        owner.register_buffer(name, tensor)
    return Captured(graph=GraphModule(owner, graph), **step.others)


def fingerprint(step: PlainStep) -> str:
    """A hash of all that decides what a step's program is."""
    made = hashlib.sha256()
    for node in step.nodes:
        made.update(f"{node}\n".encode())
    for name, tensor in step.constants.items():
        made.update(f"{name} {tensor.dtype} {tensor.tolist()}\n".encode())
    made.update(f"{step.others['paths']} {step.others['rates']} {step.others['batch'][1]}".encode())
    return made.hexdigest()


def _plain_node(node: Node) -> PlainNode:
    away = lambda value: Ref(value.name) if isinstance(value, Node) else value  # noqa: E731
    target = node.target if isinstance(node.target, str) else _name(node.target)
    value = _mapped(node.meta.get("val"), _shape)
    return PlainNode(node.name, node.op, target, _mapped(node.args, away), _mapped(dict(node.kwargs), away), value)


def _mapped(value: Any, change: Any) -> Any:
    """A nest of lists, tuples and dictionaries with its leaves changed; nodes and tensors are leaves."""
    return pytree.tree_map(change, _as_plain(value))


def _as_plain(value: Any) -> Any:
    """FX's own immutable lists and dictionaries, as Python's."""
    if isinstance(value, dict):
        return {key: _as_plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(_as_plain(one) for one in value) if type(value) in (list, tuple) else [*map(_as_plain, value)]
        )
    return value


def _shape(value: Any) -> Any:
    return Shape(tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, Tensor) else value


def _meta(value: Any) -> Any:
    if not isinstance(value, Shape):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


def _name(target: Any) -> str:
    return "getitem" if target is operator.getitem else str(target)


def _operation(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
