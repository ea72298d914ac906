"""Shares of an adapted loader among the ranks: equal lengths, contents and orders, and the weight of each share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from footplate.data.adapters.combination import Combination
from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.wrappers import SameEpoch
from footplate.distributed.world import World


def even(loader: Any) -> bool:
    """Return True if every rank is certain to have the same number of batches."""
    loader = _unwrapped(loader)
    if isinstance(loader, Combination):
        return all(map(even, loader.parts))
    if isinstance(loader, SeededDataLoader):
        return loader.shared and not loader.has_own_length and not loader.endless
    return _is_loader(loader)


def shared_content(loader: Any) -> str:
    """Text about the rows of a loader that is shared out, equal on every rank; empty for any other loader."""
    loader = _unwrapped(loader)
    if isinstance(loader, Combination):
        return "; ".join(filter(None, map(shared_content, loader.parts)))
    is_shared = (isinstance(loader, SeededDataLoader) and loader.shared) or _is_loader(loader)
    return getattr(loader, "content", "") if is_shared else ""


def draw_order(loader: Any) -> str | None:
    """See `SeededDataLoader.draw_order`; None for any other loader."""
    loader = _unwrapped(loader)
    if isinstance(loader, Combination):
        return "; ".join(filter(None, map(draw_order, loader.parts))) or None
    return loader.draw_order() if isinstance(loader, SeededDataLoader) else None


def weigher(loader: Any, world: World) -> Callable[[int], float] | None:
    """Return the function from a batch's index to the weight of this rank's share; None if all shares are equal."""
    loader = _unwrapped(loader)
    if world.size == 1:
        return None
    if isinstance(loader, Combination):
        return functools.partial(loader.weight, weights=[weigher(part, world) for part in loader.parts])
    if isinstance(loader, SeededDataLoader):
        return loader.weight
    return _LoaderWeights(loader, world) if _is_loader(loader) else None


class _LoaderWeights:
    """Weights of the batches of a `footplate.data.Loader`. All batches but the last have the same weight."""

    def __init__(self, loader: Any, world: World) -> None:
        self._loader, self._world = loader, world

    def __call__(self, batch: int) -> float:
        return self._last if batch == self._last_batch else self._usual

    @functools.cached_property
    def _usual(self) -> float:
        return self._weight_of(0)

    @functools.cached_property
    def _last(self) -> float:
        return self._weight_of(self._last_batch)

    # Computed when training has begun, so after another global batch size may have been restored.
    @functools.cached_property
    def _last_batch(self) -> int:
        return len(self._loader) - 1

    def _weight_of(self, batch: int) -> float:
        return self._loader.rank_rows(batch) * self._world.size / self._loader.batch_rows(batch)


def of_share(loader: Any, world: World) -> Any:
    """Return a `footplate.data.Loader` that reads the rows of a share, and any other loader as it is.

    Such a loader takes the process's rank and world size, unless it was given others. With tensor parallelism, several
    ranks have the same share.
    """
    # Others may count the rows of ranks as well, but only Footplate's loaders can read those of other ranks.
    if not hasattr(loader, "beside") or loader._world is not None or world.size >= loader.world.size:
        return loader
    own = loader.beside()
    own.world = world
    return own


def _unwrapped(loader: Any) -> Any:
    loader = loader.loader if isinstance(loader, SameEpoch) else loader
    # All logical ranks have the same rows to share, and the same number of batches.
    return _unwrapped(loader.of_first_rank) if hasattr(loader, "of_first_rank") else loader


def _is_loader(loader: Any) -> bool:
    """Return True for a `footplate.data.Loader`, which is always shared out."""
    return hasattr(loader, "rank_rows")
