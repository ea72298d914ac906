"""Batch sizes: a step that was captured with two and with four rows is known with any number of rows.

Both captures must be the same operations on tensors of the same types. A dimension that is twice as large with four rows
grows with the rows, and the other ones must be equal. So the shapes with a thousand rows follow, and with them everything
that is counted from a graph. A search for the best batch then makes two captures, and not one for each batch size.

A model may compute otherwise for larger batches, such as in groups of at most four rows. Two captures can't show that, so
what a search has found is captured once more, with its own rows (`counted_choice.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from footplate.step.xla.capture.captured_step import Captured

# The rows of the two captures. With one row, operations do without copies that they need for more.
FEW_ROWS, MANY_ROWS = 2, 4


class GrowingStep:
    """A captured step whose tensors can be given the shapes of another number of rows.

    Args:
        few: the step, captured with `FEW_ROWS` rows.
        many: the same with `MANY_ROWS`.

    Raises:
        Different: one is no enlargement of the other.
    """

    def __init__(self, few: Captured, many: Captured) -> None:
        self.captured = few
        nodes, others = list(few.graph.graph.nodes), list(many.graph.graph.nodes)
        if [(node.op, node.target) for node in nodes] != [(node.op, node.target) for node in others]:
            raise Different("the operations differ")
        self._growing: list[tuple[Node, list[_Growth | None], Any]] = []
        for node, other in zip(nodes, others, strict=True):
            leaves, form = pytree.tree_flatten(node.meta.get("val"))
            larger = pytree.tree_leaves(other.meta.get("val"))
            growths = [_growth_of(*pair) for pair in zip(leaves, larger, strict=True)]
            if any(growths):
                self._growing.append((node, growths, form))

    @contextmanager
    def with_rows(self, rows: int) -> Iterator[Captured]:
        """Give the values of the graph the shapes that they have with `rows` rows, an even number, in this block."""
        before = [node.meta["val"] for node, _, _ in self._growing]
        try:
            for node, growths, form in self._growing:
                pairs = zip(pytree.tree_leaves(node.meta["val"]), growths, strict=True)
                grown = [growth.grow(leaf, rows) if growth else leaf for leaf, growth in pairs]
                node.meta["val"] = pytree.tree_unflatten(grown, form)
            yield self.captured
        finally:
            for (node, _, _), value in zip(self._growing, before, strict=True):
                node.meta["val"] = value


class Different(Exception):
    """Two captures of a step differ in more than the number of rows."""


class _Growth:
    """The dimensions of a tensor, and their strides, that grow with the rows."""

    def __init__(self, sizes: list[bool], strides: list[bool]) -> None:
        self._sizes, self._strides = sizes, strides

    def grow(self, tensor: Tensor, rows: int) -> Tensor:
        """Return a tensor without memory, of the shape with `rows` rows."""
        shape = _grown(tensor.shape, self._sizes, rows)
        strides = _grown(tensor.stride(), self._strides, rows)
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


def _grown(numbers: Sequence[int], growing: Sequence[bool], rows: int) -> list[int]:
    return [number * rows // FEW_ROWS if grows else number for number, grows in zip(numbers, growing, strict=True)]


def _growth_of(few: Any, many: Any) -> _Growth | None:
    """How a value grows; None if it doesn't."""
    if not isinstance(few, Tensor):
        return None
    if not isinstance(many, Tensor) or few.dtype != many.dtype or few.dim() != many.dim():
        raise Different(f"{few} and {many}")
    sizes = [_grows(*pair) for pair in zip(few.shape, many.shape, strict=True)]
    strides = [_grows(*pair) for pair in zip(few.stride(), many.stride(), strict=True)]
    return _Growth(sizes, strides) if any(sizes) or any(strides) else None


def _grows(few: int, many: int) -> bool:
    if few == many:
        return False
    if many * FEW_ROWS != few * MANY_ROWS:
        raise Different(f"{few} with {FEW_ROWS} rows, {many} with {MANY_ROWS}")
    return True
