"""Row groups read from window to window: each window takes its rows from where the one before it stopped.

A row group that is read bit by bit may make several windows. Its reader stays open between them, and keeps what it has read
of the next, a few MiB. So a row group is read once, but for one that lies in two streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from footplate.data.order.plan import GroupSlice
from footplate.data.table import Table


class GroupReader:
    """Reads parts of row groups, in the order of their rows; for one thread at a time.

    Args:
        table: where rows come from.
        columns: what is read of them.
        bit_by_bit: whether the rows of a part come in small pieces; otherwise a row group is read at once.

    Attributes:
        table: as given.
    """

    def __init__(self, table: Table, columns: Sequence[str], bit_by_bit: bool) -> None:
        self.table = table
        self._columns, self._bit_by_bit = columns, bit_by_bit
        self._group = -1
        self._pieces: Iterator[pa.Table] = iter(())
        self._left: pa.Table | None = None  # of a piece that was read
        self._at = 0  # the row of the group that comes next

    def read(self, part: GroupSlice) -> Iterator[pa.Table]:
        """The rows of a part, in pieces."""
        if part.group != self._group or part.start < self._at:
            self._open(part.group)
        while self._at < part.stop:
            piece = next(self._pieces) if self._left is None else self._left
            low, high = max(part.start - self._at, 0), min(part.stop - self._at, piece.num_rows)
            self._left = piece.slice(high) if high < piece.num_rows else None
            self._at += high
            if low < high:
                yield piece.slice(low, high - low)

    def _open(self, group: int) -> None:
        self._group, self._at, self._left = group, 0, None
        if self._bit_by_bit:
            self._pieces = self.table.stream_group(group, self._columns)
        else:
            self._pieces = iter([self.table.read_group(group, self._columns)])
