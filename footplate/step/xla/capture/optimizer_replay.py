"""An optimizer's step, traced once for each kind of parameter and stamped for all others.

A step of torch's optimizers treats each parameter by itself, so two parameters of the same shape, in the same group,
are given the same operations. Tracing them is most of the work of capturing a deep network: GPT-2 has 148 parameters of
nine kinds. Here the optimizer's own `step()` runs for the first parameter of each kind. What it has added to the graph
is then copied for the others, with the first one's value, gradient and memory replaced by theirs:

    parameter, gradient, memory  ──►  nodes that step() has added  ──►  parameter, memory
    of the first of a kind                                              as they have become

The graph is the one that tracing them all would have made, but for the order of nodes.
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
    """What a step makes of the first parameter of a kind.

    Attributes:
        inputs: the nodes of its value, its gradient and its memory, before the step.
        nodes: what the step has added to the graph, as far as the outputs need it, in order.
        outputs: the nodes of its value and its memory after the step.
    """

    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()` for an optimizer of traced tensors, each of whose parameters counts by itself."""
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
    """Whether somebody's code runs with each step: it would run once for each kind."""
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
    """Let the optimizer make its step with a parameter, and cut out what that has added to the graph.

    Returns:
        None where two of the inputs are one value, so that nobody could say for which of them a node has used it, and
        where memory is more than tensors.
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
    """Add a stamp's nodes for another parameter of the kind."""
    assert parameter.grad is not None
    changed = _tensors(optimizer, parameter)
    mine = dict(zip(stamp.inputs, _nodes([*changed, parameter.grad]), strict=True))
    for node in stamp.nodes:
        mine[node] = node.graph.node_copy(node, lambda used: mine.get(used, used))
    for tensor, output in zip(changed, stamp.outputs, strict=True):
        torch_tracing.become(tensor, mine.get(output, output))


def _nodes(tensors: Sequence[Tensor]) -> tuple[Node, ...]:
    return tuple(map(torch_tracing.node_of, tensors))
