"""The batches of a process's logical ranks, side by side (`Trainer(logical_ranks=…)`).

Each logical rank has a loader of its own, which is rank r of L. So its rows, and the draws of its augmentation, don't
depend on the number of processes. A batch of `LogicalLoader` is a `LogicalBatch`: one batch of each logical rank of this
process.

All these loaders have the same position: a number of global batches. A checkpoint holds it once.

The samplers and the data set are the user's, and are shared. So the order of an epoch is drawn once, for all of them.
Worker processes are divided among them, at least one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from footplate.core.errors import ConfigError
from footplate.data.adapters.combined import is_combined
from footplate.data.adapters.rank_shares import weigher
from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.torch_dataloader import copy_loader, has_begun
from footplate.data.adapters.wrappers import SameEpoch
from footplate.distributed.world import World


class LogicalBatch(tuple[Any, ...]):
    """The batches of a process's logical ranks, in their order."""

    __slots__ = ()


class LogicalLoader:
    """The loaders of a process's logical ranks as one.

    Args:
        loaders: of each logical rank, all with the same number of batches.
        worlds: the logical rank of each, and how many there are.
    """

    def __init__(self, loaders: Sequence[Any], worlds: Sequence[World]) -> None:
        self.loaders = list(loaders)
        self.of_first_rank = self.loaders[0]
        self.weights: list[Callable[[int], float] | None] = [
            weigher(loader, world) for loader, world in zip(loaders, worlds, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.of_first_rank)

    def __iter__(self) -> Iterator[LogicalBatch]:
        if isinstance(self.of_first_rank, SeededDataLoader):
            self.of_first_rank.draw_for(self.loaders)
        iterators = [iter(loader) for loader in self.loaders]
        try:
            yield from map(LogicalBatch, zip(*iterators, strict=True))
        finally:
            for iterator in iterators:
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()

    def weight(self, position: int, batch: int) -> float:
        """Return the weight of a logical rank's share of a batch."""
        weight = self.weights[position]
        return 1.0 if weight is None else weight(batch)

    @property
    def original(self) -> Any:
        """The user's loader."""
        return getattr(self.of_first_rank, "original", self.of_first_rank)

    @property
    def skipped(self) -> int:
        """The rows that could not be read."""
        return sum(getattr(loader, "skipped", 0) for loader in self.loaders)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch of all."""
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, which is the same for all."""
        return self.of_first_rank.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue all at a position."""
        for loader in self.loaders:
            loader.load_state_dict(state)


def logical_loader(loader: Any, seed: int, worlds: Sequence[World], shuffle: bool = True) -> LogicalLoader:
    """Share a user's loader out among the logical ranks of a process.

    Args:
        loader: a map-style DataLoader or a `footplate.data.Loader`.
        seed: the run's seed.
        worlds: the logical ranks of this process.
        shuffle: see `adapt`.

    Raises:
        ConfigError: another kind of loader, whose rows the trainer can't share out.
    """
    kind = type(loader).__name__
    if hasattr(loader, "rank_rows"):
        if loader._world is not None:
            raise _refused(worlds, kind, "it was given a world= of its own", "Leave world= out")
        return LogicalLoader([_of_table(loader, world, shuffle) for world in worlds], worlds)

    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not is_map_style or has_begun(loader) or is_combined(loader):
        raise _refused(
            worlds, kind, "its rows can't be shared out", "Give a map-style DataLoader or a footplate.data.Loader"
        )
    workers = max(1, loader.num_workers // len(worlds)) if loader.num_workers else 0
    copies = [copy_loader(loader, num_workers=workers) for _ in worlds]
    adapted = [SeededDataLoader(copy, seed, shuffle, world) for copy, world in zip(copies, worlds, strict=True)]
    for shared in adapted:
        shared.original = loader
    first = adapted[0]
    if first.shares_itself:
        raise _refused(worlds, kind, "its sampler shares out the rows by itself", "Give it an ordinary sampler")
    if first.has_own_length or first.endless:
        raise _refused(
            worlds, kind, "its own code decides how many batches there are", "Give a DataLoader with a length"
        )
    return LogicalLoader(adapted, worlds)


def _of_table(loader: Any, world: World, shuffle: bool) -> Any:
    own = loader.beside()
    own.world = world
    return own if shuffle else SameEpoch(own)


def _refused(worlds: Sequence[World], kind: str, reason: str, instead: str) -> ConfigError:
    total = worlds[0].size
    return ConfigError(
        f"logical_ranks={total}: this {kind} can't give batches to {total} logical ranks, since {reason}. {instead}, or "
        "leave logical_ranks out."
    )
