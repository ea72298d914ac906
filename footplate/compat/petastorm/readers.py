"""Petastorm's readers: rows, or batches of rows, of a table as named tuples of numpy values.

`make_batch_reader` gives batches of the values as they are stored. `make_reader` gives single rows; the rows of a table
that Petastorm's `materialize_dataset` wrote are decoded by its Unischema. A loader (loaders.py) reads the reader's table
itself, with the reader's settings; it doesn't consume the reader.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import warnings
from collections import namedtuple
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.compat.petastorm.arguments import check_epochs, check_order, check_settings, world_of
from footplate.compat.petastorm.loaders import BatchLoader
from footplate.compat.petastorm.metadata import read_unischema
from footplate.compat.petastorm.predicates import check_predicate
from footplate.compat.petastorm.source import encoded
from footplate.compat.petastorm.transforms import TransformSpec
from footplate.compat.petastorm.unischema import Unischema, UnischemaField
from footplate.core.errors import DataError
from footplate.data.loader import Loader
from footplate.data.table import Table

_ROWS_PER_BATCH = 1024


class Reader:
    """Gives a named tuple of numpy arrays for each batch of rows (or of values, for each row); a context manager.

    It is an iterator: `next`, another loop and other threads continue after the row that was given last. After the end, a
    loop begins again. After `stop`, or the end of a `with` statement, it gives nothing more.

    Args:
        table: the rows.
        rows: give single rows.
        num_epochs: the number of passes over the rows; None has no end.
        loader: reads the rows.
        spec: the transform; None for none.
        schema: the table's Unischema; None for columns as they are stored.
        dtype: the type of floating-point columns, "float32" or "float64"; None keeps their types.
        workers: the number of threads of the transform.

    Examples:
        >>> from footplate.compat.petastorm import make_reader
        >>> with make_reader("flowers.parquet", shuffle_row_groups=False) as reader:
        ...     row = next(reader)
        >>> row.x, int(row.label)
        (array([0., 0., 0., 0.], dtype=float32), 0)
    """

    def __init__(
        self,
        table: Table,
        rows: bool,
        num_epochs: int | None,
        loader: Loader,
        spec: TransformSpec | None,
        schema: Unischema | None = None,
        dtype: str | None = None,
        workers: int = 2,
    ) -> None:
        self.table, self.num_epochs, self.transform_spec, self.loader = table, num_epochs, spec, loader
        self.schema, self.dtype, self.workers = schema, dtype, workers
        self.stopped = False
        self._rows = rows
        # Two threads can't be in one generator at the same time.
        self._lock = threading.Lock()
        self._iterator, self._ended, self._moved = self._read(), False, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __iter__(self) -> Self:
        with self._lock:
            if self._ended:
                self._restart()
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self.stopped:
                raise RuntimeError("Trying to read a sample of a reader that has stopped. Make another reader.")
            self._moved = True
            try:
                return next(self._iterator)
            except StopIteration:
                self._ended = True
                raise

    def loader_of(self, batch_size: int) -> Loader:
        """A loader of this reader's rows in batches of another size, in the reader's order and shard."""
        own = self.loader
        return Loader(self.table, batch_size, shuffle=own.shuffle, seed=own.seed, world=own.world, image_mode="bytes")

    def reset(self) -> None:
        """Begin again from the first row.

        Raises:
            NotImplementedError: in the middle of the rows, as in Petastorm.
        """
        with self._lock:
            if self._moved and not self._ended:
                raise NotImplementedError("reset() before the end of the rows isn't supported. Make another reader.")
            self._restart()

    def stop(self) -> None:
        """Give no more rows, and end the threads that prepare them."""
        with self._lock:
            self.stopped = True
            self._iterator.close()

    def join(self) -> None:
        """Do nothing: `stop` has ended the threads."""

    def _restart(self) -> None:
        self._iterator, self._ended, self._moved = self._read(), False, False

    def _read(self) -> Generator[Any, None, None]:
        arguments = (self.loader, self.num_epochs, self.workers, self.transform_spec, self.dtype)
        if self.schema is not None:
            # The collate function `list` keeps decoded rows as they are.
            rows: Iterator[Any] = itertools.chain.from_iterable(BatchLoader(*arguments, self.schema, list))
            for row in rows:
                yield namedtuple("Row", row)(*row.values())
            return

        for batch in BatchLoader(*arguments):
            kind = namedtuple("Row" if self._rows else "Batch", batch)
            arrays = {name: _as_array(values) for name, values in batch.items()}
            if not self._rows:
                yield kind(**arrays)
                continue
            for row in zip(*arrays.values(), strict=True):
                yield kind(*row)


def make_batch_reader(
    dataset_url_or_urls: Any,
    schema_fields: Iterable[str | UnischemaField] | None = None,
    num_epochs: int | None = 1,
    shuffle_row_groups: bool = True,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    transform_spec: TransformSpec | None = None,
    seed: int | None = None,
    predicate: Any = None,
    filters: Any = None,
    **petastorm_settings: Any,
) -> Reader:
    """Make a reader of batches of rows of a table, of any kind that `Table` opens.

    Args:
        dataset_url_or_urls: path or URI.
        schema_fields: the columns to read: names, regular expressions that match whole names, fields of a Unischema.
        num_epochs: the number of passes over the rows; None has no end.
        shuffle_row_groups: False keeps the order of the table.
        cur_shard: the number of the shard, from 0.
        shard_count: the number of shards.
        transform_spec: the transform of the rows.
        seed: of the order.
        predicate: chooses rows by a function; see `footplate.compat.petastorm.predicates`.
        filters: chooses rows as pyarrow does: `[("year", ">=", 2020)]`. Rows are filtered exactly, not only by row group.
        **petastorm_settings: Petastorm's settings of its worker pools, queues and cache, which change no row: they have
            no effect here. Others are refused by name.

    Raises:
        DataError: several places, a place that is not a table, or a filter that doesn't fit the table.
        ConfigError: a setting that would change the rows.

    Examples:
        >>> from footplate.compat.petastorm import make_batch_reader
        >>> with make_batch_reader("flowers.parquet", schema_fields=["label"], filters=[("label", ">", 0)]) as reader:
        ...     [batch.label.shape for batch in reader]
        [(5,)]
    """
    return _reader(
        "make_batch_reader", dataset_url_or_urls, schema_fields, num_epochs, shuffle_row_groups, cur_shard, shard_count,
        transform_spec, seed, predicate, filters, petastorm_settings,
    )  # fmt: skip


def make_reader(
    dataset_url: Any,
    schema_fields: Iterable[str | UnischemaField] | None = None,
    num_epochs: int | None = 1,
    shuffle_row_groups: bool = True,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    transform_spec: TransformSpec | None = None,
    seed: int | None = None,
    predicate: Any = None,
    filters: Any = None,
    **petastorm_settings: Any,
) -> Reader:
    """Make a reader of single rows; its arguments are those of `make_batch_reader`.

    The values of a table that Petastorm's `materialize_dataset` wrote are decoded: they have the types and shapes of its
    Unischema. A `TransformSpec` then gets a dict of one row.

    Examples:
        >>> from footplate.compat.petastorm import make_reader
        >>> with make_reader("flowers.parquet", num_epochs=2) as reader:
        ...     sum(int(row.label) for row in reader)
        14
    """
    return _reader(
        "make_reader", dataset_url, schema_fields, num_epochs, shuffle_row_groups, cur_shard, shard_count,
        transform_spec, seed, predicate, filters, petastorm_settings,
    )  # fmt: skip


def _reader(
    function: str,
    url: Any,
    fields: Iterable[str | UnischemaField] | None,
    num_epochs: int | None,
    shuffle: bool,
    cur_shard: int | None,
    shard_count: int | None,
    spec: TransformSpec | None,
    seed: int | None,
    predicate: Any,
    filters: Any,
    settings: dict[str, Any],
) -> Reader:
    """Make the reader of a public function, which is named `function`, from the function's arguments in their order."""
    check_settings(function, check_order(function, shuffle, settings))
    rows = function == "make_reader"
    if isinstance(url, (list, tuple)):
        if len(url) != 1:
            raise DataError(f"{len(url)} places were given; a reader takes one: a directory or a glob of files.")
        url = url[0]

    schema = read_unischema(url) if rows and isinstance(url, (str, os.PathLike)) else None
    table = _table(url, fields, filters)
    if schema is not None or predicate is not None:
        check_predicate(predicate)
        table = encoded(table, schema, predicate)

    check_epochs(num_epochs)
    world = world_of(cur_shard, shard_count)
    size = max(1, min(_ROWS_PER_BATCH, table.num_rows // world.size))
    loader = Loader(table, size, shuffle=shuffle, seed=seed or 0, world=world, image_mode="bytes")
    return Reader(table, rows, num_epochs, loader, spec, schema)


def _table(url: Any, fields: Iterable[str | UnischemaField] | None, filters: Any) -> Table:
    """A table with the columns whose names match one of the regular expressions.

    Raises:
        DataError: no column matches.
    """
    table = without_nested(Table(url, filter=filters))
    if fields is None:
        return table
    patterns = [re.escape(field.name) if isinstance(field, UnischemaField) else field for field in fields]
    columns = [name for name in table.columns if any(re.fullmatch(pattern, name) for pattern in patterns)]
    if not columns:
        raise DataError(
            f"No fields matching the criteria schema_fields={patterns!r}: the columns are {', '.join(table.columns)}."
        )
    return table.select(columns)


def without_nested(table: Table) -> Table:
    """The table without columns of structs, maps and lists of lists, which Petastorm leaves out too; with a warning."""
    nested = [field.name for field in table.schema if _is_nested(field.type)]
    if not nested:
        return table
    warnings.warn(f"Columns of nested types are left out: {', '.join(nested)}.", stacklevel=4)
    return table.select([name for name in table.columns if name not in nested])


def _is_nested(kind: pa.DataType) -> bool:
    is_list = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return pt.is_nested(kind.value_type) if is_list else pt.is_nested(kind)


def _as_array(values: Any) -> np.ndarray:
    return values.numpy() if hasattr(values, "numpy") else np.array(values, dtype=object)
