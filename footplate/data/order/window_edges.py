"""Edges of windows on the line, as a pure function. `plan.py` explains the line, streams and windows.

1. Neighbouring row groups of a stream are gathered: `window` of them, and fewer at the beginning of a stream (1, 2, 4, …).
2. If row groups are read in pieces, the gathered row groups are cut evenly into windows of at most `window_rows` rows. The
   first windows of a stream hold four batches, then eight, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_FIRST_WINDOW_BATCHES = 4


def find_window_edges(
    edges: np.ndarray, stream_start: np.ndarray, share: np.ndarray, window: int, window_rows: int
) -> np.ndarray:
    """Return where windows begin and end, as places on the line, (windows + 1,) int64.

    Args:
        edges: the ends of row groups and streams on the line, ascending, from 0 to the number of rows.
        stream_start: where each stream begins on the line, and where the last one ends, (streams + 1,).
        share: rows of a full batch from each stream, (streams,).
        window: see `Order`.
        window_rows: see `Order`.
    """
    # starts: (spans,), where each span of a row group in one stream begins
    starts = edges[:-1]
    stream = streams_of(starts, stream_start)
    # within: (spans,), number of the span within its stream
    within = np.arange(len(starts)) - np.searchsorted(stream, stream)
    ends = _gathered_ends(window, len(starts), gently=not window_rows)
    gathered = np.searchsorted(ends, within, side="right")
    is_first = np.concatenate([[True], (np.diff(stream) > 0) | (np.diff(gathered) > 0)])[: len(starts)]
    whole = np.append(starts[is_first], edges[-1])
    if not window_rows or window >= len(starts):
        return whole

    # The first windows of a stream hold few batches, so that the first batch waits for little.
    largest = min(window_rows, int(np.diff(whole).max()))
    cuts = [whole]
    for start, stop, rows in zip(stream_start[:-1], stream_start[1:], share, strict=True):
        of_stream = start + _doubling(_FIRST_WINDOW_BATCHES * int(rows), largest)
        cuts.append(of_stream[of_stream < stop])
    return _cut_evenly(distinct(cuts), window_rows)


def streams_of(places: np.ndarray, stream_start: np.ndarray) -> np.ndarray:
    """Return the stream that each place on the line belongs to."""
    return np.searchsorted(stream_start, places, side="right") - 1


def distinct(places: Sequence[Any]) -> np.ndarray:
    """Return all places in ascending order, each once. `np.unique` does the same, but its first call imports a lot."""
    ascending = np.sort(np.concatenate(places))
    return ascending[np.concatenate([[True], ascending[1:] != ascending[:-1]])]


def _gathered_ends(window: int, spans: int, gently: bool) -> np.ndarray:
    """Return after how many spans of a stream each window ends. `gently` begins with windows of 1, 2, 4, … spans."""
    if window >= spans:
        return np.array([spans])
    sizes = [1 << power for power in range(max(0, window - 1).bit_length())] if gently else []
    sizes += [max(1, window)] * (1 + spans // max(1, window))
    return np.cumsum(sizes)


def _doubling(first: int, largest: int) -> np.ndarray:
    """Return the ends of windows that double: `first` rows, then twice as many, up to half of `largest`."""
    return np.cumsum(first << np.arange((largest // 2 // first).bit_length()))


def _cut_evenly(edges: np.ndarray, most: int) -> np.ndarray:
    """Cut each span between two edges into equal spans of `most` rows at most, as few as possible."""
    lengths = np.diff(edges)
    counts = -(-lengths // most)
    span = np.repeat(np.arange(len(lengths)), counts)
    # number: (cuts,), of each cut within its span
    number = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(edges[span] + lengths[span] * number // counts[span], edges[-1])
