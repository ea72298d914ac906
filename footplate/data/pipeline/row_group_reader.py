"""A reader of row groups for the windows of one stream: each window continues where the window before it stopped.

A row group that is read in pieces may make several windows. Its reader stays open between them, and keeps the piece that it
has already read for the next window, a few MiB. So a row group is read once, unless it is in two streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from footplate.data.order.plan import GroupSlice
from footplate.data.table import Table


class RowGroupReader:
    """Reads slices of row groups, in the order of their rows. Only one thread may use it at a time.

    Args:
        table: the table.
        columns: the columns to read.
        in_pieces: True to read a row group in small pieces; otherwise it is read at once.

    Attributes:
        table: the table.
    """

    def __init__(self, table: Table, columns: Sequence[str], in_pieces: bool) -> None:
        self.table = table
        self._columns, self._in_pieces = columns, in_pieces
        self._group = -1
        self._pieces: Iterator[pa.Table] = iter(())
        # The rest of a piece that was read for an earlier slice.
        self._rest: pa.Table | None = None
        # The next row of the row group.
        self._next_row = 0

    def read(self, group_slices: Sequence[GroupSlice]) -> Iterator[pa.Table]:
        """Read the rows of several slices, one slice after another."""
        if self._in_pieces:
            for group_slice in group_slices:
                yield from self._pieces_of(group_slice)
            return
        groups = [group_slice.group for group_slice in group_slices]
        for group_slice, rows in zip(group_slices, self.table.read_groups(groups, self._columns), strict=True):
            yield rows.slice(group_slice.start, group_slice.stop - group_slice.start)

    def _pieces_of(self, group_slice: GroupSlice) -> Iterator[pa.Table]:
        """Read the rows of a slice, in pieces."""
        if group_slice.group != self._group or group_slice.start < self._next_row:
            self._open(group_slice.group)
        while self._next_row < group_slice.stop:
            piece = next(self._pieces) if self._rest is None else self._rest
            low = max(group_slice.start - self._next_row, 0)
            high = min(group_slice.stop - self._next_row, piece.num_rows)
            self._rest = piece.slice(high) if high < piece.num_rows else None
            self._next_row += high
            if low < high:
                yield piece.slice(low, high - low)

    def _open(self, group: int) -> None:
        self._group, self._next_row, self._rest = group, 0, None
        self._pieces = self.table.stream_group(group, self._columns)
