"""A table: which rows are meant, pinned to one version of one source.

    Table("lake/flowers")                                   # Delta: its newest version, pinned from here on
    Table("lake/flowers", version=12)                       # or "2024-05-01T12:00:00", or a datetime
    Table("data/*.parquet", columns=["image", "label"], filter=[("year", ">=", 2020)])
    Table("s3://bucket/photos")                             # or gs://; Delta, Parquet, TFRecord or image files
    Table(dataframe)                                        # Arrow, pandas, polars, a dict of columns
    Table("lake/flowers").split({"train": 0.9, "val": 0.1})

Nothing of the rows is read before it is needed; the log, the files' footers and, with a filter, the filter's columns
are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from footplate.core.errors import ConfigError, DataError, did_you_mean
from footplate.core.hashing import hashed
from footplate.data.digest import Digest
from footplate.data.order.selection import Split, candidates, positions, to_expression
from footplate.data.remote.file_cache import FileCache
from footplate.data.sources.arrow import indices
from footplate.data.sources.base import RowGroup, Source
from footplate.data.sources.delta_versions import Version
from footplate.data.sources.opening import open_source


@dataclass(frozen=True)
class TableInfo:
    """What `footplate table PATH` shows.

    Attributes:
        uri: the table as it was named.
        kind: "delta", "parquet", "tfrecord", "imagefolder" or "memory".
        version: the Delta version, or its content in one word.
        columns: names and types.
        num_rows: rows that the table means.
        num_files: files that hold them.
        num_row_groups: row groups that hold them.
        nbytes: size in memory of its columns, uncompressed.
        sample: its first rows.
    """

    uri: str
    kind: str
    version: int | str
    columns: dict[str, str]
    num_rows: int
    num_files: int
    num_row_groups: int
    nbytes: int
    sample: list[dict[str, Any]]


class Table:
    """Rows of a Delta table, of files, or of a table in memory.

    Args:
        source: a path or URI (a Delta table; Parquet, TFRecord or image files: one, a directory, a glob), or an Arrow
            table, a pandas, polars or Spark frame, or a dict of columns.
        version: of a Delta table: a number, or a moment (a datetime, a date, or an ISO 8601 string; without a zone, in
            local time). Default: the newest.
        columns: the columns to read; all by default.
        filter: which rows: an Arrow expression, or tuples such as `[("year", ">=", 2020)]`.
        cache: a local directory that keeps what is read over a network; see `footplate.data.remote.file_cache`.

    Raises:
        DataError: nothing is there, it is no table, or the version, a column or the filter doesn't fit it.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Any,
        version: Version = None,
        columns: Sequence[str] | None = None,
        filter: Any = None,
        cache: FileCache | str | os.PathLike[str] | None = None,
    ) -> None:
        kept = FileCache(cache) if isinstance(cache, (str, os.PathLike)) else cache
        self._source = open_source(source, version, kept)
        self._filter = to_expression(filter, self._source.schema)
        self._splits: tuple[Split, ...] = ()
        self._columns = list(self._source.schema.names if columns is None else columns)
        for name in self._columns:
            self._check_column(name)

    @property
    def uri(self) -> str:
        """The table as it was named."""
        return self._source.uri

    @property
    def kind(self) -> str:
        """One of "delta", "parquet", "tfrecord", "imagefolder" and "memory"."""
        return self._source.kind

    @property
    def version(self) -> int | str:
        """The Delta version; of any other source, its content in one word."""
        return self._source.version

    @property
    def in_memory(self) -> bool:
        """Whether reading costs nothing."""
        return self._source.in_memory

    @property
    def is_remote(self) -> bool:
        """Whether it is read over a network."""
        return self._source.is_remote

    @functools.cached_property
    def digest(self) -> Digest:
        """What these rows are known by, for caches, checkpoints and checks between ranks; see `footplate.data.digest`.

        Of a table in memory, the first call reads all values.
        """
        source = self._source
        sizes = [group.num_rows for group in source.groups([])]
        chosen = zip(sizes, self._positions, strict=True)
        rows = hashed(sizes, [None if places is None or len(places) == n else places for n, places in chosen])
        number = source.version if isinstance(source.version, int) else None
        return Digest(source.kind, source.content, rows, source.written, source.uri, number)

    @property
    def fingerprint(self) -> str:
        """The digest in one word: equal only for the same rows of the same content."""
        return self.digest.key

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return list(self._columns)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns that are read."""
        return pa.schema([self._source.schema.field(name) for name in self._columns])

    @property
    def files(self) -> list[str]:
        """The files that hold the rows."""
        return list(self._source.files)

    @property
    def num_rows(self) -> int:
        """How many rows are meant; with a filter, its columns are read for this."""
        return int(self._counts.sum())

    @functools.cached_property
    def row_groups(self) -> list[RowGroup]:
        """The row groups in order, with the rows that are meant (none is left out, some may have no rows)."""
        groups = self._source.groups(self._columns)
        return [replace(group, num_rows=int(n)) for group, n in zip(groups, self._counts, strict=True)]

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Table({self.uri!r}, version={self.version!r}, columns={self._columns})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("row_groups", "digest", "_positions", "_counts"):
            state.pop(name, None)
        return state

    def select(self, columns: Sequence[str]) -> Table:
        """The same rows with other columns."""
        chosen = self._copy()
        chosen._columns = list(columns)
        for name in columns:
            self._check_column(name)
        return chosen

    def through(self, wrap: Callable[[Source, Table], Source]) -> Table:
        """The same rows, read through another source.

        Args:
            wrap: makes it of this table's source and this table. Its `kept` has to leave out what this table leaves out.
        """
        wrapped = self._copy()
        wrapped._source = wrap(self._source, self)
        wrapped._filter, wrapped._splits = None, ()
        return wrapped

    def split(self, shares: Mapping[str, float], key: str | None = None, seed: int = 0) -> dict[str, Table]:
        """Tables of disjoint rows, in these shares (approximately: every row is drawn by itself).

        Args:
            shares: such as `{"train": 0.9, "val": 0.1}`; at most 1 in sum.
            key: rows of equal value in this column stay together. By default a row is drawn by its place (file, row
                group, number), which is stable as files are added; after a rewrite (compaction, say) only a key is.
            seed: another seed gives another split.

        Raises:
            ConfigError: shares that are not positive or exceed 1.
            DataError: an unknown key column.
        """
        if not shares or min(shares.values()) <= 0 or sum(shares.values()) > 1 + 1e-9:
            raise ConfigError(f"split={dict(shares)}: expected positive shares that sum to 1 at most.")
        if key is not None:
            self._check_column(key)
        bounds = [0.0, *np.cumsum(list(shares.values())).tolist()]
        found = {}
        for name, low, high in zip(shares, bounds[:-1], bounds[1:], strict=True):
            part = self._copy()
            part._splits = (*self._splits, Split(key, seed, low, high if high < 1 - 1e-9 else 1.0))
            found[name] = part
        return found

    def positions(self, group: int) -> np.ndarray | None:
        """The physical rows of a row group that are meant, ascending int64; None when all are."""
        return self._positions[group]

    def read_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a row group that are meant."""
        read = self._source.read(group, self._columns if columns is None else columns)
        chosen = self._positions[group]
        return read if chosen is None else read.take(indices(chosen))

    def stream_group(self, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows of a row group that are meant, in pieces one after the other."""
        chosen, first = self._positions[group], 0
        for piece in self._source.stream(group, self._columns if columns is None else columns):
            if chosen is None:
                yield piece
                continue
            low, high = np.searchsorted(chosen, [first, first + piece.num_rows])
            if high > low:
                yield piece.take(indices(chosen[low:high] - first))
            first += piece.num_rows

    def head(self, n: int = 5) -> pa.Table:
        """The first `n` rows."""
        found: list[pa.Table] = [pa.Table.from_batches([], self.schema)]
        missing = n
        for number, group in enumerate(self.row_groups):
            if missing <= 0:
                break
            if group.num_rows:
                whole = self._positions[number] is None
                read = self._source.peek(number, self._columns, missing) if whole else self.read_group(number)
                found.append(read.slice(0, missing))
                missing -= found[-1].num_rows
        return pa.concat_tables(found)

    def nulls(self, column: str) -> int | None:
        """Nulls of a column over the rows meant, where that is known without reading it."""
        whole = self._filter is None and not self._splits
        known = self._source.nulls(column)
        return known if whole or known == 0 else None

    def where(self, group: int, row: int) -> str:
        """Names a row for a message: its file, row group and number there (of the rows meant: `row`)."""
        place = self.row_groups[group]
        chosen = self._positions[group]
        return f"{place.file}, row group {place.index}, row {row if chosen is None else int(chosen[row])}"

    def describe(self, rows: int = 5) -> TableInfo:
        """What `footplate table PATH` shows."""
        return TableInfo(
            uri=self.uri,
            kind=self.kind,
            version=self.version,
            columns={field.name: str(field.type) for field in self.schema},
            num_rows=self.num_rows,
            num_files=len(self.files),
            num_row_groups=len(self.row_groups),
            nbytes=sum(group.nbytes for group in self.row_groups),
            sample=self.head(rows).to_pylist(),
        )

    @functools.cached_property
    def _positions(self) -> list[np.ndarray | None]:
        groups = self._source.groups([])
        possible = candidates(self._source, len(groups), self._filter)

        def chosen(number: int) -> np.ndarray | None:
            if not possible[number]:
                return np.zeros(0, np.int64)
            return positions(self._source, number, groups[number], self._filter, self._splits)

        with ThreadPoolExecutor(4, "footplate-select") as pool:
            return list(pool.map(chosen, range(len(groups))))

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        """Rows meant of each row group, (groups,) int64."""
        sizes = [group.num_rows for group in self._source.groups([])]
        chosen = zip(sizes, self._positions, strict=True)
        return np.array([n if rows is None else len(rows) for n, rows in chosen], dtype=np.int64)

    def _copy(self) -> Table:
        copy = object.__new__(Table)
        copy.__dict__.update(self.__getstate__())
        return copy

    def _check_column(self, name: str) -> None:
        if name not in self._source.schema.names:
            raise DataError(f"{self.uri}: no column {name!r}. {did_you_mean(name, self._source.schema.names)}")
