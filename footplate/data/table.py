"""A table: selected rows and columns of one source, pinned to one version.

    Table("lake/flowers")                                   # Delta: its newest version, pinned when it is opened
    Table("lake/flowers", version=12)                       # or "2024-05-01T12:00:00", or a datetime
    Table("data/*.parquet", columns=["image", "label"], filter=[("year", ">=", 2020)])
    Table("s3://bucket/photos")                             # Delta, Parquet, TFRecord or image files
    Table(dataframe)                                        # Arrow, pandas, polars, a dict of columns
    Table("lake/flowers").split({"train": 0.9, "val": 0.1})
    Table("lake/documents", columns=["text"]).map(tokenize, cache="/local/ssd")
    Table("lake/documents", columns=["tokens"]).pack(2048)  # sequences of 2,048 tokens

Rows are read when they are needed. Opening a table reads the Delta log and the files' footers. Counting the rows of a
filter reads the filter's columns.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from footplate.core.errors import ConfigError, DataError, did_you_mean
from footplate.core.hashing import hashed
from footplate.data.digest import Digest
from footplate.data.order.selection import Split, candidates, from_text, positions, to_expression, to_text
from footplate.data.remote.file_cache import FileCache
from footplate.data.remote.location import full_address
from footplate.data.sources.arrow import indices
from footplate.data.sources.base import RowGroup, Source
from footplate.data.sources.delta_versions import Version
from footplate.data.sources.group_scan import scan_groups
from footplate.data.sources.opening import open_source

if TYPE_CHECKING:
    from footplate.data.mapping.table import MappedTable
    from footplate.data.packing.table import PackedTable

# Row groups of a table on a network that are asked for at the same time.
_REQUESTS = 4


@dataclass(frozen=True)
class TableInfo:
    """Description of a table, as `footplate table PATH` shows it.

    Attributes:
        uri: the table as the user named it.
        kind: "delta", "parquet", "tfrecord", "imagefolder" or "memory".
        version: the Delta version; for any other source, a hash of its content.
        columns: names and types.
        num_rows: the number of selected rows.
        num_files: the number of files that hold them.
        num_row_groups: the number of row groups that hold them.
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


@dataclass(frozen=True)
class RowAddress:
    """The address of a row in its file. An image file holds one row.

    Attributes:
        file: the file, or a name in angle brackets for a table in memory.
        row_group: the number of its row group in the file.
        row: its number in the row group. Deleted rows, and rows that aren't selected, count too.
        row_in_file: its number in the file.
    """

    file: str
    row_group: int
    row: int
    row_in_file: int


class Table:
    """Rows of a Delta table, of files, or of a table in memory.

    Args:
        source: a path or URI of a Delta table, or of Parquet, TFRecord or image files (a file, a directory, a glob); or an
            Arrow table, a pandas, polars or Spark frame, or a dict of columns.
        version: the version of a Delta table: a number, or a time (a datetime, a date, or an ISO 8601 string; local time if
            it has no zone). By default the newest.
        columns: the columns to read; all by default.
        filter: the rows to select: an Arrow expression, or tuples such as `[("year", ">=", 2020)]`.
        cache: a local directory that keeps what is read over a network; see `footplate.data.remote.file_cache`.

    Raises:
        DataError: there is no table, or the version, a column or the filter doesn't fit it.

    Examples:
        >>> table = fp.Table("flowers.parquet", columns=["x", "label"], filter=[("label", ">=", 1)])
        >>> table.num_rows, table.columns
        (5, ['x', 'label'])
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Any,
        version: Version = None,
        columns: Sequence[str] | None = None,
        filter: Any = None,
        cache: FileCache | str | os.PathLike[str] | None = None,
    ) -> None:
        file_cache = FileCache(cache) if isinstance(cache, (str, os.PathLike)) else cache
        self._source = open_source(source, version, file_cache)
        self._filter = to_expression(filter, self._source.schema)
        self._splits: tuple[Split, ...] = ()
        self._columns = list(self._source.schema.names if columns is None else columns)
        for name in self._columns:
            self._check_column(name)

    @property
    def uri(self) -> str:
        """The table as the user named it."""
        return self._source.uri

    @property
    def kind(self) -> str:
        """One of "delta", "parquet", "tfrecord", "imagefolder" and "memory"."""
        return self._source.kind

    @property
    def version(self) -> int | str:
        """The Delta version; for any other source, a hash of its content."""
        return self._source.version

    @property
    def in_memory(self) -> bool:
        """True if the rows are in memory, so that reading costs nothing."""
        return self._source.in_memory

    @property
    def is_remote(self) -> bool:
        """True if the table is read over a network."""
        return self._source.is_remote

    @functools.cached_property
    def digest(self) -> Digest:
        """Digest of these rows, for caches, checkpoints and checks between ranks; see `footplate.data.digest`.

        For a table in memory, the first call reads all values.
        """
        source = self._source
        sizes = [group.num_rows for group in source.groups([])]
        pairs = zip(sizes, self._positions, strict=True)
        rows = hashed(sizes, [None if kept is None or len(kept) == n else kept for n, kept in pairs])
        number = source.version if isinstance(source.version, int) else None
        return Digest(source.kind, source.content, rows, source.written, source.uri, number)

    @property
    def fingerprint(self) -> str:
        """The digest in one word. It is equal only for the same rows of the same content."""
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
        """The number of selected rows. With a filter, this reads the filter's columns."""
        return int(self.group_rows.sum())

    @functools.cached_property
    def group_rows(self) -> np.ndarray:
        """The number of selected rows of each row group, (groups,) int64."""
        sizes = [group.num_rows for group in self._source.groups([])]
        pairs = zip(sizes, self._positions, strict=True)
        return np.array([n if rows is None else len(rows) for n, rows in pairs], dtype=np.int64)

    @functools.cached_property
    def row_groups(self) -> list[RowGroup]:
        """All row groups in order, with their numbers of selected rows (which may be 0)."""
        groups = self._source.groups(self._columns)
        return [replace(group, num_rows=int(n)) for group, n in zip(groups, self.group_rows, strict=True)]

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Table({self.uri!r}, version={self.version!r}, columns={self._columns})"

    def _repr_html_(self) -> str:
        from footplate.data.table_html import to_html

        return to_html(self)

    @property
    def counts_at_once(self) -> bool:
        """True if `num_rows` is known without reading values."""
        return "group_rows" in self.__dict__ or (self._filter is None and not self._splits)

    @property
    def peeks(self) -> bool:
        """True if `head` reads the first rows and almost nothing else."""
        if self.is_remote or not self.counts_at_once:
            return False
        # A row group of which rows are deleted or not selected is read as a whole.
        return self.in_memory or (self._source.peeks and all(rows is None for rows in self._positions))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("row_groups", "digest", "group_rows", "_positions", "_group_starts"):
            state.pop(name, None)
        return state

    def select(self, columns: Sequence[str]) -> Table:
        """Return a table of the same rows with other columns."""
        chosen = self._copy()
        chosen._columns = list(columns)
        for name in columns:
            self._check_column(name)
        return chosen

    def through(self, wrap: Callable[[Source, Table], Source]) -> Table:
        """Return a table of the same rows, read through another source.

        Args:
            wrap: makes the source from this table's source and this table. Its `kept` must leave out the rows that this
                table leaves out.
        """
        wrapped = object.__new__(Table)
        wrapped.__dict__.update(self.__getstate__())
        wrapped._source = wrap(self._source, self)
        wrapped._filter, wrapped._splits = None, ()
        return wrapped

    def split(self, shares: Mapping[str, float], key: str | None = None, seed: int = 0) -> dict[str, Table]:
        """Split the rows into disjoint tables. The shares are approximate, since every row is drawn independently.

        Args:
            shares: such as `{"train": 0.9, "val": 0.1}`; their sum is at most 1.
            key: rows with an equal value in this column stay together. By default a row is drawn by its address (file, row
                group, number). That is stable when files are added. After a rewrite, such as a compaction, only a key is.
            seed: another seed gives another split.

        Raises:
            ConfigError: shares that are not positive, or that exceed 1 in sum.
            DataError: an unknown key column.
        """
        if not shares or min(shares.values()) <= 0 or sum(shares.values()) > 1 + 1e-9:
            raise ConfigError(f"split={dict(shares)}: expected positive shares that sum to 1 at most.")
        if key is not None:
            self._check_column(key)
        bounds = [0.0, *np.cumsum(list(shares.values())).tolist()]
        parts = {}
        for name, low, high in zip(shares, bounds[:-1], bounds[1:], strict=True):
            part = self._copy()
            part._splits = (*self._splits, Split(key, seed, low, high if high < 1 - 1e-9 else 1.0))
            parts[name] = part
        return parts

    def map(
        self,
        function: Callable[[dict[str, list[Any]]], Mapping[str, Any]],
        cache: str | os.PathLike[str],
        *,
        version: str | None = None,
        num_workers: int = 1,
    ) -> MappedTable:
        """Return a table with columns that a function computes from the rows of this table, such as tokens of a text.

        The rows, their order and their addresses stay the same. The columns of the returned table are the computed ones;
        `select` takes the others too. The results are computed before this method returns, and kept. Later calls, and
        other processes of this machine, find them. See `footplate.data.mapping.table`.

        Args:
            function: takes a batch, a dict of the columns of this table as lists, and returns a dict of columns: lists,
                numpy arrays or Arrow arrays with one value for each row. A batch has at most 1,000 rows of one row group.
                The function must be a function of its rows. It is called in worker processes.
            cache: a local directory that keeps the results, compressed. It isn't emptied by itself.
            version: stands for the function's code and data. By default the code, and all that it reads, are hashed. If you
                give a version, only it and the function's name tell one function from another.
            num_workers: how many processes call the function. A tokenizer of Hugging Face needs one, since it has threads.

        Raises:
            ConfigError: an invalid argument, or a function that draws random numbers, reads files or the time, changes
                variables, or reads an object that can't be pickled, without a version.
            DataError: the function failed, its results don't fit the rows, or they can't be written.
        """
        from footplate.data.mapping.table import map_rows

        return map_rows(self, function, cache, version, num_workers)

    def pack(
        self,
        sequence_length: int,
        *,
        truncate: bool = False,
        padding_value: float | Mapping[str, float] = 0,
        cache: str | os.PathLike[str] | None = None,
    ) -> PackedTable:
        """Return a table whose rows are sequences of a fixed length, made of the documents of this table.

        Every row of this table is a document, and every column a list of numbers, such as tokens. See
        `footplate.data.packing.table`. Filter and split the documents first.

        Args:
            sequence_length: the number of tokens of a sequence.
            truncate: keep only the first `sequence_length` tokens of a document. Otherwise a longer document is cut into
                pieces, and no token is lost.
            padding_value: the value of places after the last document of a sequence. With several columns, one for each,
                such as `{"input_ids": 0, "labels": -100}`.
            cache: a local directory that keeps the number of sequences. Without it, the lengths of all documents are read
                before the first batch.

        Raises:
            ConfigError: an invalid argument.
            DataError: a column isn't a list of numbers.
        """
        from footplate.data.packing.table import pack

        return pack(self, sequence_length, truncate, padding_value, cache)

    def positions(self, group: int) -> np.ndarray | None:
        """Return the selected physical rows of a row group, ascending int64; None if all are selected."""
        return self._positions[group]

    def read_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the selected rows of a row group."""
        rows = self._source.read(group, self._columns if columns is None else columns)
        chosen = self._positions[group]
        return rows if chosen is None else rows.take(indices(chosen))

    def read_groups(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the selected rows of several row groups, one row group after another.

        Over a network, several are asked for at the same time, since a server takes longer to answer than to send. No more
        than these are in memory beside those that the caller keeps.
        """
        if not self.is_remote or len(groups) < 2:
            yield from (self.read_group(group, columns) for group in groups)
            return
        with ThreadPoolExecutor(min(_REQUESTS, len(groups)), "footplate-group") as pool:
            pending: deque[Future[pa.Table]] = deque()
            for group in groups:
                pending.append(pool.submit(self.read_group, group, columns))
                if len(pending) == _REQUESTS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def stream_group(self, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the selected rows of a row group, in pieces."""
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
        """Read the first `n` rows."""
        tables: list[pa.Table] = [pa.Table.from_batches([], self.schema)]
        missing = n
        for number, group in enumerate(self.row_groups):
            if missing <= 0:
                break
            if group.num_rows:
                # Only if every row is selected, the first physical rows are the first rows.
                is_whole = self._positions[number] is None
                rows = self._source.peek(number, self._columns, missing) if is_whole else self.read_group(number)
                tables.append(rows.slice(0, missing))
                missing -= tables[-1].num_rows
        return pa.concat_tables(tables)

    def nulls(self, column: str) -> int | None:
        """Return the number of nulls of a column in the selected rows; None if it isn't known without reading."""
        is_whole = self._filter is None and not self._splits
        known = self._source.nulls(column)
        return known if is_whole or known == 0 else None

    def selected_bytes(self) -> list[int]:
        """Estimate the size of the selected rows of each row group: its size, times the share of its selected rows."""
        groups = self._source.groups(self._columns)
        pairs = zip(groups, self.group_rows.tolist(), strict=True)
        return [group.nbytes * rows // max(1, group.num_rows) for group, rows in pairs]

    def where(self, group: int, row: int) -> str:
        """Describe a row for a message: its file, row group and number there. `row` counts selected rows."""
        row_group = self.row_groups[group]
        chosen = self._positions[group]
        return f"{row_group.file}, row group {row_group.index}, row {row if chosen is None else int(chosen[row])}"

    def addresses(self, rows: np.ndarray) -> list[RowAddress]:
        """Return the addresses of rows.

        Args:
            rows: (n, 2) int64, as `Epoch.rows` returns them: the row group, and the row among its selected rows.
        """
        groups = self._source.groups([])
        addresses = []
        for number, row in rows.tolist():
            group, chosen = groups[number], self._positions[number]
            physical = row if chosen is None else int(chosen[row])
            if self.kind == "imagefolder":
                addresses.append(RowAddress(self.files[group.index + physical], 0, 0, 0))
            else:
                addresses.append(RowAddress(group.file, group.index, physical, self._group_starts[number] + physical))
        return addresses

    def record(self) -> dict[str, Any]:
        """Return plain values with which `reopen` finds the same rows again."""
        splits = [[split.key, split.seed, split.low, split.high] for split in self._splits]
        return {
            "source": None if self.in_memory else full_address(self.uri),
            "filter": to_text(self._filter),
            "splits": splits,
            "digest": self.digest.state_dict(),
        }

    @classmethod
    def reopen(cls, record: dict[str, Any]) -> Table:
        """Open the table of a `record` at the same version, and select the same rows.

        Raises:
            DataError: the table was in memory; or it, or this version of it, is gone; or it has other rows now.
        """
        source, digest = record["source"], Digest.from_state(record["digest"])
        if source is None:
            raise DataError(f"{digest.uri}: this table was in memory, so it can't be opened again.")
        mapped = cls._reopen_mapped(record)
        try:
            if mapped is None:
                table = cls(source, version=digest.version)
                table._filter = from_text(record["filter"])
            else:
                table = mapped
            table._splits = tuple(Split(*split) for split in record["splits"])
            if "packing" in record:
                table = table.select(record["columns"]).pack(**record["packing"])
            table.check_rows(digest)
        except DataError as error:
            if digest.version is None:
                raise
            raise DataError(
                f"Version {digest.version} of {digest.uri}, which the run read, can't be opened. If the table was "
                f"vacuumed, the files of earlier versions are gone. {error}"
            ) from error
        return table

    @staticmethod
    def _reopen_mapped(record: dict[str, Any]) -> Table | None:
        """Return the table whose columns a function has computed; None if the record is of another table."""
        if "mapping" not in record:
            return None
        from footplate.data.mapping.table import reopen_mapped

        return reopen_mapped(record["mapping"])

    def check_rows(self, digest: Digest) -> None:
        """Raise if these are other rows than those of a digest.

        Raises:
            DataError: they are.
        """
        own = self.digest
        if (digest.kind, digest.content, digest.rows) != (own.kind, own.content, own.rows):
            raise DataError(
                f"{self.uri}: these are other rows than those of the run, which read {digest}; this is {own}. Only a Delta "
                "table keeps its earlier versions."
            )

    def describe(self, rows: int = 5) -> TableInfo:
        """Describe the table, as `footplate table PATH` does."""
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

        return list(scan_groups(chosen, range(len(groups)), self.is_remote))

    @functools.cached_property
    def _group_starts(self) -> list[int]:
        """The number of rows before each row group in its file."""
        starts: list[int] = []
        rows_of_file: dict[str, int] = {}
        for group in self._source.groups([]):
            starts.append(rows_of_file.get(group.file, 0))
            rows_of_file[group.file] = starts[-1] + group.num_rows
        return starts

    def _copy(self) -> Table:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__getstate__())
        return copy

    def _check_column(self, name: str) -> None:
        if name not in self._source.schema.names:
            raise DataError(f"{self.uri}: no column {name!r}. {did_you_mean(name, self._source.schema.names)}")
