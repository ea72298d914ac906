"""Loaders whose lengths differ between ranks, or aren't known: an epoch ends on all of them together.

Before each batch the ranks tell each other, in one small exchange, whether they have one. As soon as one rank has none,
the epoch is over everywhere; what the others had left is not trained on, and said once.
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
    """Batches for as long as every rank has one; all ranks iterate.

    Args:
        batches: this rank's.
        group: the ranks.
        name: of the loader, for the warning.
    """
    try:
        while True:
            batch = next(batches, _END)
            if not group.everybody(batch is not _END):
                having = group.gather(batch is not _END)
                if any(having):
                    _warn(group, name, [math.nan if has else 0 for has in having])
                return
            yield batch
    finally:
        close(batches)


def close(batches: Iterator[Any]) -> None:
    """End an iterator before its end, where there is something to end: a generator, a loader's threads."""
    end = getattr(batches, "close", None)
    if end is not None:
        end()


def shortest(batches: float, group: Group, name: str) -> float:
    """The number of batches that every rank has; infinite when any of them doesn't know its own."""
    counts = group.gather(batches)
    if any(math.isinf(count) for count in counts):
        return math.inf
    if max(counts) != min(counts):
        _warn(group, name, [count - min(counts) for count in counts])
    return min(counts)


def _warn(group: Group, name: str, left: list[float]) -> None:
    if group.world.rank == 0:
        said = ", ".join(f"rank {rank}: {_count(n)}" for rank, n in enumerate(left) if n)
        log.warning(
            "The %s loaders of the ranks have different lengths. An epoch ends with the shortest; left over: %s. A "
            "map-style DataLoader or a footplate.data.Loader is shared out evenly.",
            name,
            said,
        )


def _count(batches: float) -> str:
    return "at least 1 batch" if math.isnan(batches) else f"{int(batches)} batch{'es' if batches > 1 else ''}"
