"""The order of one table in a mixture: its rows in each batch, over as many passes as the epoch needs.

`mixing.py` says how many rows of the table each batch has. They are the next rows of the current pass, and then those of
the next pass. A pass has the order of an epoch of the table alone (`plan.py`), in batches of one row from each stream.

The rows of a batch are laid out stream by stream, and a rank takes a slice of them. So a rank reads about the same streams
in each batch, if a batch has at least one row from each stream. `most_streams` limits their number accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from footplate.data.order.mixing import Mixing, Phase
from footplate.data.order.plan import Epoch, GroupSlice, Order, WindowSlice, epoch_of_pass

# A window's number has the pass in its upper bits.
_WINDOW_BITS = 32


class MixedTable:
    """The rows of one table in the batches of an epoch of a mixture; see `RowOrder` for its methods.

    Args:
        mixing: the tables of all places.
        table: the number of this table.
        rows: the number of rows of each of its row groups, (groups,) int64.
        order: the order of a pass; its batch size is the number of streams.
        epoch: the number of the epoch.
        num_batches: the number of batches of the epoch.

    Attributes:
        num_rows: rows of the table.
    """

    def __init__(
        self,
        mixing: Mixing,
        table: int,
        rows: np.ndarray,
        order: Order,
        epoch: int,
        num_batches: int,
    ) -> None:
        self.epoch = epoch
        self._mixing, self._table = mixing, table
        self._batches = num_batches
        self.num_rows = int(rows.sum())
        self._pass = functools.lru_cache(4)(lambda number: Epoch(rows, order, epoch_of_pass(epoch, number)))
        self.last_batch = functools.lru_cache(4096)(self._last_batch)

    def num_batches(self, world: int = 1) -> int:
        """The number of batches, equal for every rank."""
        return self._batches

    def window_slices(self, batch: int, rank: int = 0, world: int = 1) -> list[WindowSlice]:
        """Return the slices of windows that make a rank's rows of this table in a batch; empty if it has none."""
        places = self._mixing.batch_size
        cuts = (0, places * rank // world, places * (rank + 1) // world, places)
        # first, low, high, stop: rows of the table, counted over the whole epoch
        first, low, high, stop = (int(self._mixing.rows_before(batch, place)[self._table]) for place in cuts)
        slices: list[WindowSlice] = []
        while low < high:
            # The part of the batch that is in the pass of row `first`.
            number, within = divmod(first, self.num_rows)
            end = min(stop, first - within + self.num_rows)
            if low < end:
                taken = self._pass(number).slices_between(
                    within, within + end - first, low - first, min(high, end) - first
                )
                slices += [WindowSlice(_numbered(number, part.window), part.start, part.stop) for part in taken]
            first, low = end, max(low, end)
        return slices

    def group_slices(self, window: int) -> list[GroupSlice]:
        """Return the slices of row groups that a window gathers."""
        number, within = _parts(window)
        return self._pass(number).group_slices(within)

    def window_order(self, window: int) -> np.ndarray | None:
        """The permutation of a window's rows, (rows,) int64; None if they stay in the order of the table."""
        number, within = _parts(window)
        return self._pass(number).window_order(within)

    def window_rows(self, window: int) -> int:
        """The number of rows of a window."""
        number, within = _parts(window)
        return self._pass(number).window_rows(within)

    def window_stream(self, window: int) -> int:
        """The stream that a window belongs to."""
        number, within = _parts(window)
        return self._pass(number).window_stream(within)

    def largest_window(self, stream: int) -> int:
        """The number of rows of the largest window of a stream, in the first pass."""
        return self._pass(0).largest_window(stream)

    def continues_row_group(self, window: int) -> bool:
        """Return True if a window begins inside the row group that the window before it, in the same stream, ends in."""
        number, within = _parts(window)
        return self._pass(number).continues_row_group(within)

    def rows(self, batch: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return a rank's rows of this table in a batch, (rows, 2) int64: the row group, and the row within it."""
        parts = [np.zeros((0, 2), np.int64)]
        for part in self.window_slices(batch, rank, world):
            number, within = _parts(part.window)
            parts.append(self._pass(number).rows_of(WindowSlice(within, part.start, part.stop)))
        return np.concatenate(parts)

    def _last_batch(self, window: int) -> int:
        """Return the last batch that takes rows from a window."""
        number, within = _parts(window)
        row = number * self.num_rows + self._pass(number).last_row(within)
        batch = self._mixing.batch_of(self._table, row)
        return self._batches if batch is None else batch


def most_streams(phases: Sequence[Phase], table: int, batch_size: int) -> int:
    """Return how many streams a table may have, so that a batch has a row from each; at least 1.

    Args:
        phases: the schedule.
        table: the number of the table.
        batch_size: rows of a global batch.
    """
    least = min((phase.weights[table] for phase in phases if phase.weights[table]), default=0.0)
    return max(1, int(least * batch_size))


def _numbered(number: int, window: int) -> int:
    return number << _WINDOW_BITS | window


def _parts(window: int) -> tuple[int, int]:
    return window >> _WINDOW_BITS, window & ((1 << _WINDOW_BITS) - 1)
