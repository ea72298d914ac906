"""Parquet files as a source: a file, a directory (hive partitions too), a glob, or the files of a Delta snapshot.

Opening reads the footer of each file, once and in parallel (`parquet_footer.py`). The digest of a plain Parquet table
is made of its footers and of the times at which its files were written; see docs/explanation/digests.md.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.remote.location import FoundFile, Location
from footplate.data.sources.base import RowGroup
from footplate.data.sources.parquet_footer import Footer, decoded_nbytes, is_part_of, read_footer
from footplate.data.sources.parquet_schema import DataFile, check_same, conform, hive_values, partition_type
from footplate.data.sources.pruning import bounded, bounds_help, known_value

_MOST_ROWS_PER_PIECE = 32
_PIECE_BYTES = 1024 * 1024
_STREAM_BYTES = 64 * 1024


class ParquetSource:
    """Row groups of Parquet files that share a schema.

    Args:
        uri: the table as the user named it.
        files: the files, in order.
        filesystem: the file system that they are on.
        kind: "parquet" or "delta".
        version: the number of a Delta version; None for plain Parquet.
        content: a hash of the content that the Delta log states; None for plain Parquet, whose files state it.
        schema: the table's schema if the table has its own; otherwise it is the first file's.
        renamed: the files' own name of a column, if it differs from the table's (column mapping).
    """

    in_memory = False
    peeks = True

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
        self._log_content = content
        self._schema = schema
        self._renamed = renamed or {}

    @functools.cached_property
    def _footers(self) -> list[Footer]:
        with ThreadPoolExecutor(16, "footplate-footers") as pool:
            return list(pool.map(lambda file: read_footer(self._filesystem, file.path), self._files))

    @functools.cached_property
    def _row_groups(self) -> list[tuple[int, int, int]]:
        """For each row group of the table: the number of its file, its number there, and its first row there."""
        row_groups = []
        for number, footer in enumerate(self._footers):
            first = 0
            for index in range(footer.metadata.num_row_groups):
                row_groups.append((number, index, first))
                first += footer.metadata.row_group(index).num_rows
        return row_groups

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_footers", None)
        state.pop("_row_groups", None)
        return state

    @property
    def version(self) -> int | str:
        """The Delta version; for plain Parquet, a hash of contents and times."""
        return hashed(self.content, self.written)[:16] if self._version is None else self._version

    @property
    def content(self) -> str:
        """Hash of the content: from the Delta log, or from the names, partition values, sizes and footers of the files."""
        return self._footers_content if self._log_content is None else self._log_content

    @functools.cached_property
    def _footers_content(self) -> str:
        files = zip(self._files, self._footers, strict=True)
        return hashed([(file.path.rpartition("/")[2], file.partition, footer.content) for file, footer in files])

    @property
    def written(self) -> str:
        """Hash of the times of plain Parquet files, or of the tags that an object store gives them."""
        return self._footers_written if self._log_content is None else ""

    @functools.cached_property
    def _footers_written(self) -> str:
        return hashed([str(footer.stamp) for footer in self._footers])

    @property
    def is_remote(self) -> bool:
        """True if the table is read over a network."""
        return self._filesystem.type_name != "local"

    @property
    def files(self) -> list[str]:
        """Paths of the files, in order."""
        return [file.path for file in self._files]

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The table's own schema, or the schema of its files, which must be the same."""
        if self._schema is not None:
            return self._schema
        first = self._footers[0].schema
        for file, footer in zip(self._files[1:], self._footers[1:], strict=True):
            check_same(first, footer.schema, self._files[0].path, file.path)
        schema = first.remove_metadata()
        for name in self._files[0].partition:
            if name not in schema.names:
                schema = schema.append(pa.field(name, partition_type([file.partition[name] for file in self._files])))
        return schema

    def typed(self, schema: pa.Schema) -> ParquetSource:
        """Return a source of the same files with another schema."""
        options = {"kind": self.kind, "version": self._version, "content": self._log_content, "renamed": self._renamed}
        typed = ParquetSource(self.uri, self._files, self._filesystem, schema=schema, **options)
        typed._footers = self._footers
        return typed

    def partition_values(self, column: str) -> set[Any]:
        """Return the values of a partition column; an empty set if it isn't one."""
        return {file.partition[column] for file in self._files if column in file.partition}

    def groups(self, columns: Sequence[str] | None = None) -> list[RowGroup]:
        """List all row groups of all files. `nbytes` counts `columns` only."""
        physical = None if columns is None else {self._renamed.get(name, name) for name in columns}
        row_groups = []
        for number, index, _ in self._row_groups:
            group = self._footers[number].metadata.row_group(index)
            nbytes = sum(
                decoded_nbytes(chunk)
                for chunk in map(group.column, range(group.num_columns))
                if physical is None or is_part_of(chunk.path_in_schema, physical)
            )
            row_groups.append(RowGroup(self._files[number].path, index, group.num_rows, nbytes))
        return row_groups

    def kept(self, group: int) -> np.ndarray | None:
        """Return the rows of a row group that the deletion vector keeps; None if the file has none."""
        number, index, first = self._row_groups[group]
        mask = self._files[number].kept
        if mask is None:
            return None
        rows = self._footers[number].metadata.row_group(index).num_rows
        if len(mask) != self._footers[number].metadata.num_rows:
            raise DataError(
                f"{self._files[number].path}: its deletion vector has {len(mask)} rows, the file has "
                f"{self._footers[number].metadata.num_rows}. Read another version of the table."
            )
        return np.flatnonzero(mask[first : first + rows])

    def nulls(self, column: str) -> int | None:
        """Return the null count of the footers; None if one doesn't state it, or if the nulls may be in deleted rows."""
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
        # Deleted rows count in the footers.
        has_deleted = any(file.kept is not None for file in self._files)
        return None if total and has_deleted else total

    def guarantee(self, group: int, columns: Sequence[str], filter: pc.Expression) -> pc.Expression | None:
        """Return the guarantee that the footer's statistics and the partition values give; None if they give none."""
        number, index, _ = self._row_groups[group]
        file, metadata = self._files[number], self._footers[number].metadata
        at = {metadata.schema.column(column).path: column for column in range(metadata.num_columns)}
        stored = set(self._footers[number].schema.names)
        guarantees = []
        for column in map(self.schema.field, columns):
            own = self._renamed.get(column.name, column.name)
            if own not in stored:
                guarantees.append(known_value(column, file.partition.get(column.name)))
            elif own in at and bounds_help(column, filter):
                chunk = metadata.row_group(index).column(at[own])
                guarantees.append(bounded(column, chunk, metadata.schema.column(at[own]).logical_type))
        stated = [expression for expression in guarantees if expression is not None]
        return functools.reduce(operator.and_, stated) if stated else None

    def peek(self, group: int, columns: Sequence[str], rows: int) -> pa.Table:
        """Read only the pages that hold a row group's first rows."""
        return next(iter(self._pieces(group, columns, rows)))

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read one row group with the table's names, types and partition columns."""
        return next(iter(self._pieces(group, columns, None)))

    def stream(self, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read one row group in pieces, page after page."""
        number, index, _ = self._row_groups[group]
        metadata = self._footers[number].metadata.row_group(index)
        row_bytes = 1 + metadata.total_byte_size // max(1, metadata.num_rows)
        return self._pieces(group, columns, max(1, min(_MOST_ROWS_PER_PIECE, _PIECE_BYTES // row_bytes)))

    def _pieces(self, group: int, columns: Sequence[str], rows: int | None) -> Iterator[pa.Table]:
        """Read a row group in pieces of `rows` rows, or in one piece if `rows` is None."""
        number, index, _ = self._row_groups[group]
        file, footer = self._files[number], self._footers[number]
        total = footer.metadata.row_group(index).num_rows
        present = set(footer.schema.names)
        wanted = [self._renamed.get(name, name) for name in columns]
        names = [name for name in wanted if name in present]
        schema = pa.schema([self.schema.field(name) for name in columns])

        # A Delta table never rewrites a file.
        is_delta = self.kind != "parquet"
        unchanged = contextlib.nullcontext if is_delta else partial(footer.stamp.unchanged, self._filesystem, file.path)

        try:
            with self._filesystem.open_input_file(file.path) as handle:
                buffered = _STREAM_BYTES if rows is not None and not self.is_remote else 0
                fetch_ahead = rows is None and self.is_remote
                parquet = pq.ParquetFile(
                    handle,
                    metadata=footer.metadata,
                    pre_buffer=fetch_ahead,
                    buffer_size=buffered,
                    coerce_int96_timestamp_unit="us",
                )

                # If no column is read, the columns are partition values or nulls, and one piece is enough.
                if rows is None or not names:
                    with unchanged():
                        read = parquet.read_row_group(index, names, use_threads=False)
                    yield conform(read, wanted, schema, file, total, index)
                    return
                batches = parquet.iter_batches(rows, [index], names, use_threads=False)
                while True:
                    with unchanged():
                        batch = next(batches, None)
                    if batch is None:
                        return
                    yield conform(pa.Table.from_batches([batch]), wanted, schema, file, batch.num_rows, index)
        except FileNotFoundError:
            raise DataError(
                f"{file.path}: this file of {self.uri} (version {self.version}) is gone: the table was vacuumed or "
                "rewritten while it was read. Keep old versions as long as a run needs them, or start a new run."
            ) from None
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{file.path}, row group {index}: can't be read ({error}). Check the file system, or write the file again."
            ) from error


def open_parquet(location: Location, files: Sequence[FoundFile]) -> ParquetSource | None:
    """Return a source of the Parquet files among some files; None if there is none. A single file may have no suffix."""
    parquet_files = [file for file in files if file.path.lower().endswith((".parquet", ".parq", ".pq"))]
    if len(files) == 1 and not parquet_files and "." not in files[0].relative:
        parquet_files = list(files)
    if not parquet_files:
        return None
    return ParquetSource(
        location.uri, [DataFile(file.path, hive_values(file.relative)) for file in parquet_files], location.filesystem
    )
