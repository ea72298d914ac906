"""An optimizer's step, traced once for each kind of parameter and copied for the others.

A step of torch's optimizers treats each parameter alone, so two parameters of the same shape, in the same group, get
the same operations. Tracing them is most of the work of capturing a deep network: GPT-2 has 148 parameters of nine
kinds. Here the optimizer's own `step()` runs for the first parameter of each kind. The nodes that it has added to the
graph are then copied for the others, with their own value, gradient and optimizer state as inputs:

    parameter, gradient, state  ──►  nodes that step() has added  ──►  parameter, state
    of the first of a kind                                             after the step

The graph equals the one that tracing all of them would make, except for the order of nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from footplate.step.xla.capture import torch_tracing


@dataclass(frozen=True)
class Stamp:
    """The nodes that the step of the first parameter of a kind adds to the graph.

    Attributes:
        inputs: the nodes of its value, its optimizer state and its gradient, before the step.
        nodes: the nodes that the step has added to the graph and that the outputs need, in order.
        outputs: the nodes of its value and its optimizer state after the step.
    """

    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]


def step(optimizer: Optimizer) -> None:
    """Run `optimizer.step()` with traced tensors."""
    if _is_watched(optimizer):
        optimizer.step()
        return
    groups, stamps = optimizer.param_groups, {}
    try:
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kind = _kind(optimizer, number, parameter)
                if kind in stamps:
                    _apply(stamps[kind], optimizer, parameter)
                    continue
                optimizer.param_groups = [{**group, "params": [parameter]}]
                stamp = _traced(optimizer, parameter)
                if stamp is not None:
                    stamps[kind] = stamp
    finally:
        optimizer.param_groups = groups


def _is_watched(optimizer: Optimizer) -> bool:
    """Return True if user code runs with each step: it would run once for each kind."""
    everybody = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    mine = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*everybody, *mine)) or not type(optimizer).__module__.startswith("torch.optim")


def _kind(optimizer: Optimizer, group: int, parameter: Tensor) -> Hashable:
    memory = optimizer.state[parameter].items()
    return group, _form(parameter), _form(parameter.grad), tuple((name, _form(value)) for name, value in memory)


def _form(value: Any) -> Hashable:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else repr(value)


def _tensors(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    return [parameter, *(value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))]


def _traced(optimizer: Optimizer, parameter: Tensor) -> Stamp | None:
    """Step the optimizer with one parameter, and collect the nodes that this adds to the graph.

    Returns:
        None if two of the inputs are the same node, since a copy couldn't tell them apart, or if the optimizer state is
        more than tensors.
    """
    assert parameter.grad is not None
    inputs = _nodes([*_tensors(optimizer, parameter), parameter.grad])
    before = torch_tracing.last_node()
    optimizer.step()
    if len(set(inputs)) < len(inputs) or len(inputs) != len(optimizer.state[parameter]) + 2:
        return None
    outputs = _nodes(_tensors(optimizer, parameter))
    added, node = set(), torch_tracing.last_node()
    while node is not before:
        added.add(node)
        node = node.prev
    needed, left = set(), [node for node in outputs if node in added]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += [used for used in node.all_input_nodes if used in added]
    return Stamp(inputs, tuple(node for node in before.graph.nodes if node in needed), outputs)


def _apply(stamp: Stamp, optimizer: Optimizer, parameter: Tensor) -> None:
    """Copy a stamp's nodes for another parameter of the kind."""
    assert parameter.grad is not None
    changed = _tensors(optimizer, parameter)
    mine = dict(zip(stamp.inputs, _nodes([*changed, parameter.grad]), strict=True))
    for node in stamp.nodes:
        mine[node] = copied = node.graph.node_copy(node, lambda used: mine.get(used, used))
        if "overwrites" in node.meta:
            copied.meta["overwrites"] = mine.get(node.meta["overwrites"], node.meta["overwrites"])
    for tensor, output in zip(changed, stamp.outputs, strict=True):
        torch_tracing.become(tensor, mine.get(output, output))


def _nodes(tensors: Sequence[Tensor]) -> tuple[Node, ...]:
    return tuple(map(torch_tracing.node_of, tensors))
