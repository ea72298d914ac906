"""The search for the largest batch size that fits into memory, as a function of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from footplate.data.adapters.combined import leaves_of


def largest(
    fits: Callable[[int], bool], rows: Callable[[], float], first: int, narrow: bool, trials: int, most: int
) -> int | None:
    """Return the largest batch size that was tried and fits. None if none does.

    Args:
        fits: tries a size.
        rows: returns the number of rows, once a size has been tried. A batch of more rows tells nothing.
        first: the first size. It is doubled.
        narrow: search between the largest size that fits and the smallest that doesn't.
        trials: stop after this many sizes that fit. 0 takes the first without a trial.
        most: the largest size to try.
    """
    if trials == 0:
        return first
    best, failed, size = 0, most + 1, min(first, most)
    while trials and best < size < failed:
        if fits(size):
            best, trials = size, trials - 1
            if best >= rows():
                break
        else:
            failed = size
        unknown = failed > most
        if best and not unknown and not narrow:
            break
        size = min(2 * size, most) if unknown else (best + failed) // 2
    return best or None


def most_rows(loaders: Any) -> float:
    """Return the largest number of rows that a batch of these loaders can have."""
    sizes = []
    for loader in leaves_of(loaders):
        rows = getattr(loader, "table", None)
        try:
            sizes.append(rows.num_rows if rows is not None else len(loader.dataset))
        except (AttributeError, TypeError, NotImplementedError):
            continue
    return max(sizes, default=math.inf)
