"""Loaders with different or unknown lengths on the ranks: an epoch ends on all ranks together.

Before each batch, the ranks exchange whether they have one. As soon as one rank has none, the epoch ends everywhere. The
batches that the other ranks have left are not trained on, which is logged once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from footplate.distributed.group import Group

log = logging.getLogger(__name__)

_END = object()


def together(batches: Iterator[Any], group: Group, name: str) -> Iterator[Any]:
    """Yield batches as long as every rank has one. All ranks iterate.

    Args:
        batches: this rank's batches.
        group: the ranks.
        name: of the loader, for the warning.
    """
    try:
        while True:
            batch = next(batches, _END)
            if not group.everybody(batch is not _END):
                has_batch = group.gather(batch is not _END)
                if any(has_batch):
                    _warn(group, name, [math.nan if has else 0 for has in has_batch])
                return
            yield batch
    finally:
        close(batches)


def close(batches: Iterator[Any]) -> None:
    """Close an iterator before its end, if it can be closed: a generator, a loader's threads."""
    end = getattr(batches, "close", None)
    if end is not None:
        end()


def shortest(batches: float, group: Group, name: str) -> float:
    """The number of batches that every rank has; infinite if a rank doesn't know its own number."""
    counts = group.gather(batches)
    if any(math.isinf(count) for count in counts):
        return math.inf
    if max(counts) != min(counts):
        _warn(group, name, [count - min(counts) for count in counts])
    return min(counts)


def _warn(group: Group, name: str, left: list[float]) -> None:
    if group.world.rank == 0:
        leftovers = ", ".join(f"rank {rank}: {_count(n)}" for rank, n in enumerate(left) if n)
        log.warning(
            "The %s loaders of the ranks have different lengths. An epoch ends with the shortest; left over: %s. A "
            "map-style DataLoader or a footplate.data.Loader is divided evenly.",
            name,
            leftovers,
        )


def _count(batches: float) -> str:
    return "at least 1 batch" if math.isnan(batches) else f"{int(batches)} batch{'es' if batches > 1 else ''}"
