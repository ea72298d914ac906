"""All of torch's private interface that capturing needs, in one place.

Four pieces of torch make a graph of a step, the same four that `torch.compile` is built on:

    FakeTensorMode         tensors with a shape and a type, and no memory
    FunctionalTensorMode   in-place changes (`x += 1`, BatchNorm's statistics, `optimizer.step()`) become new values
    core decompositions    the two thousand operations of ATen become some two hundred
    make_fx                every operation that is reached is written into an FX graph

None of them is public, though all have kept their form since torch 2.5. What else of `torch._…` is used: the flag by which
optimizers know that they are being compiled and keep their arithmetic in tensors, and a table of type and shape of each
value in `node.meta["val"]`. Written for torch 2.11 to 2.13, tried with 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from footplate.step.capture.draws import Draws

__all__ = ["FakeTensorMode", "as_compiled", "fake_like", "fake_mode", "is_traced", "pytree", "trace"]


def fake_mode() -> FakeTensorMode:
    """Tensors without memory, of fixed shapes; a real tensor that the step reaches by itself becomes a constant.

    What would need values raises: numbers out of tensors, and shapes that depend on them.
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
    """A graph of what `function` does to fake tensors.

    Args:
        function: gets the inputs and returns the outputs; it may change its inputs in place.
        inputs: fake tensors.
        learning: which of them require gradients, and count as parameters.

    Returns:
        The graph, from the inputs in their order to the outputs in theirs. Every node has its value's type and shape in
        `meta["val"]` and, in the forward pass, the user's line in `meta["stack_trace"]`; a random operation has the number
        of its draw in `meta["draw"]`.
    """
    draws: list[Draws] = []

    def functional(*given: Tensor) -> list[Tensor]:
        mode = get_proxy_mode()
        assert mode is not None
        nodes = mode.tracer.graph.nodes
        draws[:] = [Draws(lambda: len(nodes))]
        with draws[0].followed():
            return [_plain(output) for output in function(list(map(_functional, given, learning)))]

    # Functionalisation is done by the mode, in Python; C++'s own, which would come first, is kept out.
    only_the_mode = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
    with only_the_mode, enable_python_dispatcher(), FunctionalTensorMode(), sdpa_kernel(SDPBackend.MATH):
        graph = make_fx(
            functional, decomposition_table=cast(Any, core_aten_decompositions()), record_stack_traces=True
        )(*inputs)
    draws[0].number(graph.graph)
    return _cleaned(graph)


def _functional(tensor: Tensor, learns: bool) -> Tensor:
    traced = FunctionalTensor.to_functional(tensor)
    if learns:
        traced.requires_grad_(True)
        traced._is_param = True  # isinstance(tensor, nn.Parameter) holds
    return traced


def _plain(output: Tensor) -> Tensor:
    """The value that a functional tensor has now."""
    if not isinstance(output, FunctionalTensor):
        return output
    torch._sync(output)  # pyright: ignore[reportPrivateImportUsage]
    return torch._from_functional_tensor(output.elem)  # pyright: ignore[reportPrivateImportUsage]


def _cleaned(module: GraphModule) -> GraphModule:
    """Without the records that optimizers make for a profiler, checks of values, and what nobody uses."""
    for node in reversed(module.graph.nodes):
        if str(node.target).startswith(("profiler.", "aten._assert_async.")):
            node.replace_all_uses_with(None)  # type: ignore[arg-type]
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor that only exists while a graph is made."""
    return isinstance(value, (FunctionalTensor, FakeTensor))


@contextmanager
def as_compiled() -> Iterator[None]:
    """Optimizers and clipping take the path on which all numbers are tensors, as under `torch.compile`."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
