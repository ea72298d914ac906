"""A table of encoded columns as a source: what lies between Parquet and a Unischema's values.

`Loader` makes tensors of columns of numbers, and refuses a null integer or a Decimal. A Unischema's reader gives None and
Decimal as they are. So this source hands such columns on as text or bytes, which a batch keeps unchanged, and
`decode_rows` turns a batch into rows of the fields' types.

A predicate is applied here too. It chooses rows as deletion does in a Delta table: before the first batch is planned. So
the number of batches is known, each shard has as many as the others, and a resumed run reads the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.compat.petastorm_unischema import Unischema, UnischemaField
from footplate.core.errors import DataError, did_you_mean
from footplate.data.sources.arrow import indices
from footplate.data.sources.base import Source
from footplate.data.table import Table


def encoded(table: Table, schema: Unischema | None, predicate: Any) -> Table:
    """The rows of a table that the predicate keeps, in the form that `decode_rows` takes."""
    known = schema or Unischema("", [])
    return table.through(lambda source, meant: cast("Source", EncodedSource(source, meant, known, predicate)))


class EncodedSource:
    """A source whose columns a batch keeps unchanged; see the module. Everything else is the inner source's.

    Args:
        source: the table's files.
        table: the rows that are meant, before the predicate.
        schema: what the columns mean; a column without a field stays as it is.
        predicate: which rows, as of `footplate.compat.petastorm_predicates`; None for all.
    """

    def __init__(self, source: Source, table: Table, schema: Unischema, predicate: Any = None) -> None:
        self._source, self._table, self._unischema, self._predicate = source, table, schema, predicate
        # Read here: `kept` is called in threads that must not wait for each other.
        self._meant = [table.positions(group) for group in range(len(source.groups([])))]
        missing = sorted(set(predicate.get_fields() if predicate else ()) - set(source.schema.names))
        if missing:
            raise DataError(f"predicate: no column {missing[0]!r}. {did_you_mean(missing[0], source.schema.names)}")
        self.schema = pa.schema(
            [pa.field(field.name, _carried_type(field.type, schema.fields.get(field.name))) for field in source.schema]
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def kept(self, group: int) -> np.ndarray | None:
        """The rows of a group that the table means and the predicate keeps, as positions."""
        kept = self._meant[group]
        if self._predicate is None:
            return kept
        columns = sorted(self._predicate.get_fields())
        read = self.read(group, columns)
        if kept is None:
            kept = np.arange(read.num_rows)
        rows = decode_rows(self._unischema, read.take(indices(kept)).to_pydict())
        return kept[np.array([bool(self._predicate.do_include(row)) for row in rows], bool)]

    def nulls(self, column: str) -> int | None:
        """Nulls of a column over the rows that are meant, where that is known without reading it."""
        known = self._table.nulls(column)
        return known if self._predicate is None or known == 0 else None

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """The rows of a group, in the types of `schema`."""
        return self._carried(self._source.read(group, columns))

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """The first rows of a group, in the types of `schema`."""
        return self._carried(self._source.peek(group, columns, rows))

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of a group in pieces, in the types of `schema`."""
        return (self._carried(piece) for piece in self._source.stream(group, columns))

    def _carried(self, table: pa.Table) -> pa.Table:
        arrays = [
            _carry(column, self.schema.field(name).type, self._unischema.fields.get(name))
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema.field(name) for name in table.column_names]))


def decode_rows(schema: Unischema, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch, in the types of the schema's fields."""
    columns = [_decoded(schema.fields.get(name), values) for name, values in batch.items()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


def _decoded(field: UnischemaField | None, values: Any) -> list[Any]:
    stored = values if isinstance(values, list) else values.tolist()
    if field is None:
        return stored
    if field.shape and field.codec is None:  # a list of numbers, carried as the bytes of an array
        stored = [None if value is None else np.frombuffer(value, field.numpy_dtype).copy() for value in stored]
    return [field.decode(value) for value in stored]


def _carried_type(kind: pa.DataType, field: UnischemaField | None) -> pa.DataType:
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


def _carry(column: pa.ChunkedArray, kind: pa.DataType, field: UnischemaField | None) -> pa.ChunkedArray:
    if field is None or column.type == kind:
        return column
    if pt.is_list(column.type) or pt.is_large_list(column.type):
        rows = (None if row is None else np.asarray(row, field.numpy_dtype).tobytes() for row in column.to_pylist())
        return pa.chunked_array([pa.array(rows, kind)])
    if pt.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pt.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit))  # without its zone, which numpy's times don't have
    return column.cast(kind)
