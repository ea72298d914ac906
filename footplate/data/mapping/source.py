"""A table's source with columns that a function has computed.

The rows, row groups and files are those of the inner source, so a row keeps its address. The function ran for the selected
rows only. The other rows of a row group, which nobody reads, have nulls in the computed columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.mapping.store import MappedStore, Results
from footplate.data.sources.base import RowGroup, Source, WholeGroupSource

if TYPE_CHECKING:
    from footplate.data.table import Table


class MappedSource(WholeGroupSource):
    """The columns of a source, and those that a function has computed; see `Source` for its methods.

    A computed column hides a column of the source with the same name.

    Args:
        source: the source of `documents`.
        documents: the rows that the function ran for.
        results: the description of the computed columns.
        store: the computed columns.
    """

    in_memory = False
    is_remote = False

    def __init__(self, source: Source, documents: Table, results: Results, store: MappedStore) -> None:
        self._source, self._results, self._store = source, results, store
        # Read the positions now: `kept` is called in threads that must not wait for each other.
        self._positions = [documents.positions(group) for group in range(len(results.groups))]
        self.uri, self.kind = source.uri, source.kind
        self.computed = results.schema.names
        own = [field for field in source.schema if field.name not in self.computed]
        self.schema = pa.schema([*own, *results.schema])

    @property
    def version(self) -> int | str:
        """The version of the inner source."""
        return self._source.version

    @property
    def content(self) -> str:
        """Hash of the content of the inner source, and of all computed values."""
        return hashed(self._source.content, self._results.content)

    @property
    def written(self) -> str:
        """When the files of the inner source were written."""
        return self._source.written

    @property
    def files(self) -> Sequence[str]:
        """The files of the inner source."""
        return self._source.files

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """List the row groups of the inner source, with the size of the chosen columns."""
        computed, own = self._parted(self.schema.names if columns is None else columns)
        row_groups = []
        for number, (group, described) in enumerate(zip(self._source.groups(own), self._results.groups, strict=True)):
            nbytes = sum(described.nbytes.get(name, 0) for name in computed)
            if self._positions[number] is not None:
                # As if the function had run for all rows.
                nbytes = nbytes * group.num_rows // max(1, described.num_rows)
            row_groups.append(replace(group, nbytes=group.nbytes + nbytes if own else nbytes))
        return row_groups

    def kept(self, group: int) -> np.ndarray | None:
        """Return the rows that the function ran for; None for all."""
        return self._positions[group]

    def nulls(self, column: str) -> int | None:
        """Return the number of nulls of a column; None if it isn't known."""
        if column in self.computed:
            return sum(group.nulls.get(column, 0) for group in self._results.groups)
        known = self._source.nulls(column)
        is_whole = all(positions is None for positions in self._positions)
        return known if is_whole or known == 0 else None

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read the physical rows of a row group.

        Raises:
            DataError: the computed columns are damaged or gone.
        """
        computed, own = self._parted(columns)
        parts = {}
        if own:
            rows = self._source.read(group, own)
            parts.update(zip(own, rows.columns, strict=True))
        if computed:
            rows = self._read_computed(group, computed)
            parts.update(zip(computed, rows.columns, strict=True))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return pa.Table.from_arrays([parts[name] for name in columns], schema=schema)

    def _read_computed(self, group: int, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([self._results.schema.field(name) for name in columns])
        described = self._results.groups[group]
        if described.num_rows:
            rows = self._store.group(group)
            if rows is None or rows.num_rows != described.num_rows:
                row_group = self._source.groups([])[group]
                raise DataError(
                    f"{row_group.file}, row group {row_group.index}: the computed columns in {self._store.directory} are "
                    "damaged or gone. Call Table.map again, on each machine that reads them: start the run again. Only the "
                    "missing row groups are computed."
                )
            rows = rows.select(columns).cast(schema)
        else:
            rows = schema.empty_table()
        positions = self._positions[group]
        if positions is None:
            return rows
        return rows.take(_expanding(positions, self._source.groups([])[group].num_rows))

    def _parted(self, columns: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return which columns are computed, and which are the source's own."""
        computed = [name for name in columns if name in self.computed]
        return computed, [name for name in columns if name not in self.computed]


def _expanding(positions: np.ndarray, num_rows: int) -> pa.Array:
    """Return indices that put selected rows at their physical places, with nulls between them."""
    numbers, valid = np.zeros(num_rows, np.int64), np.zeros(num_rows, bool)
    numbers[positions], valid[positions] = np.arange(len(positions)), True
    bitmap = np.packbits(valid, bitorder="little")
    return pa.Array.from_buffers(pa.int64(), num_rows, [pa.py_buffer(bitmap), pa.py_buffer(numbers)])
