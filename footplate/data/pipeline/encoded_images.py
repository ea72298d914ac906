"""Encoded images in memory, in the order in which they are handed out, given up as they are.

What has been read is copied out of Arrow's memory, the images that are handed out together into one piece of memory of
their own. A piece comes from a pool and goes back to it when the last of its images has been taken and decoded. So a
window takes less and less memory while it is handed out, and Arrow's memory is free before more is read.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.data.pipeline.buffers import Buffers

_MOST_TOGETHER = 64  # rows
_PIECE_BYTES = 2 * 1024 * 1024


class EncodedImages:
    """The images of a window; those that were not added are null.

    Args:
        num_rows: of the window.
        buffers: where memory comes from.
    """

    def __init__(self, num_rows: int, buffers: Buffers) -> None:
        self._rows: list[np.ndarray | None] = [None] * num_rows
        self._buffers = buffers

    def add(self, values: pa.Array, places: np.ndarray) -> None:
        """Copy some images.

        Args:
            values: binary.
            places: at which place each is handed out, (rows,).
        """
        views = _views(values)
        order = np.argsort(places)
        together = max(1, min(_MOST_TOGETHER, _PIECE_BYTES * len(values) // max(1, values.nbytes)))
        cuts = np.flatnonzero(np.diff(places[order] // together)) + 1
        for rows in np.split(order, cuts):
            chosen = [(int(places[row]), views[row]) for row in rows.tolist()]
            memory = self._buffers.take((sum(len(view) for _, view in chosen if view is not None),))
            at = 0
            for place, view in chosen:
                if view is not None:
                    self._rows[place] = memory[at : at + len(view)]
                    memory[at : at + len(view)] = view
                    at += len(view)

    def take(self, start: int, stop: int) -> list[np.ndarray | None]:
        """The bytes of some rows as uint8 arrays, None where they are null. A row can be taken once."""
        taken = self._rows[start:stop]
        self._rows[start:stop] = [None] * len(taken)
        return taken


def _views(values: pa.Array) -> list[np.ndarray | None]:
    """Each value, on Arrow's memory."""
    wide = pt.is_large_binary(values.type) or pt.is_large_string(values.type)
    _, offsets, buffer = values.buffers()
    bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    views: list[np.ndarray | None] = [data[start:stop] for start, stop in itertools.pairwise(bounds.tolist())]
    if values.null_count:
        for row in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)).tolist():
            views[row] = None
    return views
