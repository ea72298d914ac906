"""A source of encoded columns, between Parquet files and the values of a Unischema.

`Loader` makes tensors of columns of numbers, and refuses a null integer or a Decimal. A reader of a Unischema gives None
and Decimals unchanged. So this source passes such columns on as text or bytes, which a batch keeps unchanged, and
`decode_rows` turns a batch into rows of the fields' types.

A predicate is applied here too. It chooses rows before the first batch is planned, as a deletion in a Delta table does. So
the number of batches is known, every shard has the same number, and a resumed run reads the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.compat.petastorm.unischema import Unischema, UnischemaField
from footplate.core.errors import DataError, did_you_mean
from footplate.data.sources.arrow import indices
from footplate.data.sources.base import Source
from footplate.data.table import Table


def encoded(table: Table, schema: Unischema | None, predicate: Any) -> Table:
    """The table's rows that the predicate keeps, in the form that `decode_rows` reads."""
    known = schema or Unischema("", [])
    return table.through(lambda source, rows: cast("Source", EncodedSource(source, rows, known, predicate)))


class EncodedSource:
    """A source whose columns a batch keeps unchanged; see the module's docstring. All else is the inner source's.

    Args:
        source: the table's files.
        table: the rows before the predicate is applied.
        schema: the fields of the columns; a column without a field stays as it is.
        predicate: chooses rows, as in `footplate.compat.petastorm.predicates`; None for all.
    """

    def __init__(self, source: Source, table: Table, schema: Unischema, predicate: Any = None) -> None:
        self._source, self._table, self._unischema, self._predicate = source, table, schema, predicate
        # Read the positions now: `kept` is called in threads that must not wait for each other.
        self._positions = [table.positions(group) for group in range(len(source.groups([])))]
        missing = sorted(set(predicate.get_fields() if predicate else ()) - set(source.schema.names))
        if missing:
            raise DataError(f"predicate: no column {missing[0]!r}. {did_you_mean(missing[0], source.schema.names)}")
        self.schema = pa.schema(
            [pa.field(field.name, _encoded_type(field.type, schema.fields.get(field.name))) for field in source.schema]
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def kept(self, group: int) -> np.ndarray | None:
        """Positions of a group's rows that the table has and the predicate keeps; None for all."""
        kept = self._positions[group]
        if self._predicate is None:
            return kept
        columns = sorted(self._predicate.get_fields())
        read = self.read(group, columns)
        if kept is None:
            kept = np.arange(read.num_rows)
        rows = decode_rows(self._unischema, read.take(indices(kept)).to_pydict())
        return kept[np.array([bool(self._predicate.do_include(row)) for row in rows], bool)]

    def nulls(self, column: str) -> int | None:
        """The number of nulls of a column in the chosen rows; None if it isn't known without reading the column."""
        known = self._table.nulls(column)
        return known if self._predicate is None or known == 0 else None

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read the rows of a group, in the types of `schema`."""
        return self._encode(self._source.read(group, columns))

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read the first rows of a group, in the types of `schema`."""
        return self._encode(self._source.peek(group, columns, rows))

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read the rows of a group in pieces, in the types of `schema`."""
        return (self._encode(piece) for piece in self._source.stream(group, columns))

    def _encode(self, table: pa.Table) -> pa.Table:
        arrays = [
            _encode_column(column, self.schema.field(name).type, self._unischema.fields.get(name))
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema.field(name) for name in table.column_names]))


def decode_rows(schema: Unischema, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Turn a batch into rows, in the types of the schema's fields."""
    columns = [_decoded(schema.fields.get(name), values) for name, values in batch.items()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


def _decoded(field: UnischemaField | None, values: Any) -> list[Any]:
    stored = values if isinstance(values, list) else values.tolist()
    if field is None:
        return stored
    # A list of numbers is stored as the bytes of an array.
    if field.shape and field.codec is None:
        stored = [None if value is None else np.frombuffer(value, field.numpy_dtype).copy() for value in stored]
    return [field.decode(value) for value in stored]


def _encoded_type(kind: pa.DataType, field: UnischemaField | None) -> pa.DataType:
    if (
        field is None
        or pt.is_binary(kind)
        or pt.is_large_binary(kind)
        or pt.is_string(kind)
        or pt.is_large_string(kind)
    ):
        return kind
    if pt.is_list(kind) or pt.is_large_list(kind):
        return pa.binary()
    if field.nullable or not (pt.is_integer(kind) or pt.is_floating(kind)):
        return pa.string()
    return kind


def _encode_column(column: pa.ChunkedArray, kind: pa.DataType, field: UnischemaField | None) -> pa.ChunkedArray:
    if field is None or column.type == kind:
        return column
    if pt.is_list(column.type) or pt.is_large_list(column.type):
        rows = (None if row is None else np.asarray(row, field.numpy_dtype).tobytes() for row in column.to_pylist())
        return pa.chunked_array([pa.array(rows, kind)])
    if pt.is_boolean(column.type):
        column = column.cast(pa.int8())
    # Numpy's times have no zone.
    if pt.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit))
    return column.cast(kind)
