"""The contract of a source: a list of row groups, and a way to read one.

A row group is the smallest unit that is read at once: a row group of a Parquet file, or a slice of a table in memory.
Selection, order, threads and decoding know a source only by this contract. So a new kind of table is one new file here.
`WholeGroupSource` has the methods of a source that can only read a row group as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc


@dataclass(frozen=True)
class RowGroup:
    """A unit that is read at once.

    Attributes:
        file: the file that it is in, or a name in angle brackets for a table in memory.
        index: its number within that file.
        num_rows: the number of its rows; in `Table.row_groups`, of its selected rows.
        nbytes: the size of the table's columns in memory, uncompressed.
    """

    file: str
    index: int
    num_rows: int
    nbytes: int


class Source(Protocol):
    """A source of rows. Instances can be pickled. Several threads may call `read` at once.

    Attributes:
        uri: the table as the user named it.
        kind: "delta", "parquet", …
        peeks: True if `peek` reads less than the whole row group.
    """

    uri: str
    kind: str
    peeks: bool

    @property
    def in_memory(self) -> bool:
        """True if the rows are in memory, so that reading costs nothing."""
        ...

    @property
    def is_remote(self) -> bool:
        """True if the rows are read over a network."""
        ...

    @property
    def version(self) -> int | str:
        """The number of a Delta version; for any other source, a hash of its content."""
        ...

    @property
    def content(self) -> str:
        """Hash of the content, for `Digest.content`. A copy of the files has the same."""
        ...

    @property
    def written(self) -> str:
        """Hash of when the files were written, for `Digest.written`."""
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
        """List all row groups in order, with their numbers of physical rows. `nbytes` counts `columns` only."""
        ...

    def kept(self, group: int) -> np.ndarray | None:
        """Return the positions of a group's physical rows that are not deleted, int64; None if none is deleted."""
        ...

    def nulls(self, column: str) -> int | None:
        """Return the number of nulls of a column; None if it isn't known without reading."""
        ...

    def guarantee(self, group: int, columns: Sequence[str], filter: pc.Expression) -> pc.Expression | None:
        """Return an expression that holds for every row of a group, as far as it is known and helps a filter; or None."""
        ...

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read at most `rows` of a group's first physical rows, and as little else as possible."""
        ...

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read the physical rows of a group, deleted rows included, with exactly these columns in the schema's types."""
        ...

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read the same rows as `read` in pieces, so that they needn't be in memory all at once."""
        ...


class WholeGroupSource(ABC):
    """A source that reads a row group as a whole, and knows nothing of its values before; see `Source` for the methods."""

    @abstractmethod
    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read the physical rows of a group."""

    peeks = False

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Return the first rows of a group, and read all of it."""
        return self.read(group, columns).slice(0, rows)

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Return the rows of a group in one piece."""
        yield self.read(group, columns)

    def guarantee(self, group: int, columns: Sequence[str], filter: pc.Expression) -> None:
        """Return None: nothing is known without reading."""
