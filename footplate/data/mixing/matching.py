"""Checks that the rows of several tables can be in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from footplate.core.errors import ConfigError, DataError
from footplate.data.packing.table import PackedTable
from footplate.data.sources.column_types import plain_type
from footplate.data.table import Table

# The number of each row's table, which a batch has beside the columns.
TABLE_IDS = "table_ids"


def check_tables(tables: Mapping[str, Table]) -> None:
    """Raise if the rows of some tables can't be in one batch.

    Raises:
        ConfigError: there are no tables.
        DataError: a table has no rows, or other columns than the first one.
    """
    if not isinstance(tables, Mapping) or not tables or not all(isinstance(table, Table) for table in tables.values()):
        raise ConfigError(
            f'tables={tables!r}: expected tables by name, such as {{"web": fp.Table(…), "code": fp.Table(…)}}.'
        )
    first = next(iter(tables))
    expected = _kinds(tables[first])
    for name, table in tables.items():
        if table.num_rows == 0:
            raise DataError(f"Table {name!r} ({table.uri}) has no rows. Leave it out, or give it another filter.")
        if TABLE_IDS in table.columns:
            raise DataError(
                f"Table {name!r}: column {TABLE_IDS!r} has the name of a value that mixing adds to a batch. Leave it "
                "out with columns=[…], or rename it."
            )
        if _kinds(table) != expected:
            raise DataError(
                f"Tables {first!r} and {name!r} differ, so their rows can't be in one batch: {_described(tables[first])}; "
                f"{_described(table)}. Choose the same columns with columns=[…], and pack all tables alike."
            )


def _kinds(table: Table) -> tuple[Any, ...]:
    """What rows of different tables must have alike: the columns in their order, what they become, and the packing."""
    packing = table.packing if isinstance(table, PackedTable) else None
    return packing and (packing.sequence_length, packing.padding_value), [
        (field.name, _kind(field.type)) for field in table.schema
    ]


def _kind(kind: pa.DataType) -> Any:
    """What a column becomes in a batch. Integers of any width are alike."""
    kind = plain_type(kind)
    if pt.is_integer(kind):
        return "integer"
    if pt.is_fixed_size_list(kind):
        return kind.list_size, _kind(kind.value_type)
    if pt.is_list(kind) or pt.is_large_list(kind):
        return "list", _kind(kind.value_type)
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return "binary"
    return "string" if pt.is_string(kind) or pt.is_large_string(kind) else str(kind)


def _described(table: Table) -> str:
    columns = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
    return f"{columns}, in sequences of {table.packing.sequence_length}" if isinstance(table, PackedTable) else columns


def check_shapes(shapes: Mapping[str, Any]) -> None:
    """Raise if the images of the tables differ in size.

    Raises:
        DataError: they do.
    """
    first, *others = shapes
    for name in others:
        if shapes[name] != shapes[first]:
            raise DataError(
                f"Tables {first!r} and {name!r} have images of different sizes ({shapes[first]} and {shapes[name]}), which "
                "can't be in one batch. Write them in one size."
            )
