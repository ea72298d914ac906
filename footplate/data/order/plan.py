"""The order in which rows are handed out: a pure function of (row-group sizes, seed, epoch, batch size).

The row groups of an epoch are put in a random order, and their rows one after another. That is the *line*, as long as the
table has rows. The line is cut into a fixed number of *streams* of equal length. Every global batch takes an equal share
from each stream, at the place that its number gives. Within a stream, the rows of a few neighbouring row groups (a
*window*) are permuted.

    line      |--- stream 0 ---|--- stream 1 ---|--- stream 2 ---|--- stream 3 ---|
    batch 0    ##               ##               ##               ##
    batch 1      ##               ##               ##               ##
    2 ranks   |------------ rank 0 ------------|------------ rank 1 ------------|

Ranks. The order doesn't depend on the number of ranks. Global batch b is a fixed list of rows, and rank r of W takes the
slice [n·r/W, n·(r+1)/W) of its n rows. The list is laid out stream by stream. So a rank has whole streams and reads only
their row groups, while a batch still mixes as many row groups as there are streams.

Resuming. Any batch can be computed without the batches before it. So a run resumes at once, also with another number of
ranks.

Sizes. Every full batch has `batch_size` rows. The tail (the remaining rows) is a last, smaller batch, unless `drop_last`.
The sizes of the ranks' slices differ by at most one row, and no row is repeated. A tail of fewer rows than ranks joins the
batch before it, so that every rank has rows. Only there, the number of ranks shows. (If a run has handed out everything but
such a tail, and continues with more ranks than the tail has rows, these few rows are left out.)

Windows. Rows that are permuted together must be in memory together. The windows of a stream follow each other along the
line. If a window ends inside a row group, the next window continues there. So a window can be smaller than a row group, if
row groups are read piece by piece (`window_rows`). A stream begins with windows of a few batches, which double until they
are as large as the rest. So the first batch waits for little. Rows that are handed out first are mixed with fewer rows of
their own row group.

Quality. A table that is small (or in memory) is one window: a true permutation of all rows. For a large table, more streams
give a better shuffle. Two rows of a batch come from the same row group with a probability of about 1 / streams (1 / 64 at
best), against 1 / row groups in a true permutation. Two such rows are at most a window apart. A large table of few, large
row groups has few streams. If it is sorted by label, for example, write it again in random order or in smaller row groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from footplate.core.errors import DataError
from footplate.data.order.window_edges import distinct, find_window_edges, streams_of

# The distance in epochs between two passes over a table in one epoch.
_EPOCHS_PER_PASS = 1 << 20
# What a generator is for. Each purpose draws from generators of its own.
GROUP_ORDER, ROW_ORDER, BATCH_ORDER = range(3)


@dataclass(frozen=True)
class Order:
    """Everything that the order of a table's rows depends on, beside the table and the epoch.

    Attributes:
        batch_size: rows of a global batch, over all ranks.
        seed: seed of every permutation.
        shuffle: False means the order of the table.
        drop_last: leave out the rows that don't fill a batch.
        streams: the number of streams that the line is cut into.
        window: how many neighbouring row groups of a stream are permuted together. At the beginning of a stream, fewer are
            (1, 2, 4, …), so that the first batch needs only one. With as many as the table has, the table is one window: a
            true permutation.
        window_rows: cut the row groups that `window` gathers evenly into windows of at most this size. The first windows
            of a stream have a few batches, and double. 0 leaves row groups whole.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    streams: int = 1
    window: int = 1
    window_rows: int = 0


@dataclass(frozen=True)
class WindowSlice:
    """Rows `start` to `stop` of a window."""

    window: int
    start: int
    stop: int


@dataclass(frozen=True)
class GroupSlice:
    """Rows `start` to `stop` of a row group."""

    group: int
    start: int
    stop: int


class Epoch:
    """The order of one epoch.

    Args:
        rows: the number of rows of each row group, (groups,) int64.
        order: what the order depends on.
        epoch: the number of the epoch, from 0.
        first_group: the row group that begins the line; None for a random one.

    Attributes:
        num_rows: rows of the table.
        full_batches: how many global batches have exactly `order.batch_size` rows.
        tail: how many rows remain after the full batches.
    """

    def __init__(self, rows: np.ndarray, order: Order, epoch: int, first_group: int | None = None) -> None:
        rows = np.asarray(rows, dtype=np.int64)
        # groups: (groups with rows,), in the order of the line
        groups = np.flatnonzero(rows)
        if order.shuffle:
            groups = groups[purpose_generator(order.seed, epoch, GROUP_ORDER, 0).permutation(len(groups))]
        if first_group is not None:
            groups = np.concatenate([[first_group], groups[groups != first_group]])
        # ends: (groups with rows,), where each group ends on the line
        ends = np.cumsum(rows[groups])
        self.order = order
        self.epoch = epoch
        self.num_rows = int(ends[-1]) if len(ends) else 0
        self.full_batches, self.tail = divmod(self.num_rows, order.batch_size)

        streams = max(1, min(order.streams, order.batch_size)) if order.shuffle else 1
        cuts = np.arange(streams + 1)
        # (streams,): rows of a full batch, and of the tail, from each stream
        self._share = np.diff(order.batch_size * cuts // streams)
        self._tail_share = np.diff(self.tail * cuts // streams)
        lengths = self._share * self.full_batches + self._tail_share
        # (streams + 1,): places on the line
        self._stream_start = np.concatenate([[0], np.cumsum(lengths)])
        self._cut_windows(groups, ends)

    def _cut_windows(self, groups: np.ndarray, ends: np.ndarray) -> None:
        """Cut the line into windows, and the windows, at the ends of row groups, into slices of row groups."""
        edges = distinct([[0], ends, self._stream_start])
        # (windows + 1,): places on the line
        self._window_start = find_window_edges(
            edges, self._stream_start, self._share, self.order.window, self.order.window_rows
        )

        edges = distinct([edges, self._window_start])
        starts, stops = edges[:-1], edges[1:]
        # position: (slices,), which row group of the line each slice belongs to
        position = np.searchsorted(ends, starts, side="right")
        group_start = np.concatenate([[0], ends])[position]
        self._slice_group = groups[position]
        self._slice_start, self._slice_stop = starts - group_start, stops - group_start
        self._first_slice = np.searchsorted(edges, self._window_start)

        self._window_stream = streams_of(self._window_start[:-1], self._stream_start)
        # (streams,): rows of the largest window of each stream
        self._largest = np.zeros(len(self._share), np.int64)
        np.maximum.at(self._largest, self._window_stream, np.diff(self._window_start))

    @property
    def num_windows(self) -> int:
        """The number of windows of the epoch."""
        return len(self._window_stream)

    def num_batches(self, world: int = 1) -> int:
        """The number of batches, equal for every rank.

        Raises:
            DataError: fewer rows than ranks, or fewer rows than a batch with `drop_last`.
        """
        if self.num_rows == 0:
            raise DataError("The table has no rows (or its filter leaves none), so there are no batches.")
        if self.num_rows < world:
            raise DataError(f"The table has {self.num_rows} rows for {world} ranks: use at most {self.num_rows} ranks.")
        if self.order.batch_size < world:
            raise DataError(
                f"A global batch of {self.order.batch_size} rows can't be shared by {world} ranks: use a larger "
                "batch_size, or fewer ranks."
            )
        if self.order.drop_last and not self.full_batches:
            raise DataError(
                f"The table has {self.num_rows} rows, fewer than one global batch of {self.order.batch_size}, and "
                "drop_last=True leaves them out: use a smaller batch_size or drop_last=False."
            )
        return self.full_batches + int(self._has_tail_batch(world))

    def position_after(self, batch: int, world: int = 1) -> int:
        """Return the batch that follows a batch, for any number of ranks. A batch that the tail joined counts twice."""
        return self.num_batches(1) if batch == self.num_batches(world) - 1 else batch + 1

    def batch_rows(self, batch: int, world: int = 1) -> int:
        """The number of rows of a global batch."""
        return int(self._shares(batch, world)[1].sum())

    def rank_rows(self, batch: int, rank: int, world: int) -> int:
        """The number of rows of a rank's slice of a batch: the rank's weight in the mean over a batch."""
        total = self.batch_rows(batch, world)
        return total * (rank + 1) // world - total * rank // world

    def window_slices(self, batch: int, rank: int = 0, world: int = 1) -> list[WindowSlice]:
        """Return the slices of windows that make a rank's slice of a global batch.

        The slices of all ranks, in order, make the whole batch.
        """
        offset, shares = self._shares(batch, world)
        total = int(shares.sum())
        return self._slices(offset, shares, total * rank // world, total * (rank + 1) // world)

    def slices_between(self, first: int, stop: int, low: int, high: int) -> list[WindowSlice]:
        """Return the slices of windows that make some of the rows `first` to `stop` of the epoch.

        Rows are counted from batch to batch. Here, they are laid out stream by stream, as those of one batch.

        Args:
            first: the number of the first row.
            stop: the number of the row after the last one.
            low: the first of these rows to return.
            high: the one after the last of them to return.
        """
        offset = self._rows_before(first)
        return self._slices(offset, self._rows_before(stop) - offset, low, high)

    def last_row(self, window: int) -> int:
        """The number of the last row of a window; see `slices_between`."""
        batch, stream = self.last_batch(window), self.window_stream(window)
        shares = self._share if batch < self.full_batches else self._tail_share
        offset = int(self._window_start[window + 1] - 1 - self._stream_start[stream])
        return batch * self.order.batch_size + int(shares[:stream].sum()) + offset - batch * int(self._share[stream])

    def _rows_before(self, row: int) -> np.ndarray:
        """How many of the first rows of the epoch come from each stream, (streams,) int64."""
        batch, rest = divmod(row, self.order.batch_size)
        shares = self._share if batch < self.full_batches else self._tail_share
        return self._share * batch + np.clip(rest - (np.cumsum(shares) - shares), 0, shares)

    def _slices(self, offset: np.ndarray, shares: np.ndarray, low: int, high: int) -> list[WindowSlice]:
        """Return the slices of windows that make the rows `low` to `high` of the shares of all streams."""
        ends = np.cumsum(shares)
        slices: list[WindowSlice] = []
        for stream in range(int(np.searchsorted(ends, low, side="right")), len(shares)):
            # Where the stream's share begins in the batch.
            first = int(ends[stream] - shares[stream])
            if first >= high:
                break
            line = int(self._stream_start[stream] + offset[stream]) - first
            self._append_slices(line + max(low, first), line + min(high, int(ends[stream])), slices)
        return slices

    def group_slices(self, window: int) -> list[GroupSlice]:
        """Return the slices of row groups that a window gathers."""
        numbers = range(int(self._first_slice[window]), int(self._first_slice[window + 1]))
        return [
            GroupSlice(int(self._slice_group[i]), int(self._slice_start[i]), int(self._slice_stop[i])) for i in numbers
        ]

    def window_rows(self, window: int) -> int:
        """The number of rows of a window."""
        return int(self._window_start[window + 1] - self._window_start[window])

    def window_stream(self, window: int) -> int:
        """The stream that a window belongs to."""
        return int(self._window_stream[window])

    def largest_window(self, stream: int) -> int:
        """The number of rows of the largest window of a stream."""
        return int(self._largest[stream])

    def continues_row_group(self, window: int) -> bool:
        """Return True if a window begins inside the row group that the window before it, in the same stream, ends in."""
        if not 0 < window < self.num_windows or self._window_stream[window] != self._window_stream[window - 1]:
            return False
        return bool(self._slice_start[self._first_slice[window]] > 0)

    def window_order(self, window: int) -> np.ndarray | None:
        """The permutation of a window's rows, (rows,) int64; None if they stay in the order of the table."""
        if not self.order.shuffle:
            return None
        rows = self.window_rows(window)
        return purpose_generator(self.order.seed, self.epoch, ROW_ORDER, window).permutation(rows)

    def first_batch(self, window: int) -> int:
        """Return the first full batch, or the tail, that takes rows from a window."""
        stream = self._window_stream[window]
        return self._batch_at(int(self._window_start[window] - self._stream_start[stream]), int(stream))

    def last_batch(self, window: int) -> int:
        """Return the last full batch, or the tail, that may take rows from a window. No rank needs it later."""
        stream = self._window_stream[window]
        last = int(self._window_start[window + 1] - 1 - self._stream_start[stream])
        return self._batch_at(last, int(stream))

    def rows(self, batch: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return a rank's slice of a global batch, (rows, 2) int64: the row group, and the row within it."""
        slices = [self.rows_of(part) for part in self.window_slices(batch, rank, world)]
        return np.concatenate(slices) if slices else np.zeros((0, 2), np.int64)

    def rows_of(self, part: WindowSlice) -> np.ndarray:
        """Return the rows of a slice of a window, (rows, 2) int64: the row group, and the row within it."""
        rows = np.concatenate([_with_group(group_slice) for group_slice in self.group_slices(part.window)])
        order = self.window_order(part.window)
        return (rows if order is None else rows[order])[part.start : part.stop]

    def _batch_at(self, place: int, stream: int) -> int:
        """Return the full batch, or the tail, that takes the row at a place of a stream."""
        share = int(self._share[stream])
        return min(place // share, self.full_batches) if share else self.full_batches

    def _has_tail_batch(self, world: int) -> bool:
        return not self.order.drop_last and self.tail >= (world if self.full_batches else 1)

    def _shares(self, batch: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where a batch begins in each stream, and how many rows it takes from each stream."""
        offset = self._share * batch
        if batch >= self.full_batches:
            return offset, self._tail_share
        joined = batch == self.full_batches - 1 and not self.order.drop_last and not self._has_tail_batch(world)
        return offset, self._share + self._tail_share if joined else self._share

    def _append_slices(self, start: int, stop: int, slices: list[WindowSlice]) -> None:
        """Append the slices of the windows between two places on the line."""
        window = int(np.searchsorted(self._window_start, start, side="right")) - 1
        while start < stop:
            first, end = int(self._window_start[window]), int(self._window_start[window + 1])
            upto = min(stop, end)
            slices.append(WindowSlice(window, start - first, upto - first))
            start, window = upto, window + 1


def epoch_of_pass(epoch: int, passes: int) -> int:
    """Return the epoch whose order a later pass of an epoch has. So it is shuffled differently than any epoch."""
    return epoch + passes * _EPOCHS_PER_PASS


def _with_group(part: GroupSlice) -> np.ndarray:
    rows = np.arange(part.start, part.stop)
    return np.stack([np.full(len(rows), part.group), rows], axis=1)


def purpose_generator(seed: int, epoch: int, purpose: int, number: int) -> np.random.Generator:
    """Return the generator of a purpose (`BATCH_ORDER`, …), an epoch and a number, such as that of a window."""
    return np.random.default_rng([seed, epoch, purpose, number])
