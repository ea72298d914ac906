"""Tables in memory as a source: Arrow, pandas, polars, or a dict of columns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from footplate.core.errors import DataError
from footplate.data.sources.base import RowGroup, WholeGroupSource
from footplate.data.sources.value_hash import hash_table

_ROWS_PER_GROUP = 65_536


class MemorySource(WholeGroupSource):
    """Slices of an Arrow table.

    Args:
        table: the rows.
        name: its name in messages.
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
        """Hash of all values, computed when it is first needed."""
        return self._content

    @functools.cached_property
    def _content(self) -> str:
        return hash_table(self._table)

    @property
    def version(self) -> str:
        """A hash of the content, in one word."""
        return self.content[:16]

    @property
    def files(self) -> list[str]:
        """The name of the table in memory."""
        return [self.uri]

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """Cut the table into slices of equal length."""
        chosen = self._table if columns is None else self._table.select(list(columns))
        rows = self._table.num_rows
        row_groups = []
        for index, start in enumerate(range(0, max(1, rows), _ROWS_PER_GROUP)):
            nbytes = chosen.slice(start, _ROWS_PER_GROUP).nbytes
            row_groups.append(RowGroup(self.uri, index, min(_ROWS_PER_GROUP, rows - start), nbytes))
        return row_groups

    def kept(self, group: int) -> None:
        """Return None: nothing is deleted from a table in memory."""

    def nulls(self, column: str) -> int:
        """Count the nulls of a column."""
        return self._table.column(column).null_count

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Return a slice, without a copy."""
        return self._table.select(list(columns)).slice(group * _ROWS_PER_GROUP, _ROWS_PER_GROUP)


def open_memory(data: Any) -> MemorySource | None:
    """Open a table in memory; None if `data` is of another kind.

    Raises:
        DataError: it looks like a table but can't be converted to one.
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
            table = pa.table({name: arrow_column(values) for name, values in data.items()})
        elif hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
        else:
            return None
    except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
        raise DataError(
            f"Table({kind}): it can't be converted to an Arrow table ({error}). Give columns of equal length, each of "
            "one type."
        ) from error
    return MemorySource(table, f"<{kind}>")


def arrow_column(values: Any) -> Any:
    """Return the values of a column in a form that Arrow converts. A tensor or array of n dimensions becomes lists."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.ndim > 1:
        flat: Any = pa.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        return flat
    return values
