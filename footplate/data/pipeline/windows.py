"""The row groups in memory: loading a window, and deciding which windows to load ahead.

A rank has one window of each of its streams open, and loads a few ahead in reader threads. When no batch can need a
window any more it is dropped, so memory is bounded by the open windows and those ahead, whatever the table's size.
Images are let go of one by one, as they are handed out: there, the next windows are loaded one after the other as room
becomes free, so that what is held is little more than the open windows when full; over a network, which takes longer, a
quarter more. At first, each batch looks twice as far ahead as the one before it, so that the first have the cores to
themselves while they are decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from footplate.core.errors import DataError
from footplate.data.order.plan import Epoch, GroupSlice, WindowSlice
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.columns import Columns, Ragged, Slice
from footplate.data.pipeline.encoded_images import EncodedImages
from footplate.data.pipeline.reading import GroupReader
from footplate.data.sources.column_types import is_float, plain_type
from footplate.data.table import Table
from footplate.distributed.world import World

_LOOK_AHEAD_BATCHES = 256
_EARLY = 0.25  # of a window: how much too early it is loaded, where rows are let go of one by one


@dataclass(frozen=True)
class Content:
    """What is read of each row.

    Attributes:
        columns: the columns that are no images, each kind together.
        images: names of the columns that are.
        skip: whether a row with a null that means nothing is marked as bad, rather than an error.
    """

    columns: tuple[Columns, ...]
    images: tuple[str, ...]
    skip: bool

    @property
    def ragged(self) -> list[str]:
        """The columns of lists that are padded."""
        return [columns.names[0] for columns in self.columns if isinstance(columns, Ragged)]

    @property
    def names(self) -> list[str]:
        """All columns to read."""
        return [*self.images, *(name for columns in self.columns for name in columns.names)]


@dataclass(frozen=True)
class Window:
    """A window in memory; everything is in the order in which rows are handed out.

    Attributes:
        blocks: what was loaded, for each image column by its name, for other columns by the first one's.
        parts: the parts of row groups that it gathers.
        order: the permutation of their rows, (rows,); None when there is none.
        bad: for each row, whether a null makes it a bad one, (rows,); None when no row is.
    """

    blocks: dict[str, Any]
    parts: list[GroupSlice]
    order: np.ndarray | None
    bad: np.ndarray | None

    def places(self, start: int, stop: int) -> np.ndarray:
        """Row group of each of some rows, and its number there, (rows, 2)."""
        return _places(self.parts, np.arange(start, stop) if self.order is None else self.order[start:stop])


def load_window(rows: GroupReader, content: Content, epoch: Epoch, number: int, buffers: Buffers) -> Window:
    """Read a window's rows and put them into order.

    Raises:
        DataError: a row group can't be read, or a null that means nothing (unless `content.skip`).
    """
    parts = epoch.group_slices(number)
    order = epoch.window_order(number)
    images = {name: EncodedImages(epoch.window_rows(number), buffers) for name in content.images}
    places = _inverse(order, epoch.window_rows(number)) if images else np.zeros(0, np.int64)
    others, first = [], 0
    for part in parts if content.names else ():
        for read in rows.read(part):
            for name, encoded in images.items():
                _add(encoded, _bytes_of(read.column(name)), places[first : first + read.num_rows])
            others.append(read.drop_columns(list(images)))
            first += read.num_rows
    read = pa.concat_tables(others) if others else pa.table({})
    blocks: dict[str, Any] = {**images}
    bad: np.ndarray | None = None
    for columns in content.columns:
        values = [read.column(name) for name in columns.names]
        if not columns.nulls_mean_something and not is_float(values[0].type):
            for name, column in zip(columns.names, values, strict=True):
                if column.null_count:
                    null = column.is_null().to_numpy()
                    if not content.skip:
                        raise null_error(name, rows.table.where(*_places(parts, np.flatnonzero(null)[:1])[0].tolist()))
                    bad = null if bad is None else bad | null
        blocks[columns.names[0]] = columns.load([_plain(column) for column in values], order, buffers)
    if bad is not None and order is not None:
        bad = bad[order]
    return Window(blocks, parts, order, bad)


def _inverse(order: np.ndarray | None, num_rows: int) -> np.ndarray:
    """At which place each row is handed out, (rows,)."""
    if order is None:
        return np.arange(num_rows)
    places = np.empty(num_rows, np.int64)
    places[order] = np.arange(num_rows)
    return places


def _add(images: EncodedImages, values: pa.ChunkedArray, places: np.ndarray) -> None:
    for chunk in values.chunks:
        images.add(chunk, places[: len(chunk)])
        places = places[len(chunk) :]


def _places(parts: Sequence[GroupSlice], rows: np.ndarray) -> np.ndarray:
    """Row group and number there of rows of some parts one after the other, (rows, 2)."""
    ends = np.cumsum([part.stop - part.start for part in parts])
    which = np.searchsorted(ends, rows, side="right")
    first = np.array([part.stop - end for part, end in zip(parts, ends.tolist(), strict=True)])
    return np.stack([np.array([part.group for part in parts])[which], rows + first[which]], axis=1)


def null_error(column: str, where: str) -> DataError:
    """The error for a null where it means nothing."""
    return DataError(
        f"Column {column!r} is null in {where}. A null number has no meaning in a batch: give the table a "
        f'filter=[("{column}", "!=", None)], fill it, or pass on_error="skip" to leave such rows out.'
    )


class Schedule:
    """Loads the windows that a rank's batches need, ahead of time and in the order of need.

    Args:
        table: where rows come from.
        content: what is read of them.
        epoch: their order.
        world: the place of this process among all.
        start: the first batch that will be asked for.
        pool: the reader threads.
        buffers: where windows find memory.
    """

    def __init__(
        self,
        table: Table,
        content: Content,
        epoch: Epoch,
        world: World,
        start: int,
        pool: ThreadPoolExecutor,
        buffers: Buffers,
    ) -> None:
        self._table, self._content, self._epoch = table, content, epoch
        self._world = world
        self._pool = pool
        self._batches = epoch.num_batches(world.size)
        self._seen = start  # batches before this one have been looked at
        self._ahead: deque[list[WindowSlice]] = deque()  # their pieces, from the next batch on
        self._windows: dict[int, Future[Window]] = {}
        self._left: dict[int, int] = {}  # rows of a window that were not handed out yet
        self._buffers = buffers
        gently = content.images and not table.is_remote
        self._reach = 0 if gently else _LOOK_AHEAD_BATCHES  # how many batches are looked at ahead
        self._open: dict[int, tuple[GroupReader, Future[Window]]] = {}  # of a stream that goes on within a row group

    def take(self, batch: int) -> tuple[list[WindowSlice], dict[int, Window]]:
        """The pieces of the next batch, and the windows they lie in, waiting for these. Call for each batch in turn."""
        for number in [number for number in self._windows if self._epoch.last_batch(number) < batch]:
            del self._windows[number], self._left[number]
        if not self._ahead:
            self._look_at(self._next_pieces())
        pieces = self._ahead.popleft()
        needed = {piece.window for piece in pieces}
        for piece in pieces:
            self._left[piece.window] -= piece.stop - piece.start
        going_on = {number for number in needed if self._left[number]} or needed
        while self._seen < self._batches and self._seen - batch < self._reach:
            following = self._next_pieces()
            if not self._load_ahead(following, going_on):
                break
            self._look_at(following)
        self._reach = min(max(1, 2 * self._reach), _LOOK_AHEAD_BATCHES)
        return pieces, {number: self._windows[number].result() for number in needed}

    def _next_pieces(self) -> list[WindowSlice]:
        return self._epoch.window_slices(self._seen, self._world.rank, self._world.size)

    def _load_ahead(self, pieces: list[WindowSlice], going_on: set[int]) -> bool:
        """Begin to load the windows of some pieces, as far as there is room; whether there was for all of them."""
        for piece in pieces:
            if not self._has_room(going_on, piece.window):
                return False
            self._load(piece.window)
        return True

    def _has_room(self, going_on: set[int], window: int) -> bool:
        """Whether a window may be loaded (or is already), while some are being handed out."""
        if window in self._windows:
            return True
        if not self._content.images:
            return len(self._windows) < len(going_on) + max(1, len(going_on) // 2)
        held, new = sum(self._left.values()), self._epoch.window_rows(window)
        streams = {self._epoch.window_stream(number) for number in going_on}
        opened = sum(map(self._epoch.largest_window, streams))
        return held + new <= max(opened, new) + _EARLY * (opened if self._table.is_remote else new)

    def _look_at(self, pieces: list[WindowSlice]) -> None:
        self._seen += 1
        self._ahead.append(pieces)
        for piece in pieces:
            self._load(piece.window)

    def _load(self, window: int) -> None:
        """Begin to load a window, unless that was done."""
        if window in self._windows:
            return
        self._left[window] = self._epoch.window_rows(window)
        stream = self._epoch.window_stream(window)
        before = self._open.pop(stream, None)
        if before is None or not self._epoch.continues_row_group(window):
            before = GroupReader(self._table, self._content.names, bool(self._content.images)), None
        reader, last = before
        loading = self._pool.submit(_load_after, last, reader, self._content, self._epoch, window, self._buffers)
        self._windows[window] = loading
        if self._epoch.continues_row_group(window + 1):
            self._open[stream] = reader, loading


def _load_after(
    last: Future[Window] | None, rows: GroupReader, content: Content, epoch: Epoch, number: int, buffers: Buffers
) -> Window:
    """Load a window after the one that its reader reads before it, which the pool has begun with before."""
    if last is not None:
        last.result()
    return load_window(rows, content, epoch, number, buffers)


def slices_of(name: str, pieces: Sequence[WindowSlice], windows: dict[int, Window]) -> list[Slice]:
    """A batch's share of what lies under a name: blocks, and the rows of each."""
    return [(windows[piece.window].blocks[name], piece.start, piece.stop) for piece in pieces]


def _plain(values: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = plain_type(values.type)
    return values if kind == values.type else values.cast(kind)


def _bytes_of(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The binary values of an image column, which may be a struct with a field `bytes`."""
    if pa.types.is_struct(values.type):
        values = pa.chunked_array([chunk.field("bytes") for chunk in values.chunks], pa.binary())
    return _plain(values)
