"""Parquet files as a source: a file, a directory (hive partitions too), a glob, or the files of a Delta snapshot.

Opening reads each file's footer, once and in parallel. It tells row groups, sizes, types, and the bounds of the values. A
plain Parquet table is known by its footers and by the times at which its files were written; see docs/digests.md.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.remote.location import FoundFile, Location, Stamp
from footplate.data.sources.base import RowGroup
from footplate.data.sources.pruning import bounded, bounds_help, known_value

_TAIL_BYTES = 64 * 1024
_MAGIC = b"PAR1"
_MOST_ROWS_PER_PIECE = 32
_PIECE_BYTES = 1024 * 1024
_STREAM_BYTES = 64 * 1024
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


@dataclass(frozen=True)
class DataFile:
    """One Parquet file of a table.

    Attributes:
        path: where it lies, for the table's file system.
        partition: values of the partition columns, which the file itself doesn't hold.
        kept: for a file with a deletion vector, which of its rows are still there (bool); otherwise None.
    """

    path: str
    partition: dict[str, Any] = field(default_factory=dict)
    kept: np.ndarray | None = None


@dataclass(frozen=True)
class Footer:
    """What a Parquet file says about itself, a hash of that and of the file's size, and the file's stamp."""

    metadata: pq.FileMetaData
    content: str
    stamp: Stamp

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns; Spark's timestamps (INT96) in its unit, as the years 1 to 9999 don't fit into nanoseconds."""
        schema = self.metadata.schema.to_arrow_schema()
        for column in map(self.metadata.schema.column, range(self.metadata.num_columns)):
            if column.physical_type == "INT96" and column.path == column.name:
                at = schema.get_field_index(column.name)
                kind = schema.field(at).type
                schema = schema.set(at, schema.field(at).with_type(pa.timestamp("us", kind.tz)))
        return schema


def read_footer(filesystem: pafs.FileSystem, path: str) -> Footer:
    """Read a file's footer: one ranged read for most files, two for one with a large footer.

    Raises:
        DataError: the file is missing, empty, truncated, or not Parquet.
    """
    try:
        stamp = Stamp.of(filesystem, path)
        with filesystem.open_input_file(path) as file:
            size = file.size()
            tail = file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
            if size < 12 or tail[-4:] != _MAGIC:
                raise DataError(
                    f"{path}: not a complete Parquet file (it doesn't end with PAR1); it is truncated or something "
                    "else. Write it again, or leave it out."
                )
            length = struct.unpack("<I", tail[-8:-4])[0] + 8
            if length > len(tail):
                tail = file.read_at(min(size, length), max(0, size - length))
        footer = tail[-length:]
        return Footer(pq.read_metadata(pa.BufferReader(footer)), hashed(footer, size), stamp)
    except FileNotFoundError:
        raise DataError(f"{path}: this file of the table is not there (any more).") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: its Parquet footer can't be read ({error}).") from error


class ParquetSource:
    """Row groups of Parquet files that share a schema.

    Args:
        uri: the table as the user named it.
        files: the files, in order.
        filesystem: where they lie.
        kind: "parquet" or "delta".
        version: the number of a Delta version; None for plain Parquet.
        content: a hash of the content, where a log says what that is; None for plain Parquet, whose files say it.
        schema: the table's schema if the table has one of its own; otherwise it is the first file's.
        renamed: the files' own name of a column, where it differs from the table's (column mapping).
    """

    in_memory = False

    def __init__(
        self,
        uri: str,
        files: Sequence[DataFile],
        filesystem: pafs.FileSystem,
        kind: str = "parquet",
        version: int | None = None,
        content: str | None = None,
        schema: pa.Schema | None = None,
        renamed: dict[str, str] | None = None,
    ) -> None:
        self.uri = uri
        self.kind = kind
        self._files = tuple(files)
        self._filesystem = filesystem
        self._version = version
        self._logged = content
        self._schema = schema
        self._renamed = renamed or {}

    @functools.cached_property
    def _footers(self) -> list[Footer]:
        with ThreadPoolExecutor(16, "footplate-footers") as pool:
            return list(pool.map(lambda file: read_footer(self._filesystem, file.path), self._files))

    @functools.cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """For each row group of the table: its file, its number there, its first row there."""
        places = []
        for number, footer in enumerate(self._footers):
            first = 0
            for index in range(footer.metadata.num_row_groups):
                places.append((number, index, first))
                first += footer.metadata.row_group(index).num_rows
        return places

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_footers", None)
        state.pop("_places", None)
        return state

    @property
    def version(self) -> int | str:
        """The Delta version; for plain Parquet, content and times in one word."""
        return hashed(self.content, self.written)[:16] if self._version is None else self._version

    @property
    def content(self) -> str:
        """What the log says; for plain Parquet a hash of the files' names, partition values, sizes and footers."""
        return self._footers_content if self._logged is None else self._logged

    @functools.cached_property
    def _footers_content(self) -> str:
        files = zip(self._files, self._footers, strict=True)
        return hashed([(file.path.rpartition("/")[2], file.partition, footer.content) for file, footer in files])

    @property
    def written(self) -> str:
        """A hash of the times of plain Parquet files, or of the tags that an object store gives them."""
        return self._footers_written if self._logged is None else ""

    @functools.cached_property
    def _footers_written(self) -> str:
        return hashed([str(footer.stamp) for footer in self._footers])

    @property
    def is_remote(self) -> bool:
        """Whether it is read over a network."""
        return self._filesystem.type_name != "local"

    @property
    def files(self) -> list[str]:
        """Paths of the files, in order."""
        return [file.path for file in self._files]

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The table's own schema, or that of the files, checked to be one and the same."""
        if self._schema is not None:
            return self._schema
        first = self._footers[0].schema
        for file, footer in zip(self._files[1:], self._footers[1:], strict=True):
            _check_same(first, footer.schema, self._files[0].path, file.path)
        schema = first.remove_metadata()
        for name in self._files[0].partition:
            if name not in schema.names:
                schema = schema.append(pa.field(name, _partition_type([file.partition[name] for file in self._files])))
        return schema

    def typed(self, schema: pa.Schema) -> ParquetSource:
        """The same files, as a table with a schema of its own."""
        named = {"kind": self.kind, "version": self._version, "content": self._logged, "renamed": self._renamed}
        found = ParquetSource(self.uri, self._files, self._filesystem, schema=schema, **named)
        found._footers = self._footers
        return found

    def partition_values(self, column: str) -> set[Any]:
        """The values of a partition column; none if it isn't one."""
        return {file.partition[column] for file in self._files if column in file.partition}

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """All row groups of all files; `nbytes` counts `columns` only."""
        physical = None if columns is None else {self._renamed.get(name, name) for name in columns}
        found = []
        for number, index, _ in self._places:
            group = self._footers[number].metadata.row_group(index)
            nbytes = sum(
                _in_memory(chunk)
                for chunk in map(group.column, range(group.num_columns))
                if physical is None or _belongs(chunk.path_in_schema, physical)
            )
            found.append(RowGroup(self._files[number].path, index, group.num_rows, nbytes))
        return found

    def kept(self, group: int) -> np.ndarray | None:
        """Rows that the deletion vector leaves of a row group."""
        number, index, first = self._places[group]
        mask = self._files[number].kept
        if mask is None:
            return None
        rows = self._footers[number].metadata.row_group(index).num_rows
        if len(mask) != self._footers[number].metadata.num_rows:
            raise DataError(f"{self._files[number].path}: its deletion vector is of another length than the file.")
        return np.flatnonzero(mask[first : first + rows])

    def nulls(self, column: str) -> int | None:
        """The null count that the footers state; None if one of them doesn't, or if the nulls may lie in deleted rows."""
        total = 0
        for footer in self._footers:
            paths = [chunk.path for chunk in footer.metadata.schema]
            if self._renamed.get(column, column) not in paths:
                return None
            at = paths.index(self._renamed.get(column, column))
            for index in range(footer.metadata.num_row_groups):
                statistics = footer.metadata.row_group(index).column(at).statistics
                if statistics is None or not statistics.has_null_count:
                    return None
                total += statistics.null_count
        hidden = any(file.kept is not None for file in self._files)  # rows that count in the footers, but not here
        return None if total and hidden else total

    def guarantee(self, group: int, columns: Sequence[str], filter: pc.Expression) -> pc.Expression | None:
        """What the footer's statistics and the partition values say."""
        number, index, _ = self._places[group]
        file, metadata = self._files[number], self._footers[number].metadata
        at = {metadata.schema.column(column).path: column for column in range(metadata.num_columns)}
        stored = set(self._footers[number].schema.names)
        known = []
        for column in map(self.schema.field, columns):
            own = self._renamed.get(column.name, column.name)
            if own not in stored:
                known.append(known_value(column, file.partition.get(column.name)))
            elif own in at and bounds_help(column, filter):
                chunk = metadata.row_group(index).column(at[own])
                known.append(bounded(column, chunk, metadata.schema.column(at[own]).logical_type))
        there = [expression for expression in known if expression is not None]
        return functools.reduce(operator.and_, there) if there else None

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read only the pages that hold a row group's first rows."""
        return next(iter(self._pieces(group, columns, rows)))

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read one row group and give it the table's names, types and partition columns."""
        return next(iter(self._pieces(group, columns, None)))

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read one row group bit by bit, page after page."""
        number, index, _ = self._places[group]
        metadata = self._footers[number].metadata.row_group(index)
        row_bytes = 1 + metadata.total_byte_size // max(1, metadata.num_rows)
        return self._pieces(group, columns, max(1, min(_MOST_ROWS_PER_PIECE, _PIECE_BYTES // row_bytes)))

    def _pieces(self, group: int, columns: Sequence[str], rows: int | None) -> Iterator[pa.Table]:
        """A row group in pieces of so many rows; None means in one."""
        number, index, _ = self._places[group]
        file, metadata = self._files[number], self._footers[number].metadata
        total = metadata.row_group(index).num_rows
        stored = self._footers[number].schema
        present = set(stored.names)
        wanted = [self._renamed.get(name, name) for name in columns]
        names = [name for name in wanted if name in present]
        schema = pa.schema([self.schema.field(name) for name in columns])
        try:
            if self.kind == "parquet":  # Delta never writes a file anew
                self._footers[number].stamp.check(self._filesystem, file.path)
            with self._filesystem.open_input_file(file.path) as handle:
                buffered = _STREAM_BYTES if rows is not None and not self.is_remote else 0
                fetch_ahead = rows is None and self.is_remote
                parquet = pq.ParquetFile(
                    handle,
                    metadata=metadata,
                    pre_buffer=fetch_ahead,
                    buffer_size=buffered,
                    coerce_int96_timestamp_unit="us",
                )
                if rows is None or not names:
                    read = parquet.read_row_group(index, names, use_threads=False)
                    yield _conform(read, wanted, schema, file, total, index)
                    return
                for batch in parquet.iter_batches(rows, [index], names, use_threads=False):
                    read = pa.Table.from_batches([batch])
                    yield _conform(read, wanted, schema, file, read.num_rows, index)
        except FileNotFoundError:
            raise DataError(
                f"{file.path}: this file of {self.uri} (version {self.version}) is gone: the table was vacuumed or "
                "rewritten while it was read. Keep old versions for as long as a run needs them, or start a new run."
            ) from None
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file.path}, row group {index}: can't be read ({error}).") from error


def _belongs(path: str, columns: set[str]) -> bool:
    """Whether what lies at a path is one of the columns, or within one; a column's own name may have dots too."""
    parts = path.split(".")
    return any(".".join(parts[:end]) in columns for end in range(1, len(parts) + 1))


def _in_memory(chunk: pq.ColumnChunkMetaData) -> int:
    """Bytes of a column chunk once it is decoded: of numbers in a dictionary, more than the file says."""
    return max(chunk.total_uncompressed_size, chunk.num_values * _WIDTHS.get(chunk.physical_type, 0))


def open_parquet(place: Location, files: Sequence[FoundFile]) -> ParquetSource | None:
    """The Parquet files among the files of a place; None when there is none. One file without an ending counts."""
    found = [file for file in files if file.path.lower().endswith((".parquet", ".parq", ".pq"))]
    if len(files) == 1 and not found and "." not in files[0].relative:
        found = list(files)
    if not found:
        return None
    return ParquetSource(
        place.uri, [DataFile(file.path, _hive_values(file.relative)) for file in found], place.filesystem
    )


def _hive_values(relative: str) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in relative.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value) for key, value in pairs}


def _partition_type(values: Sequence[str | None]) -> pa.DataType:
    """int64 when every value of a hive partition is an integer, else string."""
    return pa.int64() if all(value is None or re.fullmatch(r"-?\d{1,18}", value) for value in values) else pa.string()


def _check_same(expected: pa.Schema, found: pa.Schema, first: str, path: str) -> None:
    wanted, present = set(expected.names), set(found.names)
    lost, new = (", ".join(sorted(names)) or "none" for names in (wanted - present, present - wanted))
    if wanted != present:
        raise DataError(
            f"{path}: its columns differ from those of {first} (missing: {lost}; more: {new}). A Parquet "
            "table's files must agree; name the files that do, or write the table as Delta, which records how its "
            "schema changes."
        )
    for column in expected:
        other = found.field(column.name).type
        if other != column.type:
            raise DataError(
                f"{path}: column {column.name!r} is {other}, but {column.type} in {first}. A Parquet table's files "
                "must agree; write them again with one type."
            )


def _conform(
    read: pa.Table, wanted: Sequence[str], schema: pa.Schema, file: DataFile, rows: int, index: int
) -> pa.Table:
    """What was read under the files' own names, with the columns as the table means them."""
    if read.schema == schema:
        return read.replace_schema_metadata()
    found = dict(zip(read.column_names, read.columns, strict=True))
    columns = [_column(found.get(own), field, file, rows, index) for own, field in zip(wanted, schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(column: pa.ChunkedArray | None, field: pa.Field, file: DataFile, rows: int, index: int) -> pa.ChunkedArray:
    """A column as the table means it: read, or a partition value, or nulls where an older file lacks it."""
    if column is not None:
        if column.type == field.type:
            return column
        try:
            return column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{file.path}, row group {index}: column {field.name!r} is {column.type} and does not become the "
                f"table's {field.type} ({error})."
            ) from error
    value = file.partition.get(field.name)
    if value is None:
        return pa.chunked_array([pa.nulls(rows, field.type)])
    scalar = pa.scalar(value).cast(field.type)
    return pa.chunked_array([pa.repeat(scalar, rows)])
