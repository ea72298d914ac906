"""Random operations of a step, numbered in the order of their draws.

Torch's generator moves with every draw. A graph has no generator, so each random operation gets a number, in the order
of the draws, and the caller derives the operation's random numbers from it. Some code puts the generator back to draw
the same numbers again: `torch.utils.checkpoint` computes a layer a second time in the backward pass. It puts this count
back too: during capture, `torch.get_rng_state` returns a position, and `torch.set_rng_state` returns to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from footplate.step.xla.capture.refusals import CaptureError, calling_place

DRAW = "draw"
"""The key of a node's number in its `meta`."""


class Draws:
    """Follows the generator's state while a graph is made.

    Args:
        node_count: returns the current number of nodes of the graph.
    """

    def __init__(self, node_count: Callable[[], int]) -> None:
        self._node_count = node_count
        # Pairs: the number of nodes when the state was set, and the number when that state was taken.
        self._moves: list[tuple[int, int]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Replace torch's access to the generator's state."""
        kept = [(owner, name, getattr(owner, name)) for owner in (torch, torch.random) for name in _ACCESS]
        for owner, name, _ in kept:
            setattr(owner, name, self._take if name == "get_rng_state" else self._set)
        try:
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)

    def _take(self) -> Any:
        return Place(self._node_count())

    def _set(self, state: Any) -> None:
        if isinstance(state, Place):
            self._moves.append((self._node_count(), state))

    def number(self, graph: Graph) -> None:
        """Give every random operation its number."""
        moves, count = list(self._moves), 0
        # before[n]: the number of draws when the graph had n nodes.
        before: list[int] = []
        for index, node in enumerate(graph.nodes):
            while moves and moves[0][0] <= index:
                count = (*before, count)[moves.pop(0)[1]]
            before.append(count)
            if is_random(node):
                node.meta[DRAW] = count
                count += 1


class NoGenerators(TorchFunctionMode):
    """Refuses an operation with a generator: the generator's state would have to be an input of the program."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Generator in map(type, args) or torch.Generator in map(type, kwargs.values()):
            raise CaptureError(
                f"{getattr(func, '__name__', func)} is given a generator:\n    {calling_place()}\n"
                "A captured step draws from the seed that each step is given. Leave generator= out."
            )
        return func(*args, **kwargs)


class Place(int):
    """A generator's state, as the number of nodes of the graph at that time."""


_ACCESS = ("get_rng_state", "set_rng_state")


def is_random(node: Node) -> bool:
    """Return True if an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
