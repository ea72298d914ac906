"""Private names of torch that the capture uses.

Four pieces of torch make a graph of a step, the same four that `torch.compile` is built on:

    FakeTensorMode         tensors with a shape and a type, and no memory
    FunctionalTensorMode   in-place changes (`x += 1`, BatchNorm's statistics, `optimizer.step()`) become new values
    core decompositions    the two thousand operations of ATen become some two hundred
    make_fx                every operation that runs is recorded in an FX graph

None of them is public, but all have kept their form since torch 2.5. This file also uses the flag with which optimizers
keep their arithmetic in tensors, the type and shape of each value in `node.meta["val"]`, the numbers of autograd nodes,
and graph modules that write their Python code only on demand. It is written for torch 2.11 to 2.13, and tested with 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution
from torch.fx import GraphModule, Node, Proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from footplate.step.xla.capture.eager_operations import EagerOperations
from footplate.step.xla.capture.refusals import places_within
from footplate.step.xla.capture.rng_ops import Draws

__all__ = [
    "FakeTensorMode", "as_compiled", "drop_inputs", "fake_like", "fake_mode", "is_traced", "outside_of_capture", "pytree",
    "trace", "without_modes",
]  # fmt: skip

# Elements of a tensor that is filled with one number during a capture. Larger ones have no memory.
LARGEST_CONSTANT = 2**26


def fake_mode() -> FakeTensorMode:
    """A mode with tensors without memory, of fixed shapes. A real tensor that the step reaches becomes a constant.

    Code that needs values raises: numbers out of tensors, and shapes that depend on them.
    """
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor of the same shape, strides and type on the CPU, without memory; `tensor` may itself have none."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def trace(
    function: Callable[[list[Tensor]], list[Tensor]], inputs: Sequence[Tensor], learning: Sequence[bool]
) -> GraphModule:
    """Record what `function` does to fake tensors as a graph.

    Args:
        function: gets the inputs and returns the outputs; it may change its inputs in place.
        inputs: fake tensors.
        learning: True for each input that requires gradients, which counts as a parameter.

    Returns:
        The graph, from the inputs in their order to the outputs in theirs. Every node has its value's type and shape in
        `meta["val"]` and, in the forward pass, the user's line in `meta["stack_trace"]`. `meta["line"]` is the line
        outside of installed packages; of an operation in the backward pass, it is the line whose gradients it computes. A
        random operation has the number of its draw in `meta["draw"]`. `eager_operations.py` lists the notes about eager
        operations.
    """
    draws: list[Draws] = []
    operations = EagerOperations(_known_node_of)

    def functional(*tensors: Tensor) -> list[Tensor]:
        tracer = _tracer()
        tracer.create_node = _noting(tracer.create_node, operations)
        nodes = tracer.graph.nodes
        draws[:] = [Draws(lambda: len(nodes))]
        with draws[0].followed():
            return [_plain(output) for output in function(list(map(_functional, tensors, learning)))]

    # A child that the user has given to torch.compile is traced as it was before.
    # Functionalisation is done by the mode, in Python; C++'s own, which would come first, is kept out. Python code of
    # the graph is only written for who calls it, which nobody does: writing it three times was an eighth of the work.
    only_the_mode = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
    with (
        only_the_mode, enable_python_dispatcher(), operations, sdpa_kernel(SDPBackend.MATH),
        _use_lazy_graph_module(True), torch.compiler.set_stance("force_eager"),
    ):  # fmt: skip
        graph = make_fx(functional, decomposition_table=_decompositions())(*inputs)
    draws[0].number(graph.graph)
    return _cleaned(graph)


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions into core ATen operations, made once: torch looks through all of its operations for them.

    An operation of an extension that is loaded later needs no entry. The mode of functional tensors decomposes it.
    """
    table = dict(cast(Any, core_aten_decompositions()))
    for name in ("new_empty", "new_full", "new_ones", "new_zeros"):
        operation = getattr(torch.ops.aten, name).default
        if operation in table:
            table[operation] = _without_memory(table[operation])
    return table


def _without_memory(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition of an operation that makes a tensor for another: for a fake one, a fake one if it is large.

    Torch's own takes only type and device from the other, so its tensor is real. That serves a step which selects rows by
    such a mask. But it would fill gigabytes for the gradient of a large embedding.
    """

    @functools.wraps(decomposition)
    def decompose(tensor: Tensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        large = math.prod(size) >= LARGEST_CONSTANT
        with tensor.fake_mode if large and isinstance(tensor, FakeTensor) else nullcontext():
            return decomposition(tensor, size, *args, **kwargs)

    return decompose


def _noting(create: Callable[..., Node], operations: EagerOperations) -> Callable[..., Node]:
    """A tracer's `create_node` that records the eager operation, and the user's lines.

    Torch's own way to record the line takes ten times as long. An autograd node has the number that was the newest when its
    operation ran, so the line of an operation in the backward pass is that of the first operation with this number.
    """
    lines: dict[int, str] = {}

    def create_node(*args: Any, **kwargs: Any) -> Node:
        node = create(*args, **kwargs)
        node.meta.update(operations.notes())
        innermost, line = places_within(trace.__code__)
        if innermost is not None:
            node.meta["stack_trace"] = innermost
        if "backward" in node.meta:
            line = lines.get(node.meta["backward"], line)
        elif line is not None:
            lines.setdefault(torch.autograd._get_sequence_nr() - 1, line)  # pyright: ignore[reportPrivateImportUsage]
        if line is not None:
            node.meta["line"] = line
        return node

    return create_node


def _functional(tensor: Tensor, learns: bool) -> Tensor:
    traced = FunctionalTensor.to_functional(tensor)
    if learns:
        traced.requires_grad_(True)
        # With this attribute, isinstance(tensor, nn.Parameter) holds.
        traced._is_param = True
    return traced


def _plain(output: Tensor) -> Tensor:
    """The current value of a functional tensor."""
    if not isinstance(output, FunctionalTensor):
        return output
    torch._sync(output)  # pyright: ignore[reportPrivateImportUsage]
    return torch._from_functional_tensor(output.elem)  # pyright: ignore[reportPrivateImportUsage]


def _cleaned(module: GraphModule) -> GraphModule:
    """Remove the records that optimizers make for a profiler, checks of values, and unused nodes."""
    for node in reversed(module.graph.nodes):
        if str(node.target).startswith(("profiler.", "aten._assert_async.")):
            node.replace_all_uses_with(None)  # type: ignore[arg-type]
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def drop_inputs(module: GraphModule, places: Collection[int]) -> None:
    """Remove unused inputs from a graph."""
    inputs = module.graph.find_nodes(op="placeholder")
    for index in places:
        module.graph.erase_node(inputs[index])
    module.recompile()


@contextmanager
def outside_of_capture() -> Iterator[None]:
    """Make real tensors with values in this block."""
    with unset_fake_temporarily(), torch.enable_grad():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Compute with real tensors in this block, outside of the graph."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def last_node() -> Node:
    """The newest node of the current graph."""
    return _tracer().graph._root.prev


def node_of(tensor: Tensor) -> Node:
    """The node of a traced tensor's current value."""
    return get_proxy_slot(_plain(tensor), _tracer()).proxy.node  # pyright: ignore[reportArgumentType]


def _known_node_of(tensor: Tensor) -> Node | None:
    """The node of a traced tensor's current value; None for a constant."""
    slot = get_proxy_slot(_plain(tensor), _tracer(), None)  # pyright: ignore[reportArgumentType]
    return None if slot is None else slot.proxy.node  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def noting(**notes: Any) -> Iterator[None]:
    """Add notes to the nodes that are made in this block (see `eager_operations.py`)."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    assert isinstance(mode, EagerOperations), "nothing is being traced"
    with mode.noting(**notes):
        yield


def become(tensor: Tensor, node: Node) -> None:
    """Give a traced tensor the value of a node, as if it had been changed in place."""
    assert isinstance(tensor, FunctionalTensor)
    if node_of(tensor) is node:
        return
    tracer = _tracer()
    # The capture's own modes must not see the attributes that are read here.
    with torch._C.DisableTorchFunction():
        with _disable_current_modes():
            value = fake_like(node.meta["val"], node.meta["val"].fake_mode)
        track_tensor_tree(value, Proxy(node, tracer), constant=None, tracer=tracer)  # pyright: ignore[reportArgumentType]
        tensor.replace_(value)
        tensor.commit_update()
        tensor.sync()


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "nothing is being traced"
    return mode.tracer


def is_traced(value: Any) -> bool:
    """Return True for a tensor that only exists during capture."""
    return isinstance(value, (FunctionalTensor, FakeTensor))


@contextmanager
def as_compiled() -> Iterator[None]:
    """Behave as under `torch.compile` inside the `with` block.

    Optimizers and clipping take the path on which all numbers are tensors. Distributions don't check values, and
    neither does `torch._check_tensor_all`, which transformers calls for images in a text.
    """
    before = torch.compiler._is_compiling_flag, Distribution._validate_args, torch._check_tensor_all_with
    torch.compiler._is_compiling_flag = True
    Distribution.set_default_validate_args(False)
    torch._check_tensor_all_with = lambda *_, **__: None
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before[0]
        Distribution.set_default_validate_args(before[1])
        torch._check_tensor_all_with = before[2]
