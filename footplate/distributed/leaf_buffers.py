"""The buffers of a module whose logical ranks run one after another in a process.

Buffers are tensors that aren't trained, such as the running statistics of batch norm. A forward pass may change a buffer in
place, or assign another tensor to its name. The next logical rank of the process must not see it.

    LeafBuffers    in training: all begin a batch with the same buffers, and the changes of logical rank 0 count
    OwnBuffers     in an evaluation: each logical rank has its own from batch to batch, as each rank of plain DDP has
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError

Values = list[Tensor | None]


class _Buffers:
    """The buffers of a module, of which copies can be kept."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._originals: Values = [owner._buffers[name] for owner, name in self._places]

    @torch.no_grad()
    def _copies(self) -> Values:
        buffers = (owner._buffers[name] for owner, name in self._places)
        return [None if buffer is None else buffer.detach().clone() for buffer in buffers]

    @torch.no_grad()
    def _set(self, values: Values) -> None:
        """Set the buffers to kept values, in the tensors that the module had at the beginning.

        Raises:
            ConfigError: a step has changed the shape of a buffer.
        """
        for (owner, name), original, value in zip(self._places, self._originals, values, strict=True):
            if original is not None and value is not None and original.shape == value.shape:
                original.copy_(value)
            elif original is not None or value is not None:
                raise ConfigError(
                    f"logical_ranks: the buffer {name} of {type(owner).__name__} got another shape in a step, so the "
                    "processes can't have the same one. Register it with its final shape."
                )
            owner._buffers[name] = original


class LeafBuffers(_Buffers):
    """The buffers of a module in training: begin, then begin_leaf and end_leaf for each logical rank, then end.

    Args:
        module: the user's module.
        has_first: this process has logical rank 0.
    """

    def __init__(self, module: nn.Module, has_first: bool) -> None:
        super().__init__(module)
        self._has_first = has_first
        self._kept: Values = []
        self._first: Values = []

    def begin(self) -> None:
        """Keep the buffers that all logical ranks begin with."""
        self._originals = [owner._buffers[name] for owner, name in self._places]
        self._kept = self._first = self._copies()

    def begin_leaf(self, position: int) -> None:
        """Give the process's logical rank at a position the buffers that all begin with."""
        if position:
            self._set(self._kept)

    def end_leaf(self, position: int) -> None:
        """Keep the buffers after a forward pass of logical rank 0."""
        if position == 0 and self._has_first:
            self._first = self._copies()

    def end(self) -> None:
        """Leave the buffers of logical rank 0 in the module. Without it, those that all have begun with."""
        self._set(self._first)


class OwnBuffers(_Buffers):
    """The buffers of the logical ranks of a process in an evaluation.

    Args:
        module: the user's module.
        ranks: the number of logical ranks of this process.
    """

    def __init__(self, module: nn.Module, ranks: int) -> None:
        super().__init__(module)
        # With one logical rank, its buffers stay in the module.
        self._own = [] if ranks == 1 else [self._copies()] * ranks
        self._current = 0

    def enter(self, position: int) -> None:
        """Give the logical rank at a position its buffers, and keep those of the logical rank before."""
        if self._own and position != self._current:
            self._own[self._current] = self._copies()
            self._set(self._own[position])
            self._current = position
