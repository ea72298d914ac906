"""The contract of a source: a list of row groups, and a way to read one.

A row group is the smallest thing that is read at once: a row group of a Parquet file, or a slice of a table in memory.
Everything above (selection, order, threads, decoding) knows a source only by this contract, so a new kind of table is
one new file here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc


@dataclass(frozen=True)
class RowGroup:
    """What is read at once.

    Attributes:
        file: the file it lies in, or a name in angle brackets for what lies in memory.
        index: its number within that file.
        num_rows: its rows; in `Table.row_groups`, those that the table means.
        nbytes: its size in memory, uncompressed, over the columns that the table means.
    """

    file: str
    index: int
    num_rows: int
    nbytes: int


class Source(Protocol):
    """Where rows come from. Instances can be pickled, and `read` may be called from several threads at once."""

    uri: str
    kind: str

    @property
    def in_memory(self) -> bool:
        """Whether reading costs nothing."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether it is read over a network."""
        ...

    @property
    def version(self) -> int | str:
        """The number of a Delta version; of any other source, its content in one word."""
        ...

    @property
    def content(self) -> str:
        """A hash of what it holds, for `Digest.content`: the same for a copy of the files."""
        ...

    @property
    def written(self) -> str:
        """A hash of when its files were written, for `Digest.written`."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Names and types of all columns, partition columns included."""
        ...

    @property
    def files(self) -> Sequence[str]:
        """The files that hold the rows, in order."""
        ...

    def groups(self, columns: Sequence[str] | None = None) -> Sequence[RowGroup]:
        """All row groups in order, with their physical rows; `nbytes` counts `columns` only."""
        ...

    def kept(self, group: int) -> np.ndarray | None:
        """The physical rows of a group that are not deleted, as positions (int64); None when all are there."""
        ...

    def nulls(self, column: str) -> int | None:
        """How many nulls a column has, if that is known without reading it."""
        ...

    def guarantee(self, group: int, columns: Sequence[str], filter: pc.Expression) -> pc.Expression | None:
        """What is known of these columns in every row of a group without reading it, as far as it helps a filter."""
        ...

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """The first physical rows of a group, `rows` of them at most, reading no more than need be."""
        ...

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """The physical rows of a group, deleted ones included, with exactly these columns in the schema's types."""
        ...

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """What `read` gives, in pieces one after the other, so that it needn't be in memory as a whole."""
        ...
