"""Batches of rows of similar length, as a pure function of the order of an epoch and the lengths of its rows.

Neighbouring global batches make a *megabatch*. Its rows are sorted by length and cut into batches again. These are handed
out in a random order:

    lengths in the order of `plan.py`    5 1 9 | 2 8 3 | 4 7 1 | 6 2 9      a megabatch of four batches
    sorted, and cut                      1 1 2 | 2 3 4 | 5 6 7 | 8 9 9
    handed out                           5 6 7 | 1 1 2 | 8 9 9 | 2 3 4

A batch is padded to its longest row, so little of it is padding. The rows of a megabatch are those that its batches have in
`plan.py`. Rows of equal length stay in random order.

Ranks. The rows of a global batch are laid out window by window, and a rank takes its slice of them. All rows of a global
batch have similar lengths, so no rank waits for another rank's long rows. In `plan.py`, each batch has as many rows of each
stream as every other. Here, the numbers vary from batch to batch. So a rank also reads windows of the streams beside its
own, and of more streams if row groups differ in their lengths.

Resuming. Any batch can be computed from its megabatch alone. The number of batches, and the number of rows of each, are
those of `plan.py`.

Windows. The rows of a window are handed out batch by batch. So a batch takes one slice of each of its windows, as any other
order does. All windows of a megabatch are in memory together.

The tail, which is the last and smaller batch, is left as it is.

The longest row of the table is in the first batch of epoch 0. If a batch is too large for the memory of a device, that
shows at once. For this, the row group of that row begins the line, and the row changes its place with the first row of the
window. If large row groups are read piece by piece, the row may be in a later window, and stays there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from footplate.data.order.plan import BATCH_ORDER, Epoch, Order, WindowSlice, purpose_generator

# How many megabatches are kept, and the lengths of how many windows.
_MEGABATCHES, _WINDOWS = 8, 512


@dataclass(frozen=True)
class _WindowShare:
    """The rows of a megabatch that are in one window.

    Attributes:
        start: the first of them in the window. They follow one another.
        order: the permutation that puts them into the order of their batches, (rows,) int64.
        cuts: where the rows of each batch begin in the window, and where those of the last one end, (batches + 1,).
    """

    start: int
    order: np.ndarray
    cuts: list[int]


class GroupedEpoch(Epoch):
    """The order of one epoch in which the rows of a batch have similar lengths.

    `slices_between` and `last_row` are those of the order that isn't grouped.

    Args:
        rows: the number of rows of each row group, (groups,) int64.
        order: what the order depends on, beside the lengths.
        epoch: the number of the epoch, from 0.
        lengths: the length of each row of the table, (rows,) int32.
        megabatch: how many global batches are sorted together, at most.
    """

    def __init__(self, rows: np.ndarray, order: Order, epoch: int, lengths: np.ndarray, megabatch: int) -> None:
        self._lengths = lengths
        # (groups + 1,): the number in the table of each row group's first row
        self._first_row = np.concatenate([[0], np.cumsum(rows)])
        first_group = self._longest = None
        if epoch == 0:
            longest = int(np.argmax(lengths))
            first_group = int(np.searchsorted(self._first_row, longest, side="right")) - 1
            # The number of the longest row in its row group, and so in the first window before its rows are permuted.
            self._longest = longest - int(self._first_row[first_group])
        super().__init__(rows, order, epoch, first_group)

        # (megabatches + 1,): the first batch of each, and the one after the last
        count = max(1, -(-self.full_batches // megabatch))
        self._edges = self.full_batches * np.arange(count + 1) // count
        self._megabatch = functools.lru_cache(_MEGABATCHES)(self._sorted_by_length)
        self._window_lengths = functools.lru_cache(_WINDOWS)(self._lengths_of)

    def window_slices(self, batch: int, rank: int = 0, world: int = 1) -> list[WindowSlice]:
        """Return the slices of windows that make a rank's slice of a global batch.

        The slices of all ranks, in order, make the whole batch.
        """
        if batch >= self.full_batches:
            return super().window_slices(batch, rank, world)
        number = self._number(batch)
        at = batch - int(self._edges[number])
        slices = [
            WindowSlice(window, share.cuts[at], share.cuts[at + 1])
            for window, share in self._megabatch(number).items()
            if share.cuts[at] < share.cuts[at + 1]
        ]
        rows = self.batch_rows(batch, world)
        if rows > self.order.batch_size:
            slices += super().window_slices(self.full_batches)
        return list(_cut(slices, rows * rank // world, rows * (rank + 1) // world))

    def window_order(self, window: int) -> np.ndarray:
        """The permutation of a window's rows, (rows,) int64."""
        order = self._plain_order(window)
        first, last = self.first_batch(window), min(super().last_batch(window), self.full_batches - 1)
        if first <= last:
            for number in range(self._number(first), self._number(last) + 1):
                share = self._megabatch(number)[window]
                rows = slice(share.start, share.start + len(share.order))
                order[rows] = order[rows][share.order]
        return order

    def last_batch(self, window: int) -> int:
        """Return the last full batch, or the tail, that may take rows from a window. No rank needs it later."""
        last = super().last_batch(window)
        return last if last >= self.full_batches else int(self._edges[self._number(last) + 1]) - 1

    def _number(self, batch: int) -> int:
        """Return the megabatch of a full batch."""
        return int(np.searchsorted(self._edges, batch, side="right")) - 1

    def _sorted_by_length(self, number: int) -> dict[int, _WindowShare]:
        """Sort the rows of a megabatch, and return those of each of its windows, in the order of the line."""
        first, stop = self._edges[number : number + 2].tolist()
        batches, size = stop - first, self.order.batch_size
        slices = self.slices_between(first * size, stop * size, 0, batches * size)
        lengths = np.concatenate([self._window_lengths(part.window)[part.start : part.stop] for part in slices])
        # batch: (rows,), the batch of the megabatch that each row is handed out in
        batch = np.empty(len(lengths), np.int64)
        batch[np.argsort(lengths, kind="stable")] = np.repeat(self._batch_order(number, batches), size)

        shares, row = {}, 0
        for part in slices:
            rows = part.stop - part.start
            of_window = batch[row : row + rows]
            counts = np.bincount(of_window, minlength=batches)
            cuts = part.start + np.concatenate([[0], np.cumsum(counts)])
            shares[part.window] = _WindowShare(part.start, np.argsort(of_window, kind="stable"), cuts.tolist())
            row += rows
        return shares

    def _batch_order(self, number: int, batches: int) -> np.ndarray:
        """Return when each batch of a megabatch is handed out, the one with the shortest rows first, (batches,) int64."""
        order = purpose_generator(self.order.seed, self.epoch, BATCH_ORDER, number).permutation(batches)
        if number == 0 and self._longest is not None:
            first = int(np.argmin(order))
            order[first], order[-1] = order[-1], 0
        return order

    def _plain_order(self, window: int) -> np.ndarray:
        """The permutation of a window's rows before they are grouped, (rows,) int64."""
        order = super().window_order(window)
        assert order is not None, "rows that aren't shuffled aren't grouped"
        if window == 0 and self._longest is not None and self._longest < len(order):
            place = int(np.argmax(order == self._longest))
            order[place], order[0] = order[0], self._longest
        return order

    def _lengths_of(self, window: int) -> np.ndarray:
        """The lengths of a window's rows before they are grouped, (rows,) int32."""
        first = self._first_row
        parts = [
            self._lengths[first[part.group] + part.start : first[part.group] + part.stop]
            for part in self.group_slices(window)
        ]
        return np.concatenate(parts)[self._plain_order(window)]


def _cut(slices: Sequence[WindowSlice], low: int, high: int) -> Iterator[WindowSlice]:
    """Yield the slices that hold the rows `low` to `high` of some slices."""
    for part in slices:
        rows = part.stop - part.start
        if low < rows and high > 0:
            yield WindowSlice(part.window, part.start + max(low, 0), part.start + min(high, rows))
        low, high = low - rows, high - rows
