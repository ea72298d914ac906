"""Columns of a Parquet table: its schema from the schemas of its files, and each file's columns as the table has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from footplate.core.errors import DataError


@dataclass(frozen=True)
class DataFile:
    """One Parquet file of a table.

    Attributes:
        path: its path on the table's file system.
        partition: values of the partition columns, which the file itself doesn't have.
        kept: for a file with a deletion vector, True for each row that isn't deleted, (rows,) bool; otherwise None.
    """

    path: str
    partition: dict[str, Any] = field(default_factory=dict)
    kept: np.ndarray | None = None


def hive_values(relative: str) -> dict[str, str | None]:
    """Return the partition values in a relative path such as `year=2024/part-0.parquet`."""
    pairs = (part.split("=", 1) for part in relative.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value) for key, value in pairs}


def partition_type(values: Sequence[str | None]) -> pa.DataType:
    """Return int64 if every value of a hive partition is an integer, else string."""
    return pa.int64() if all(value is None or re.fullmatch(r"-?\d{1,18}", value) for value in values) else pa.string()


def check_same(expected: pa.Schema, actual: pa.Schema, first: str, path: str) -> None:
    """Raise if two files of a table have other columns or types.

    Args:
        expected: the schema of the table's first file.
        actual: the schema of another file.
        first: the path of the first file.
        path: the path of the other file.

    Raises:
        DataError: the schemas differ.
    """
    wanted, present = set(expected.names), set(actual.names)
    missing, extra = (", ".join(sorted(names)) or "none" for names in (wanted - present, present - wanted))
    if wanted != present:
        raise DataError(
            f"{path}: its columns differ from those of {first} (missing: {missing}; extra: {extra}). The files of a "
            "Parquet table must agree. Name only files that agree, or write the table as Delta, which records changes of "
            "its schema."
        )

    for column in expected:
        other = actual.field(column.name).type
        if other != column.type:
            raise DataError(
                f"{path}: column {column.name!r} is {other}, but {column.type} in {first}. The files of a Parquet "
                "table must agree. Write them again with one type."
            )


def conform(
    read: pa.Table, wanted: Sequence[str], schema: pa.Schema, file: DataFile, rows: int, index: int
) -> pa.Table:
    """Convert what was read from a file to the table's columns, names and types.

    Args:
        read: the rows, under the file's own names.
        wanted: the file's own name of each column.
        schema: the table's columns.
        file: the file.
        rows: the number of rows.
        index: the number of the row group, for messages.

    Raises:
        DataError: a column can't be cast to the table's type.
    """
    if read.schema == schema:
        return read.replace_schema_metadata()
    stored = dict(zip(read.column_names, read.columns, strict=True))
    columns = [_column(stored.get(own), field, file, rows, index) for own, field in zip(wanted, schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(column: pa.ChunkedArray | None, field: pa.Field, file: DataFile, rows: int, index: int) -> pa.ChunkedArray:
    """Return a column of the table: as read, or a partition value, or nulls if an older file doesn't have it."""
    if column is not None:
        if column.type == field.type:
            return column
        try:
            return column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{file.path}, row group {index}: column {field.name!r} is {column.type}, which can't be cast to the "
                f"table's {field.type} ({error}). Write the file again, or leave the column out with columns=[…]."
            ) from error

    value = file.partition.get(field.name)
    if value is None:
        return pa.chunked_array([pa.nulls(rows, field.type)])
    scalar = pa.scalar(value).cast(field.type)
    return pa.chunked_array([pa.repeat(scalar, rows)])
