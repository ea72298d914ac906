"""Wrappers that give any iterable of batches an epoch, a position and a state.

    ReplayedLoader    the iterable has no position: to resume, its first batches are read again and dropped
    StatefulLoader    the loader has `state_dict` and `load_state_dict`: it keeps its own position
    SameEpoch         a loader that shuffles by epoch is kept at its first epoch (to overfit a few batches)

`Positioned` counts batches for the first two, and for `SeededDataLoader`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from footplate.data.adapters.torch_dataloader import announce_epoch, samplers_of


class Positioned:
    """A loader that counts the batches it has handed out in this epoch, and can begin after some of them."""

    def __init__(self) -> None:
        self._epoch = 0
        self._batch = 0
        self._start = 0

    def _begin(self) -> int:
        """Return the batch to begin with. Only the first iteration after `load_state_dict` begins after batch 0."""
        self._batch, self._start = self._start, 0
        return self._batch

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It begins with its first batch, unless it is the epoch that was restored."""
        if epoch != self._epoch:
            self._epoch, self._batch, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its batches have been handed out."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after those batches."""
        self._epoch, self._batch, self._start = state["epoch"], state["batch"], state["batch"]


class ReplayedLoader(Positioned):
    """An iterable without a position of its own. To resume, the batches before the position are read and dropped."""

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__()
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        start = self._begin()
        if start and not isinstance(self.loader, Sequence):
            warn_of_replay(type(self.loader).__name__, start)
        for batch in itertools.islice(iter(self.loader), start, None):
            self._batch += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        announce_epoch(epoch, self.loader, *samplers_of(self.loader), getattr(self.loader, "dataset", None))


class StatefulLoader(Positioned):
    """A loader that keeps its own position."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        for batch in self.loader:
            self._batch += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch and self._start:
            # The loader was restored at the end of an epoch. One pass over the rest lets it notice that.
            for _ in self.loader:
                pass
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loader.load_state_dict(state["own"])


class SameEpoch:
    """A loader that shuffles by epoch, kept at its first epoch. Its state holds the epoch of the run."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin the first epoch again, unless `epoch` is the one that was restored."""
        if epoch != self._epoch:
            # The loader keeps its position if it gets the epoch that it is in. Another epoch first makes it begin again.
            self.loader.set_epoch(1)
        self.loader.set_epoch(0)
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, with the epoch of the run."""
        state = self.loader.state_dict()
        return {**state, "epoch": state["epoch"] + self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in that epoch of the run."""
        self._epoch = state["epoch"]
        self.loader.load_state_dict({**state, "epoch": 0})


def warn_of_replay(name: str, batches: int) -> None:
    """Warn that the first batches of a loader are read again to resume.

    Args:
        name: the loader's class.
        batches: how many batches are read again.
    """
    warnings.warn(
        f"{name} has no position to restore: its first {batches} batches are read again to resume. That is exact only if "
        "it gives the same batches each time. A map-style DataLoader or a footplate.data.Loader resumes at once and "
        "exactly.",
        stacklevel=3,
    )
