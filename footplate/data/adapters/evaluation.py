"""Evaluation loaders: shared out among the ranks, each with a position of its own.

An evaluation always begins with the first batch, so its loaders aren't made resumable. But a user may give the loader
that a training is in the middle of, or one loader twice.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from footplate.data.adapters.combination import Combination
from footplate.data.adapters.combined import CombinedLoader, flatten, is_combined, leaves_of, mode_of
from footplate.data.adapters.logical_loader import LogicalLoader
from footplate.data.adapters.rank_shares import of_share
from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.torch_dataloader import (
    announce_epoch,
    has_begun,
    samplers_of,
    with_own_position,
    with_own_positions,
)
from footplate.distributed.world import World


def share_out(loader: Any, seed: int, world: World, shared: bool = True) -> Any:
    """Return an evaluation loader of which each rank gets its share, if that is possible. No row is given twice.

    Args:
        loader: any iterable of batches.
        seed: the run's seed.
        world: rank and world size of this process.
        shared: see `adapt`.
    """
    if is_combined(loader):
        leaves, build = flatten(loader)
        parts = [share_out(leaf, seed, world, shared) for leaf in with_own_positions(leaves)]
        return Combination(parts, build, mode_of(loader, "sequential"))
    loader = of_share(loader, world)
    if not shared or world.size == 1 or not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset) or has_begun(loader):
        return loader
    return SeededDataLoader(loader, seed, world=world)


def apart_from_training(loader: Any, training: Any) -> Any:
    """Return an evaluation loader whose position isn't that of the training, even if the training uses the same loader.

    Args:
        loader: any iterable of batches.
        training: the loader or loaders that train in the same run, or None.
    """
    if is_combined(loader):
        leaves, build = flatten(loader)
        parts = [apart_from_training(leaf, training) for leaf in leaves]
        return CombinedLoader(build(iter(parts)), mode_of(loader, "sequential"))
    is_training = any(loader is leaf for leaf in leaves_of(training))
    return with_own_position(loader) if is_training else loader


def tell_samplers(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the samplers of an evaluation loader, as training does with its own."""
    if isinstance(loader, Combination):
        for part in loader.parts:
            tell_samplers(part, epoch)
    original = loader.original if isinstance(loader, (SeededDataLoader, LogicalLoader)) else loader
    if isinstance(original, DataLoader):
        announce_epoch(epoch, *samplers_of(original))
