"""Notes at the nodes of a graph about the eager operations that they come from.

A graph has the step without in-place operations, in core operations of torch. Eager torch runs other kernels. The gradient
of GELU is one kernel, where the graph has eleven nodes. `relu_` overwrites its operand, where the graph has a new tensor.
The memory of an eager step depends on this (`needs.py`), so each node's `meta` gets notes while the graph is made:

    eager_operation   the number of the eager operation. Nodes with the same number are one kernel.
    overwrites        the node of the tensor that the operation changed in place
    backward          the number of the autograd node that ran the operation, in a backward pass
    optimizer         "single", "foreach" or "fused": the optimizer's kernels, if its step ran the operation
    gradient          the name of the parameter whose gradient the node's value is, for the optimizer's step
    only_captured     eager torch has no such operation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import Node
from torch.optim import Optimizer


class EagerOperations(FunctionalTensorMode):
    """Removes in-place operations like its parent, and knows the notes for the nodes that are being made.

    Args:
        node_of: finds the node of a traced tensor's current value; None for a constant.
    """

    def __init__(self, node_of: Callable[[Tensor], Node | None]) -> None:
        super().__init__()
        self._node_of = node_of
        self._count = 0
        self._operation: int | None = None
        self._noted: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        outer, self._operation = self._operation, self._count
        changed = _changed(func, args, kwargs or {})
        try:
            before = [self._node_of(tensor) for tensor in changed]
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._operation = outer
        for tensor, old in zip(changed, before, strict=True):
            new = self._node_of(tensor)
            if new is not None and old is not None and new is not old:
                new.meta["overwrites"] = old
        return result

    def notes(self) -> dict[str, Any]:
        """Return the notes for a node that is made now."""
        notes = dict(self._noted)
        if self._operation is not None:
            notes["eager_operation"] = self._operation
        if torch._C._current_graph_task_id() != -1:
            autograd_node = torch._C._current_autograd_node()
            notes["backward"] = -1 if autograd_node is None else autograd_node._sequence_nr()
        return notes

    @contextmanager
    def noting(self, **notes: Any) -> Iterator[None]:
        """Add notes to all nodes that are made in this block."""
        outer, self._noted = self._noted, {**self._noted, **notes}
        try:
            yield
        finally:
            self._noted = outer


def kernels_of(optimizer: Optimizer) -> str:
    """Return how an optimizer steps on a GPU: "single" (a parameter at a time), "foreach" (all at once) or "fused"."""
    settings = optimizer.param_groups[0]
    if settings.get("fused"):
        return "fused"
    return "foreach" if settings.get("foreach", False) in (None, True) else "single"


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The traced tensors that an operation changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    changed: list[Tensor] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            changed += [tensor for tensor in values if isinstance(tensor, FunctionalTensor)]
    return changed
