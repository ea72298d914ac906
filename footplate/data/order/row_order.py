"""The contract between an order of rows and the pipeline that reads them.

`Epoch` is the order of a table alone, `MixedTable` that of a table in a mixture. `plan.py` explains windows and streams.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from footplate.data.order.plan import GroupSlice, WindowSlice


class RowOrder(Protocol):
    """The rows of the batches of an epoch, in windows of neighbouring row groups."""

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        ...

    def num_batches(self, world: int = 1) -> int:
        """The number of batches, equal for every rank."""
        ...

    def window_slices(self, batch: int, rank: int = 0, world: int = 1) -> list[WindowSlice]:
        """Return the slices of windows that make a rank's slice of a global batch."""
        ...

    def group_slices(self, window: int) -> list[GroupSlice]:
        """Return the slices of row groups that a window gathers."""
        ...

    def window_order(self, window: int) -> np.ndarray | None:
        """The permutation of a window's rows, (rows,) int64; None if they stay in the order of the table."""
        ...

    def window_rows(self, window: int) -> int:
        """The number of rows of a window."""
        ...

    def window_stream(self, window: int) -> int:
        """The stream that a window belongs to."""
        ...

    def largest_window(self, stream: int) -> int:
        """The number of rows of the largest window of a stream."""
        ...

    def continues_row_group(self, window: int) -> bool:
        """Return True if a window begins inside the row group that the window before it, in the same stream, ends in."""
        ...

    def last_batch(self, window: int) -> int:
        """Return the last batch that may take rows from a window."""
        ...
