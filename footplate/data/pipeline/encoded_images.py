"""Encoded images in memory, in the order in which they are handed out, and freed as they are handed out.

Images are copied out of Arrow's memory. Images that are handed out together share one block of memory from a pool. A block
goes back to the pool when the last of its images has been taken and decoded. So a window takes less and less memory while
it is handed out, and Arrow's memory is free before more is read.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.data.pipeline.buffers import Buffers

_BLOCK_ROWS = 64
_BLOCK_BYTES = 2 * 1024 * 1024


class EncodedImages:
    """The images of a window. Images that were not added are null.

    Args:
        num_rows: rows of the window.
        buffers: the pool of memory.
    """

    def __init__(self, num_rows: int, buffers: Buffers) -> None:
        self._rows: list[np.ndarray | None] = [None] * num_rows
        self._buffers = buffers

    def add(self, values: pa.Array, places: np.ndarray) -> None:
        """Copy some images.

        Args:
            values: the encoded images, a binary array.
            places: the place at which each image is handed out, (rows,).
        """
        views = _views(values)
        order = np.argsort(places)
        rows_per_block = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * len(values) // max(1, values.nbytes)))
        cuts = np.flatnonzero(np.diff(places[order] // rows_per_block)) + 1
        for rows in np.split(order, cuts):
            images = [(int(places[row]), views[row]) for row in rows.tolist()]
            block = self._buffers.take((sum(len(view) for _, view in images if view is not None),))
            at = 0
            for position, view in images:
                if view is not None:
                    self._rows[position] = block[at : at + len(view)]
                    block[at : at + len(view)] = view
                    at += len(view)

    def take(self, start: int, stop: int) -> list[np.ndarray | None]:
        """Return the bytes of some rows as uint8 arrays, None for a null. A row can be taken once."""
        taken = self._rows[start:stop]
        self._rows[start:stop] = [None] * len(taken)
        return taken


def _views(values: pa.Array) -> list[np.ndarray | None]:
    """Return each value as an array on Arrow's memory."""
    is_large = pt.is_large_binary(values.type) or pt.is_large_string(values.type)
    _, offsets, buffer = values.buffers()
    bounds = np.frombuffer(offsets, np.int64 if is_large else np.int32)
    bounds = bounds[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    views: list[np.ndarray | None] = [data[start:stop] for start, stop in itertools.pairwise(bounds.tolist())]
    if values.null_count:
        for row in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)).tolist():
            views[row] = None
    return views
