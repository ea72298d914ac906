"""Thinning of long series: each bin keeps its least and its greatest value, so a spike stays visible.

A thinned series says so (`Thinned.of`), and has the mean of each bin, from which a smoothed curve is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 1000


@dataclass(frozen=True)
class Thinned:
    """A series that is short enough to draw. NaN marks values that are not finite.

    Attributes:
        index: (points,) int64, the positions of the kept points in the series.
        bins: (bins,) int64, the position in the middle of each bin; the same as `index` if nothing was left out.
        means: (bins,) float64, the mean of the finite values of each bin.
        of: the number of points before thinning; 0 if nothing was left out.
    """

    index: np.ndarray
    bins: np.ndarray
    means: np.ndarray
    of: int


def thin(values: np.ndarray, bins: int = BINS) -> Thinned:
    """Thin a series to at most two points for each of `bins` bins, besides the first and the last point.

    Args:
        values: (n,) float64. Values that are not finite are never the least or the greatest of a bin.
        bins: a series of at most twice as many points is kept as it is.
    """
    finite = np.isfinite(values)
    if len(values) <= 2 * bins:
        every = np.arange(len(values))
        return Thinned(every, every, np.where(finite, values, np.nan), 0)

    edges = np.linspace(0, len(values), bins + 1).astype(np.int64)
    starts = edges[:-1]
    # A bin without a finite value keeps its first point, so that the gap stays.
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    least, greatest = _positions(low, edges, np.argmin), _positions(high, edges, np.argmax)
    index = np.unique(np.concatenate([[0], least, greatest, [len(values) - 1]]))

    counts = np.add.reduceat(finite.astype(np.float64), starts)
    # Scale before summing: values near the largest float must not overflow.
    scaled = np.where(finite, values, 0.0) / np.repeat(np.maximum(counts, 1.0), np.diff(edges))
    # Rounding may carry a sum beyond the values, and even beyond the largest float.
    with np.errstate(over="ignore"):
        sums = np.clip(np.add.reduceat(scaled, starts), low[least], high[greatest])
    means = np.where(counts > 0, sums, np.nan)
    return Thinned(index, (edges[:-1] + edges[1:] - 1) // 2, means, len(values))


def _positions(values: np.ndarray, edges: np.ndarray, choose: Callable[[np.ndarray], Any]) -> np.ndarray:
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return np.array([low + int(choose(values[low:high])) for low, high in pairs], dtype=np.int64)
