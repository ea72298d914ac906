"""Tables in memory as a source: Arrow, pandas, polars, or a dict of columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from footplate.core.errors import DataError
from footplate.data.sources.base import RowGroup
from footplate.data.sources.value_hash import hash_table

_ROWS_PER_GROUP = 65_536


class MemorySource:
    """Slices of an Arrow table.

    Args:
        table: the rows.
        name: how messages speak of it.
    """

    in_memory = True
    is_remote = False
    kind = "memory"
    written = ""

    def __init__(self, table: pa.Table, name: str) -> None:
        self.uri = name
        self._table = table
        self.schema = table.schema.remove_metadata()

    @property
    def content(self) -> str:
        """A hash of all values, made when it is first asked for."""
        return self._content

    @functools.cached_property
    def _content(self) -> str:
        return hash_table(self._table)

    @property
    def version(self) -> str:
        """The content in one word."""
        return self.content[:16]

    @property
    def files(self) -> list[str]:
        """The one name that stands for the memory."""
        return [self.uri]

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """Equal slices of the table."""
        chosen = self._table if columns is None else self._table.select(list(columns))
        rows = self._table.num_rows
        found = []
        for index, start in enumerate(range(0, max(1, rows), _ROWS_PER_GROUP)):
            nbytes = chosen.slice(start, _ROWS_PER_GROUP).nbytes
            found.append(RowGroup(self.uri, index, min(_ROWS_PER_GROUP, rows - start), nbytes))
        return found

    def kept(self, group: int) -> None:
        """Nothing is ever deleted from a table in memory."""

    def nulls(self, column: str) -> int:
        """Nulls of a column."""
        return self._table.column(column).null_count

    def guarantee(self, group: int, columns: Sequence[str], filter: Any) -> None:
        """Nothing."""

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """The first rows of a slice."""
        return self.read(group, columns).slice(0, rows)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """A slice, without a copy."""
        return self._table.select(list(columns)).slice(group * _ROWS_PER_GROUP, _ROWS_PER_GROUP)

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """In one piece."""
        yield self.read(group, columns)


def open_memory(data: Any) -> MemorySource | None:
    """A source over what lies in memory; None when `data` is of another kind.

    Raises:
        DataError: it looks like a table but can't become one.
    """
    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    try:
        if isinstance(data, pa.Table):
            table = data
        elif isinstance(data, pa.RecordBatch):
            table = pa.Table.from_batches([data])
        elif kind == "pandas.DataFrame":
            table = pa.Table.from_pandas(data, preserve_index=False)
        elif isinstance(data, Mapping):
            table = pa.table({name: _column(values) for name, values in data.items()})
        elif hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
        else:
            return None
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
        raise DataError(f"A {kind} can't become a table: {error}.") from error
    return MemorySource(table, f"<{kind}>")


def _column(values: Any) -> Any:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim > 1:
        flat: Any = pa.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        return flat
    return values
