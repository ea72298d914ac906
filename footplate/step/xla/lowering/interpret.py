"""A graph of ATen operations, run with JAX: node by node, each through the table.

Inside `jax.jit` this happens once, and the result is the program that XLA compiles. Values are dropped after their last
use, so that the graph also runs outside of `jit` in little memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from footplate.core.errors import FootplateError
from footplate.step.xla.capture.rng_ops import DRAW
from footplate.step.xla.lowering.arrays import NotRepresentable, to_array, value_type
from footplate.step.xla.lowering.table import COMPLEX, Context, is_array, lowering_of


class MissingOperation(FootplateError, NotImplementedError):
    """A step needs operations that the table doesn't have."""


@dataclass(frozen=True)
class MissingOp:
    """An operation that a graph needs and the table doesn't have.

    Attributes:
        name: ATen's, with its overload: `"aten.nonzero.default"`; "… of complex numbers" if it is lowered for real ones.
        count: its number of uses in the graph.
        where: the user's line of the first use; empty in the backward pass.
    """

    name: str
    count: int
    where: str

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{self.name} ({times})" + (f", first at {self.where}" if self.where else "")


def missing_ops(graph: GraphModule) -> list[MissingOp]:
    """The operations of a graph that can't be lowered, by name. This is cheap: call it before compiling."""
    by_name: dict[str, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if lowering_of(node.target) is None:
            by_name.setdefault(str(node.target), []).append(node)
        elif node.target not in COMPLEX and _has_complex(node):
            by_name.setdefault(f"{node.target} of complex numbers", []).append(node)
    return [
        MissingOp(name, len(nodes), nodes[0].meta.get("stack_trace") or "") for name, nodes in sorted(by_name.items())
    ]


def _has_complex(node: Node) -> bool:
    """Return True if an argument or the result of an operation is complex."""
    values = pytree.tree_leaves([used.meta.get("val") for used in (node, *node.all_input_nodes)])
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def require_ops(name: str, graph: GraphModule) -> None:
    """Raise `MissingOperation` if `missing_ops` finds any."""
    missing = missing_ops(graph)
    if missing:
        lines = "\n".join(f"  {operation}" for operation in missing)
        raise MissingOperation(
            f"{name} needs operations that XLA's table doesn't have yet. Use other operations, or another accelerator, or "
            f"add them: footplate/step/xla/lowering/table.py tells how. Missing:\n{lines}"
        )


def interpret(graph: GraphModule, inputs: Sequence[Any], key: jax.Array, platform: str) -> list[Any]:
    """The graph's outputs for arrays.

    Args:
        graph: a captured graph. Every node has torch's result in `meta["val"]`.
        inputs: an array for each placeholder.
        key: the key that random operations derive their numbers from.
        platform: see `Context`.
    """
    nodes = list(graph.graph.nodes)
    last_use = {used: node for node in nodes for used in node.all_input_nodes}
    remaining, values = iter(inputs), {}
    for index, node in enumerate(nodes):
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: values[used])
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "get_attr":
            values[node] = to_array(functools.reduce(getattr, node.target.split("."), graph))
        elif node.op == "output":
            return list(args[0])
        else:
            own = functools.partial(jax.random.fold_in, key, node.meta.get(DRAW, index))
            values[node] = run_node(node, args, kwargs, own, platform)
        for used in node.all_input_nodes:
            if last_use[used] is node:
                del values[used]
    raise AssertionError("a graph without an output")


def scope_of(node: Node) -> str:
    """The name of an operation in the compiled program, by which a profile finds its node."""
    return f"{node.target}:{node.name}"


def run_node(node: Node, args: Any, kwargs: Any, key: Callable[[], jax.Array], platform: str) -> Any:
    """Run one operation; return its result in the type that torch recorded."""
    lowering = lowering_of(node.target)
    if lowering is None:
        raise MissingOperation(f"no lowering for {node.target}")
    expected = node.meta.get("val")
    with jax.named_scope(scope_of(node)):
        try:
            result = lowering(_context(node, expected, key, platform), *args, **kwargs)
        except OverflowError as error:
            raise NotRepresentable(
                f"{node.target} is given a number beyond 32 bits, the width of whole numbers on the device:\n"
                f"    {node.meta.get('stack_trace') or 'in the backward pass'}\n"
                'Compute with it in the loader, or use precision="64-true".'
            ) from error
        return conformed(str(node.target), result, expected)


def products_of_whole_numbers(graph: GraphModule) -> list[str]:
    """The user's lines whose results in int64 may need more than 32 bits.

    These are products with large numbers, powers and shifts.
    """
    of_inputs: set[Node] = set()
    lines = []
    for node in graph.graph.nodes:
        if node.op != "placeholder" and of_inputs.isdisjoint(node.all_input_nodes):
            continue
        of_inputs.add(node)
        value, line = node.meta.get("val"), node.meta.get("stack_trace")
        if not isinstance(value, Tensor) or value.dtype != torch.int64:
            continue
        by_large = any(isinstance(number, int) and abs(number) >= _LARGE for number in node.args)
        if line and (str(node.target).startswith(_POWERS) or (by_large and str(node.target).startswith("aten.mul."))):
            lines.append(line)
    return list(dict.fromkeys(lines))


# Indices and counts are seldom multiplied with a number as large as this; hashes are.
_LARGE = 1024
_POWERS = ("aten.pow.", "aten.prod.", "aten.cumprod.", "aten.bitwise_left_shift.", "aten.__lshift__")


def _context(node: Node, expected: Any, key: Callable[[], jax.Array], platform: str) -> Context:
    first = expected[0] if isinstance(expected, (tuple, list)) and expected else expected
    if not isinstance(first, Tensor):
        return Context(None, (), None, key, platform)
    operands = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in node.args]
    return context_for(first, operands, key, platform)


def context_for(result: Tensor, operands: Sequence[Any], key: Callable[[], jax.Array], platform: str) -> Context:
    """The context of an operation, from torch's result (without its values) and torch's arguments."""
    common = None
    # A comparison: its operands meet in a type of their own.
    if result.dtype == torch.bool:
        numbers: list[Any] = [operand for operand in operands if isinstance(operand, (Tensor, bool, int, float))]
        tensors = [operand for operand in numbers if isinstance(operand, Tensor)]
        if tensors:
            dtype = torch.result_type(*map(_plain, numbers[:2])) if len(numbers) > 1 else tensors[0].dtype
            common = value_type(dtype)
    strides = operands[0].stride() if operands and isinstance(operands[0], Tensor) else ()
    return Context(value_type(result.dtype), tuple(result.shape), common, key, platform, strides)


def _plain(value: Any) -> Any:
    """A tensor with the same number of dimensions and type, outside of the graph's mode."""
    return torch.empty((0,) * value.dim(), dtype=value.dtype) if isinstance(value, Tensor) else value


def conformed(name: str, result: Any, expected: Any) -> Any:
    """A result cast to torch's types.

    Raises:
        AssertionError: its shape differs from torch's, which is a defect of the table.
    """
    if isinstance(expected, (tuple, list)) and isinstance(result, (tuple, list)):
        return [conformed(name, item, wanted) for item, wanted in zip(result, expected, strict=False)]
    if not isinstance(expected, Tensor) or not is_array(result):
        return result
    if tuple(result.shape) != tuple(expected.shape):
        raise AssertionError(f"{name}: lowered to shape {tuple(result.shape)}, torch has {tuple(expected.shape)}")
    return result.astype(value_type(expected.dtype))
