"""In which order rows are handed out: a pure function of (row-group sizes, seed, epoch, batch size).

The idea. Put the row groups of an epoch in a random order, their rows one after the other: the *line*, `rows` long.
Cut the line into a fixed number of *streams* of equal length. Every global batch takes an equal share from each stream,
at the place that its number says; within a stream, the rows of a few neighbouring row groups (a *window*) are permuted.

    line      |--- stream 0 ---|--- stream 1 ---|--- stream 2 ---|--- stream 3 ---|
    batch 0    ##               ##               ##               ##
    batch 1      ##               ##               ##               ##
    2 ranks   |------------ rank 0 ------------|------------ rank 1 ------------|

Nothing here depends on the number of ranks: global batch b is a fixed list of rows, and rank r of W takes the slice
[n·r/W, n·(r+1)/W) of its n rows. As the list is laid out stream by stream, a rank owns whole streams and reads only
their row groups, while a batch still mixes as many row groups as there are streams. Any batch can be computed without
those before it, so resuming is not a replay, and a run may go on with another number of ranks.

Sizes. Every full batch has `batch_size` rows. The tail (the rows left over) is a last, smaller batch, unless
`drop_last`; rank sizes differ by one row at most and no row is repeated. A tail of fewer rows than ranks joins the
batch before it, so that no rank is left without: the only place where the number of ranks shows. (Should a run have
handed out all but such a tail and go on with more ranks than the tail has rows, these few rows are passed over.)

Windows. What is permuted together must be in memory together, but not at once: the windows of a stream follow each other
along the line, and one that ends inside of a row group leaves the rest of it to the next, which reads on where that one
stopped. So, where a row group can be read bit by bit, a window need not be as large as one (`window_rows`), and a stream
begins with windows of a few batches that double until they are as large as the others: the first batch waits for little,
and rows that are handed out first are mixed with fewer of their own row group.

A table that is small (or in memory) is one window: a true permutation of all rows. For a large one, the shuffle is as
good as the streams are many: two rows of a batch come from the same row group with a probability of about 1 / streams
(1 / 64 at best), against 1 / row groups in a true permutation; those two lie at most a window apart. A large table of few,
large row groups has few streams; if it is sorted by label, say, write it anew in random order or in smaller row groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from footplate.core.errors import DataError

WHOLE_TABLE_BYTES = 64 * 2**20
STREAMS_BYTES = 256 * 2**20
WINDOW_BYTES = 128 * 2**20
CUT_WINDOW_BYTES = 48 * 2**20
LEAST_CUT_BYTES = 8 * 2**20
MAX_STREAMS = 64
GROUPS_PER_STREAM = 10

_FIRST_WINDOW_BATCHES = 4

_GROUP_ORDER, _ROW_ORDER = 0, 1


@dataclass(frozen=True)
class Order:
    """All that the order of a table's rows depends on, beside the table and the epoch.

    Attributes:
        batch_size: rows of a global batch, over all ranks.
        seed: of every permutation.
        shuffle: False means the order of the table.
        drop_last: leave out the rows that don't fill a batch.
        streams: into how many streams the line is cut.
        window: how many neighbouring row groups of a stream are permuted together; fewer at its beginning (1, 2, 4, …),
            so that the first batch needs no more than one. As many as there are: one window, a true permutation.
        window_rows: cut what `window` gathers evenly into windows of at most so many rows, and the first of a stream
            into windows of a few batches that double; 0 leaves row groups whole.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    streams: int = 1
    window: int = 1
    window_rows: int = 0


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a window."""

    window: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a row group."""

    group: int
    start: int
    stop: int


def choose_streams(group_bytes: Sequence[int], in_memory: bool = False) -> tuple[int, int]:
    """Streams and window for a shuffled table of row groups of these sizes; the same whatever the number of ranks.

    Few streams bound the memory of a single rank, which has a row group of each stream open; many streams let many
    ranks read apart. With at least `GROUPS_PER_STREAM` row groups in a stream, a row group cut between two streams,
    which is read twice, costs a tenth at most.
    """
    total = sum(group_bytes)
    if in_memory or total <= WHOLE_TABLE_BYTES:
        return 1, max(1, len(group_bytes))
    mean = max(1, total // len(group_bytes))
    most = min(MAX_STREAMS, len(group_bytes) // GROUPS_PER_STREAM, STREAMS_BYTES // mean)
    streams = 1 << (max(1, most).bit_length() - 1)
    return streams, max(1, WINDOW_BYTES // (streams * mean))


def choose_window_rows(group_bytes: Sequence[int], rows: int, streams: int) -> int:
    """`Order.window_rows` for row groups of these sizes that are read bit by bit, with so many rows in all.

    The windows that a single rank has open then take `CUT_WINDOW_BYTES`, as long as there are few streams: an open row
    group takes some memory too, so windows of less than `LEAST_CUT_BYTES` would gain nothing.
    """
    row_bytes = max(1, sum(group_bytes) // max(1, rows))
    return max(1, max(CUT_WINDOW_BYTES // streams, LEAST_CUT_BYTES) // row_bytes)


class Epoch:
    """The order of one epoch.

    Args:
        rows: how many rows each row group has, (groups,) int64.
        order: what the order depends on.
        epoch: the number of the epoch, from 0.

    Attributes:
        num_rows: rows of the table.
        full_batches: how many global batches have exactly `order.batch_size` rows.
        tail: how many rows are left over after these.
    """

    def __init__(self, rows: np.ndarray, order: Order, epoch: int) -> None:
        rows = np.asarray(rows, dtype=np.int64)
        groups = np.flatnonzero(rows)  # (groups with rows,)
        if order.shuffle:
            groups = groups[_generator(order.seed, epoch, _GROUP_ORDER, 0).permutation(len(groups))]
        ends = np.cumsum(rows[groups])  # where each group ends on the line
        self.order = order
        self.epoch = epoch
        self.num_rows = int(ends[-1]) if len(ends) else 0
        self.full_batches, self.tail = divmod(self.num_rows, order.batch_size)

        streams = max(1, min(order.streams, order.batch_size)) if order.shuffle else 1
        cuts = np.arange(streams + 1)
        self._share = np.diff(order.batch_size * cuts // streams)  # rows of a full batch from each stream
        self._tail_share = np.diff(self.tail * cuts // streams)
        lengths = self._share * self.full_batches + self._tail_share
        self._stream_start = np.concatenate([[0], np.cumsum(lengths)])  # (streams + 1,) places on the line
        self._cut_windows(groups, ends)

    def _cut_windows(self, groups: np.ndarray, ends: np.ndarray) -> None:
        """Cut the line into windows, and these, at the ends of groups, into parts."""
        edges = _distinct([[0], ends, self._stream_start])
        self._window_start = self._window_edges(edges)  # (windows + 1,) places on the line
        edges = _distinct([edges, self._window_start])
        starts, stops = edges[:-1], edges[1:]
        place = np.searchsorted(ends, starts, side="right")  # which group of the line each part belongs to
        group_start = np.concatenate([[0], ends])[place]
        self._part_group, self._part_start, self._part_stop = groups[place], starts - group_start, stops - group_start
        self._first_part = np.searchsorted(edges, self._window_start)
        self._window_stream = self._streams_of(self._window_start[:-1])
        self._largest = np.zeros(len(self._share), np.int64)  # rows of a stream's largest window
        np.maximum.at(self._largest, self._window_stream, np.diff(self._window_start))

    def _window_edges(self, edges: np.ndarray) -> np.ndarray:
        """Where windows begin and end on the line, of which `edges` are the ends of groups and streams."""
        starts, most = edges[:-1], self.order.window_rows
        stream = self._streams_of(starts)
        within = np.arange(len(starts)) - np.searchsorted(stream, stream)  # number of the part within its stream
        ends = _ramp(self.order.window, len(starts), gently=not most)
        gathered = np.searchsorted(ends, within, side="right")
        first = np.concatenate([[True], (np.diff(stream) > 0) | (np.diff(gathered) > 0)])[: len(starts)]
        found = np.append(starts[first], self.num_rows)
        if not most or self.order.window >= len(starts):
            return found
        largest = min(most, int(np.diff(found).max()))
        cuts = [found]
        for start, stop, share in zip(self._stream_start[:-1], self._stream_start[1:], self._share, strict=True):
            of_stream = start + _doubling(_FIRST_WINDOW_BATCHES * int(share), largest)
            cuts.append(of_stream[of_stream < stop])
        return _evenly(_distinct(cuts), most)

    def _streams_of(self, places: np.ndarray) -> np.ndarray:
        """The streams that places on the line belong to."""
        return np.searchsorted(self._stream_start, places, side="right") - 1

    @property
    def num_windows(self) -> int:
        """How many windows the epoch has."""
        return len(self._window_stream)

    def num_batches(self, world: int = 1) -> int:
        """Batches of every rank.

        Raises:
            DataError: fewer rows than ranks, or fewer rows than a batch with `drop_last`.
        """
        if self.num_rows == 0:
            raise DataError("The table has no rows (or its filter leaves none), so there are no batches.")
        if self.num_rows < world:
            raise DataError(f"The table has {self.num_rows} rows for {world} ranks: use at most {self.num_rows} ranks.")
        if self.order.batch_size < world:
            raise DataError(f"A global batch of {self.order.batch_size} rows can't be shared by {world} ranks.")
        if self.order.drop_last and not self.full_batches:
            raise DataError(
                f"The table has {self.num_rows} rows, fewer than one global batch of {self.order.batch_size}, and "
                "drop_last=True leaves them out: use a smaller batch_size or drop_last=False."
            )
        return self.full_batches + int(self._has_tail_batch(world))

    def position_after(self, batch: int, world: int = 1) -> int:
        """Where the order goes on after a batch, for any number of ranks: a batch that the tail joined counts twice."""
        return self.num_batches(1) if batch == self.num_batches(world) - 1 else batch + 1

    def batch_rows(self, batch: int, world: int = 1) -> int:
        """Rows of a global batch."""
        return int(self._shares(batch, world)[1].sum())

    def rank_rows(self, batch: int, rank: int, world: int) -> int:
        """Rows of a rank's slice of a batch; the mean over a batch weighs a rank by this."""
        total = self.batch_rows(batch, world)
        return total * (rank + 1) // world - total * rank // world

    def pieces(self, batch: int, rank: int = 0, world: int = 1) -> list[Piece]:
        """Where a rank's slice of a global batch lies; over the ranks in order, the whole batch."""
        offset, shares = self._shares(batch, world)
        ends = np.cumsum(shares)
        total = int(ends[-1])
        low, high = total * rank // world, total * (rank + 1) // world
        found = []
        for stream in range(int(np.searchsorted(ends, low, side="right")), len(shares)):
            slot = int(ends[stream] - shares[stream])  # where the stream's share begins in the batch
            if slot >= high:
                break
            line = int(self._stream_start[stream] + offset[stream]) - slot
            self._split(line + max(low, slot), line + min(high, int(ends[stream])), found)
        return found

    def window_parts(self, window: int) -> list[Part]:
        """The parts of row groups that a window gathers."""
        span = range(int(self._first_part[window]), int(self._first_part[window + 1]))
        return [Part(int(self._part_group[i]), int(self._part_start[i]), int(self._part_stop[i])) for i in span]

    def window_rows(self, window: int) -> int:
        """How many rows a window has."""
        return int(self._window_start[window + 1] - self._window_start[window])

    def window_stream(self, window: int) -> int:
        """The stream that a window belongs to."""
        return int(self._window_stream[window])

    def largest_window(self, stream: int) -> int:
        """Rows of the largest window of a stream."""
        return int(self._largest[stream])

    def goes_on(self, window: int) -> bool:
        """Whether a window begins inside of the row group that the one before it, in the same stream, ends in."""
        if not 0 < window < self.num_windows or self._window_stream[window] != self._window_stream[window - 1]:
            return False
        return bool(self._part_start[self._first_part[window]] > 0)

    def window_order(self, window: int) -> np.ndarray | None:
        """The permutation of a window's rows, (rows,) int64; None when they stay in the order of the table."""
        if not self.order.shuffle:
            return None
        rows = self.window_rows(window)
        return _generator(self.order.seed, self.epoch, _ROW_ORDER, window).permutation(rows)

    def last_batch(self, window: int) -> int:
        """The last full batch, or the tail, that may take rows from a window: after it, no rank needs it."""
        stream = self._window_stream[window]
        last = int(self._window_start[window + 1] - 1 - self._stream_start[stream])
        share = int(self._share[stream])
        return min(last // share, self.full_batches) if share else self.full_batches

    def rows(self, batch: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """A rank's slice of a global batch, (rows, 2) int64: row group, row within it."""
        found = []
        for piece in self.pieces(batch, rank, world):
            parts = self.window_parts(piece.window)
            rows = np.concatenate([_with_group(part) for part in parts])
            order = self.window_order(piece.window)
            found.append((rows if order is None else rows[order])[piece.start : piece.stop])
        return np.concatenate(found) if found else np.zeros((0, 2), np.int64)

    def _has_tail_batch(self, world: int) -> bool:
        return not self.order.drop_last and self.tail >= (world if self.full_batches else 1)

    def _shares(self, batch: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """For each stream: where a batch begins in it, and how many rows it takes."""
        offset = self._share * batch
        if batch >= self.full_batches:
            return offset, self._tail_share
        joined = batch == self.full_batches - 1 and not self.order.drop_last and not self._has_tail_batch(world)
        return offset, self._share + self._tail_share if joined else self._share

    def _split(self, start: int, stop: int, found: list[Piece]) -> None:
        """Append the pieces of the windows between two places on the line."""
        window = int(np.searchsorted(self._window_start, start, side="right")) - 1
        while start < stop:
            first, end = int(self._window_start[window]), int(self._window_start[window + 1])
            upto = min(stop, end)
            found.append(Piece(window, start - first, upto - first))
            start, window = upto, window + 1


def _ramp(window: int, parts: int, gently: bool) -> np.ndarray:
    """After how many parts of a stream each window of `window` parts ends, gently: windows of 1, 2, 4, … parts first."""
    if window >= parts:
        return np.array([parts])
    sizes = [1 << power for power in range(max(0, window - 1).bit_length())] if gently else []
    sizes += [max(1, window)] * (1 + parts // max(1, window))
    return np.cumsum(sizes)


def _doubling(first: int, largest: int) -> np.ndarray:
    """Where windows of `first` rows, twice as many, … end, up to half of `largest`."""
    return np.cumsum(first << np.arange((largest // 2 // first).bit_length()))


def _evenly(edges: np.ndarray, most: int) -> np.ndarray:
    """Cut each span between edges into as few equal ones as have `most` rows at most."""
    lengths = np.diff(edges)
    counts = -(-lengths // most)
    span = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each cut within its span
    return np.append(edges[span] + lengths[span] * number // counts[span], edges[-1])


def _distinct(places: Sequence[Any]) -> np.ndarray:
    """All places, ascending, each once; `np.unique`, without what that imports when it is first called."""
    found = np.sort(np.concatenate(places))
    return found[np.concatenate([[True], found[1:] != found[:-1]])]


def _with_group(part: Part) -> np.ndarray:
    rows = np.arange(part.start, part.stop)
    return np.stack([np.full(len(rows), part.group), rows], axis=1)


def _generator(seed: int, epoch: int, purpose: int, number: int) -> Generator:
    return default_rng([seed, epoch, purpose, number])
