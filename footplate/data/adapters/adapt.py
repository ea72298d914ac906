"""Loaders of every kind, made resumable: `adapt` chooses the adapter for a training loader.

    footplate.data.Loader               as it is: it keeps its own position
    torch DataLoader over a map set     `SeededDataLoader`: a copy with another sampler. The order of an epoch is drawn from
                                        (seed, epoch), and the generators that augmentation uses are seeded for every batch,
                                        in the process that makes it
    a subclass that iterates itself     also such a copy, which runs the subclass's own code. To resume, it is read again
                                        from the beginning of the epoch, since its batches may not be those of its sampler
    a loader with state_dict            `StatefulLoader`: it keeps its own position (torchdata's StatefulDataLoader)
    a list of batches                   `ReplayedLoader`: indexed
    any other iterable                  `ReplayedLoader`: read again up to its position, with a warning
    several loaders                     each made resumable, and combined (`combined.py`)

Every adapted loader has `len()` if it can be known, iteration over the rest of the epoch, `set_epoch`, `state_dict` and
`load_state_dict`.

With several ranks, a `footplate.data.Loader` and a map-style DataLoader are shared out: global batch b is the same rows
for any number of ranks (`order/sharding.py`). `rank_shares.py` tells if every rank has the same number of batches, and how
much a rank's share counts. Any other loader is iterated by every rank, and the lengths may differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.data.adapters.combined import flatten, holds_loaders, mode_of
from footplate.data.adapters.rank_shares import of_share
from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.torch_dataloader import has_begun, with_own_positions
from footplate.data.adapters.training_combination import TrainingCombination
from footplate.data.adapters.wrappers import ReplayedLoader, SameEpoch, StatefulLoader
from footplate.distributed.world import SINGLE, World


def adapt(loader: Any, seed: int, shuffle: bool = True, world: World = SINGLE, shared: bool = True) -> Any:
    """Make a user's training loader resumable.

    Args:
        loader: a loader of any kind, or a collection of loaders.
        seed: the run's seed.
        shuffle: False keeps a DataLoader's order fixed (to overfit a few batches).
        world: rank and world size of this process.
        shared: True if the rows of a DataLoader are shared out among the ranks. Otherwise its sampler is used as it is.

    Raises:
        ConfigError: the loader can't be iterated.
    """
    if holds_loaders(loader):
        leaves, build = flatten(loader)
        # With one seed for all, equal data sets would have equal orders.
        seeds = [seed, *(rng.mix(seed, index) for index in range(1, len(leaves)))]
        pairs = zip(with_own_positions(leaves), seeds, strict=True)
        parts = [adapt(leaf, own_seed, shuffle, world, shared) for leaf, own_seed in pairs]
        return TrainingCombination(parts, build, mode_of(loader, "max_size_cycle"))

    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_map_style:
        return ReplayedLoader(loader) if has_begun(loader) else SeededDataLoader(loader, seed, shuffle, world, shared)

    loader = of_share(loader, world)
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if has_state and hasattr(loader, "set_epoch") and not isinstance(loader, DataLoader):
        return loader if shuffle else SameEpoch(loader)
    if has_state:
        return StatefulLoader(loader)
    if isinstance(loader, Iterable):
        return ReplayedLoader(loader)
    raise ConfigError(
        f"train_dataloader() returned {type(loader).__name__}, which can't be iterated over. Return a DataLoader, a "
        "footplate.data.Loader, or another iterable of batches."
    )
