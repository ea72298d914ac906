"""The lengths of a table's rows, which `Loader(group_by_length=…)` sorts by.

| column | length |
| --- | --- |
| list | the number of its items |
| string | the number of its characters |
| binary | the number of its bytes |
| integer | the value itself: a column of lengths that somebody has counted before |

A null has length 0. The column may be one that the batches don't have.

The lengths of all rows are read before the first batch, 4 bytes a row. For lists, this reads the column once. A column of
integers is small, so counting before saves that time. A cache keeps the lengths in a file, which all processes of a machine
share.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.types as pt

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.array_cache import load_array, save_array
from footplate.data.sources.column_types import is_bytes, plain_type
from footplate.data.sources.group_scan import scan_groups
from footplate.data.table import Table

# Arrow makes its functions at run time, so type checkers don't know them.
pc: Any = pyarrow.compute

# Change this if the same rows get other lengths.
_ALGORITHM = 1
_LONGEST = np.iinfo(np.int32).max


class RowLengths:
    """The length of each row of a table, read when it is first asked for.

    Args:
        table: the rows.
        column: the column to measure; any column of the table's source.
        cache: a local directory that keeps the lengths.

    Raises:
        DataError: there is no such column, or its values have no lengths.
    """

    def __init__(self, table: Table, column: str, cache: str | os.PathLike[str] | None = None) -> None:
        self._table, self._column, self._cache = table, column, cache
        self._kind = _check_type(table, column)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The length of each row, (rows,) int32. The first call reads the column.

        Raises:
            DataError: a row group can't be read, or an integer isn't a length.
        """
        if self._cache is None:
            return self._read()
        key = hashed(_ALGORITHM, self._table.digest.key, self._column)[:20]
        file = Path(self._cache) / f"lengths-{key}.npy"
        lengths = load_array(file)
        if lengths is None:
            lengths = self._read()
            save_array(file, lengths)
        return lengths

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all lengths, which the order of rows depends on."""
        return hashed(self._column, np.asarray(self.values))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # Another process of this machine maps the file.
        if self._cache is not None:
            state.pop("values", None)
        return state

    def _read(self) -> np.ndarray:
        """Read the lengths of all rows, (rows,) int32."""
        groups = np.flatnonzero(self._table.group_rows).tolist()
        lengths = np.empty(self._table.num_rows, np.int32)
        first = 0
        for of_group in scan_groups(self._read_group, groups, self._table.is_remote):
            lengths[first : first + len(of_group)] = of_group
            first += len(of_group)
        return lengths

    def _read_group(self, group: int) -> np.ndarray:
        """Read the lengths of a row group's rows, (rows,)."""
        column = self._table.read_group(group, [self._column]).column(0).cast(self._kind)
        if pt.is_integer(self._kind):
            lengths = column
        elif pt.is_string(self._kind) or pt.is_large_string(self._kind):
            lengths = pc.utf8_length(column)
        elif is_bytes(self._kind):
            lengths = pc.binary_length(column)
        else:
            lengths = pc.list_value_length(column)
        values = pc.fill_null(lengths, 0).to_numpy()
        outside = np.flatnonzero((values < 0) | (values > _LONGEST))
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"group_by_length={self._column!r}: the value in {self._table.where(group, row)} is {values[row]}, and a "
                f"length is between 0 and {_LONGEST}. Repair the row, or leave it out with filter=."
            )
        return values


def _check_type(table: Table, column: str) -> pa.DataType:
    """Return the plain type of a column.

    Raises:
        DataError: there is no such column, or its values have no lengths.
    """
    given = table.select([column]).schema.field(column).type
    kind = plain_type(given)
    is_text = pt.is_string(kind) or pt.is_large_string(kind)
    if pt.is_list(kind) or pt.is_large_list(kind) or is_text or is_bytes(kind) or pt.is_integer(kind):
        return kind
    raise DataError(
        f"group_by_length={column!r}: this column of {table.uri} is {given}, whose values have no lengths. Name a column "
        "of lists, strings or binary values, or of integers that are lengths."
    )
