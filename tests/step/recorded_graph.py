"""CUDA graphs without a GPU: a graph is a list of operations. A replay runs them again, into the same tensors."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from footplate.step import compiled_step, step_graph


class RecordedGraph(TorchDispatchMode):
    """Records operations; `replay` runs them again. To record changes nothing, as with CUDA."""

    captured = 0
    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.recorded: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            # The declaration of batch norm doesn't say that it changes its statistics.
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes or "batch_norm" in str(func):
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in self.recorded:
                        self.before.setdefault(tensor.data_ptr(), (tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        # Other objects for the same memory, so that nobody finds a reference to theirs.
        self.operations.append((func, *pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, result))))
        if all(each.alias_info is None for each in func._schema.returns):
            new = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
            self.recorded |= {each.data_ptr() for each in new}
        return result

    @torch.no_grad()
    def end(self) -> None:
        type(self).captured += 1
        for tensor, value in self.before.values():
            tensor.detach().copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        type(self).replays += 1
        for func, args, kwargs, recorded in self.operations:
            if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
                continue  # a view, whose memory is there
            results = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(results), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


@contextlib.contextmanager
def _capture(graph: RecordedGraph, *settings: Any) -> Any:
    with graph:
        yield
    graph.end()


def let_cpu_have_graphs(patch: pytest.MonkeyPatch) -> type[RecordedGraph]:
    """Let `compile="step"` trace only, and make recorded graphs of steps on the CPU."""
    RecordedGraph.captured = RecordedGraph.replays = 0
    patch.setattr(step_graph, "DEVICE", "cpu")
    patch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    patch.setattr(torch.cuda, "current_stream", torch.cuda.Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", _capture)
    patch.setattr(torch.cuda, "default_generators", ())
    patch.setitem(compiled_step.BACKENDS, "step", "eager")
    return RecordedGraph
