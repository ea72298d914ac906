"""Windows in memory: reading the row groups of a window, and putting their rows into the window's order.

Encoded images are copied out of Arrow's memory row by row (`encoded_images.py`). Every other kind of column becomes a block
(`columns.py`). `window_prefetch.py` decides which windows to load, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from footplate.core.errors import DataError
from footplate.data.order.plan import GroupSlice, WindowSlice
from footplate.data.order.row_order import RowOrder
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.columns import BlockSlice, Columns, Ragged
from footplate.data.pipeline.encoded_images import EncodedImages
from footplate.data.pipeline.row_group_reader import RowGroupReader
from footplate.data.sources.column_types import is_float, plain_type


@dataclass(frozen=True)
class ReadSpec:
    """The columns that are read of each row.

    Attributes:
        columns: the columns without images, grouped by kind.
        images: the names of the columns with images.
        skip: True to mark a row with a meaningless null as bad; False to raise an error.
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
    """A window in memory. Its rows are in the order in which they are handed out.

    Attributes:
        blocks: the loaded values. The key is the name of an image column, or of the first column of its kind.
        group_slices: the slices of row groups that the window gathers.
        order: the permutation of their rows, (rows,); None if there is none.
        bad: for each row, True if a null makes it a bad row, (rows,); None if no row is bad.
    """

    blocks: dict[str, Any]
    group_slices: list[GroupSlice]
    order: np.ndarray | None
    bad: np.ndarray | None

    def addresses(self, start: int, stop: int) -> np.ndarray:
        """Return the row group of some rows, and their numbers there, (rows, 2)."""
        return _addresses(self.group_slices, np.arange(start, stop) if self.order is None else self.order[start:stop])


def load_window(reader: RowGroupReader, spec: ReadSpec, epoch: RowOrder, number: int, buffers: Buffers) -> Window:
    """Read a window's rows and put them into the window's order.

    Args:
        reader: reads the row groups.
        spec: the columns to read.
        epoch: the order of rows.
        number: the number of the window.
        buffers: memory for the values.

    Raises:
        DataError: a row group can't be read, or there is a meaningless null (unless `spec.skip`).
    """
    group_slices = epoch.group_slices(number)
    order = epoch.window_order(number)

    # Images are copied piece by piece, so that Arrow's memory is free before the next piece is read.
    images = {name: EncodedImages(epoch.window_rows(number), buffers) for name in spec.images}
    places = _inverse(order, epoch.window_rows(number)) if images else np.zeros(0, np.int64)
    pieces, first = [], 0
    for piece in reader.read(group_slices if spec.names else ()):
        for name, encoded in images.items():
            _add_images(encoded, _bytes_of(piece.column(name)), places[first : first + piece.num_rows])
        pieces.append(piece.drop_columns(list(images)))
        first += piece.num_rows

    table = pa.concat_tables(pieces) if pieces else pa.table({})
    blocks: dict[str, Any] = {**images}
    bad: np.ndarray | None = None
    for columns in spec.columns:
        values = [table.column(name) for name in columns.names]
        if not columns.keeps_nulls and not is_float(values[0].type):
            bad = _mark_nulls(bad, columns, values, reader, spec, group_slices)
        blocks[columns.names[0]] = columns.load([_plain(column) for column in values], order, buffers)
    if bad is not None and order is not None:
        bad = bad[order]
    return Window(blocks, group_slices, order, bad)


def _mark_nulls(
    bad: np.ndarray | None,
    columns: Columns,
    values: Sequence[pa.ChunkedArray],
    reader: RowGroupReader,
    spec: ReadSpec,
    group_slices: Sequence[GroupSlice],
) -> np.ndarray | None:
    """Mark the rows with a null in some columns as bad, or raise an error."""
    for name, column in zip(columns.names, values, strict=True):
        if column.null_count:
            is_null = column.is_null().to_numpy()
            if not spec.skip:
                first = _addresses(group_slices, np.flatnonzero(is_null)[:1])[0]
                raise null_error(name, reader.table.where(*first.tolist()))
            bad = is_null if bad is None else bad | is_null
    return bad


def _inverse(order: np.ndarray | None, num_rows: int) -> np.ndarray:
    """Return the place at which each row is handed out, (rows,)."""
    if order is None:
        return np.arange(num_rows)
    places = np.empty(num_rows, np.int64)
    places[order] = np.arange(num_rows)
    return places


def _add_images(images: EncodedImages, values: pa.ChunkedArray, places: np.ndarray) -> None:
    for chunk in values.chunks:
        images.add(chunk, places[: len(chunk)])
        places = places[len(chunk) :]


def _addresses(group_slices: Sequence[GroupSlice], rows: np.ndarray) -> np.ndarray:
    """Return the row group and the number there of rows of concatenated slices, (rows, 2)."""
    ends = np.cumsum([group_slice.stop - group_slice.start for group_slice in group_slices])
    which = np.searchsorted(ends, rows, side="right")
    offsets = np.array([group_slice.stop - end for group_slice, end in zip(group_slices, ends.tolist(), strict=True)])
    groups = np.array([group_slice.group for group_slice in group_slices])
    return np.stack([groups[which], rows + offsets[which]], axis=1)


def null_error(column: str, where: str) -> DataError:
    """The error for a null that has no meaning."""
    return DataError(
        f"Column {column!r} is null in {where}. A null number has no meaning in a batch: give the table a "
        f'filter=[("{column}", "!=", None)], fill it, or pass on_error="skip" to leave such rows out.'
    )


def block_slices(name: str, slices: Sequence[WindowSlice], windows: dict[int, Window]) -> list[BlockSlice]:
    """Return the slices of blocks that hold a batch's values of a column."""
    return [(windows[part.window].blocks[name], part.start, part.stop) for part in slices]


def _plain(values: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = plain_type(values.type)
    return values if kind == values.type else values.cast(kind)


def _bytes_of(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the binary values of an image column, which may be a struct with a field `bytes`."""
    if pa.types.is_struct(values.type):
        values = pa.chunked_array([chunk.field("bytes") for chunk in values.chunks], pa.binary())
    return _plain(values)
