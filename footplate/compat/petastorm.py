"""Petastorm's names, over Footplate's tables: existing code runs with its import line changed.

    from footplate.compat.petastorm import SparkDatasetConverter, TransformSpec, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///dbfs/tmp/cache")
    converter = make_spark_converter(df)
    with converter.make_torch_dataloader(batch_size=64, transform_spec=TransformSpec(f), num_epochs=1) as loader:
        for batch in loader:
            ...

What is the same: names, arguments, the context managers, transforms of pandas frames, float64 as float32, no end of
epochs by default. `make_reader` decodes the columns of a table that `materialize_dataset` wrote (petastorm_unischema.py),
and `predicate=` chooses rows (petastorm_predicates.py). What is better: every shard has the same number of batches and no
row is lost or repeated; the order depends on nothing but the seed; a Delta table is read by its log. What is not there:
n-grams and worker processes (threads are used, whatever the pool's type).
`filters=` is there; any other argument that would change rows or batches is refused by name. docs/petastorm.md lists the
differences.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import warnings
from collections import deque, namedtuple
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch

from footplate.compat.petastorm_metadata import read_unischema
from footplate.compat.petastorm_predicates import (
    PredicateBase,
    check_predicate,
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)
from footplate.compat.petastorm_rows import collate_rows, decimal_friendly_collate, kept_columns, transform_row
from footplate.compat.petastorm_source import decode_rows, encoded
from footplate.compat.petastorm_unischema import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
    Unischema,
    UnischemaField,
)
from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.core.optional import require
from footplate.data.loader import Loader
from footplate.data.sources.spark import ROW_GROUP_BYTES, computed_uri, forget, is_spark
from footplate.data.table import Table
from footplate.distributed.world import World

__all__ = [
    "BatchLoader", "BatchedDataLoader", "CompressedImageCodec", "CompressedNdarrayCodec", "DataLoader", "NdarrayCodec",
    "PredicateBase", "Reader", "ScalarCodec", "SparkDatasetConverter", "TransformSpec", "Unischema", "UnischemaField",
    "decimal_friendly_collate", "edit_field", "in_intersection", "in_lambda", "in_negate", "in_pseudorandom_split",
    "in_reduce", "in_set", "make_batch_reader", "make_reader", "make_spark_converter",
]  # fmt: skip

_ENDLESS_ROWS_PER_BATCH = 1024
_DTYPES = {None: None, "float32": torch.float32, "float64": torch.float64}

# Settings of Petastorm's worker pools, queues and caches: they change how rows are read, not which, nor their order's kind.
_WITHOUT_EFFECT = frozenset({
    "reader_pool_type", "workers_count", "results_queue_size", "pyarrow_serialize", "hdfs_driver", "cache_type",
    "cache_location", "cache_size_limit", "cache_row_size_estimate", "cache_extra_settings",
    "zmq_copy_buffers", "convert_early_to_numpy",
})  # fmt: skip
_CHOICES = {"reader_pool_type": ("thread", "process", "dummy"), "cache_type": ("null", "local-disk", None)}
# Settings that change rows or batches, and what to use instead.
_REFUSED = {
    "rowgroup_selector": "use filters=",
    "collate_fn": "it is for the rows of make_reader over a table with a Unischema; change the batch in the training loop",
    "transform_fn": "give a transform_spec to the reader",
    "ngram": "n-grams are not there",
    "inmemory_cache_all": "remove it: rows are read again in each epoch",
    "data_loader_fn": "remove it: there is one loader, which gives batches of tensors",
}


@dataclass(frozen=True)
class TransformSpec:
    """A function of a pandas frame of rows, and what it makes of the columns.

    Attributes:
        func: takes and returns a frame (a dict of one row, in `make_reader` over a table with a Unischema); None only drops
            and picks columns.
        edit_fields: `(name, numpy dtype, shape, nullable)` of columns that it makes or changes; see `edit_field`. Values
            are given that type, and a value of another shape is an error.
        removed_fields: columns that are left out afterwards.
        selected_fields: the only columns that remain, in this order.
    """

    func: Callable[[Any], Any] | None = None
    edit_fields: Sequence[tuple[Any, ...]] | None = None
    removed_fields: Sequence[str] | None = None
    selected_fields: Sequence[str] | None = None


def edit_field(name: str, numpy_dtype: Any, shape: tuple[int | None, ...], nullable: bool = False) -> tuple[Any, ...]:
    """A column for `TransformSpec(edit_fields=…)`."""
    return name, numpy_dtype, shape, nullable


class SparkDatasetConverter:
    """A table that makes loaders; see `make_spark_converter`.

    Args:
        table: its rows.
        dtype: "float32" or "float64" gives columns of floating-point numbers this type; None leaves them.
        uri: what `delete` removes; None when the table is not ours.

    Raises:
        ConfigError: another `dtype`.
    """

    PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"

    def __init__(self, table: Table, dtype: str | None = "float32", uri: str | None = None) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(
                f"dtype {dtype} is not supported. Use 'float32' or 'float64', or None to keep the columns' types."
            )
        self.table = table = _without_nested(table)
        self.dataset_size = table.num_rows
        self.file_urls = table.files
        self._dtype = dtype
        self._uri = uri

    def __len__(self) -> int:
        return self.dataset_size

    @property
    def cache_dir_url(self) -> str:
        """Where the rows lie: the directory that a DataFrame was computed into, or the table."""
        return self._uri or self.table.uri

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        transform_spec: TransformSpec | None = None,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        seed: int | None = None,
        shuffle_row_groups: bool = True,
        **petastorm_settings: Any,
    ) -> BatchLoader:
        """A context manager that gives batches: dicts of tensors (lists, for text).

        Args:
            batch_size: rows of a batch of one shard.
            num_epochs: how many times over the rows; None has no end.
            workers_count: threads of the transform.
            transform_spec: what to do with each batch's rows.
            cur_shard: which shard, from 0; by default this process's rank.
            shard_count: of how many.
            seed: of the order; 0 by default.
            shuffle_row_groups: False keeps the order of the table.
            **petastorm_settings: Petastorm's settings of its worker pools, queues and cache, which change no batch: they
                have no effect here. Others are refused by name.

        Raises:
            ConfigError: one of `cur_shard` and `shard_count` without the other, or a setting that would change batches.
        """
        _check_settings("make_torch_dataloader", petastorm_settings)
        loader = Loader(
            self.table,
            batch_size,
            shuffle=shuffle_row_groups,
            seed=seed or 0,
            world=_world(cur_shard, shard_count),
            image_mode="bytes",
        )
        return BatchLoader(loader, num_epochs, workers_count or 2, transform_spec, self._dtype)

    def delete(self) -> None:
        """Remove the files that the DataFrame was computed into."""
        if self._uri is not None:
            forget(self._uri)


class BatchLoader:
    """Iterates over batches for a number of epochs, or without end; also a context manager.

    With `num_epochs=1`, `set_epoch`, `state_dict` and `load_state_dict` are those of the `Loader` beneath, so the trainer
    resumes it exactly. With another `num_epochs`, a state also says which pass over the rows it is in, and resuming gives
    the rest of that pass and the passes after it.
    """

    def __init__(
        self,
        loader: Loader,
        num_epochs: int | None,
        workers: int,
        spec: TransformSpec | None,
        dtype: str | None,
        schema: Unischema | None = None,
        collate: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        _check_epochs(num_epochs)
        self._loader, self._num_epochs, self._workers = loader, num_epochs, workers
        self._spec, self._dtype = spec, dtype
        self._schema, self._collate = schema, collate or collate_rows
        self._state: dict[str, Any] | None = None
        self._passes = 0  # over the rows, that are done before the next iteration
        self._epoch = 0
        self._restored_epoch: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held between iterations."""

    def __len__(self) -> int:
        if self._num_epochs is None:
            raise TypeError("With num_epochs=None there is no end of batches, so there is no len(); pass num_epochs=1.")
        return len(self._loader) * self._num_epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        passes, self._passes = self._passes, 0
        while self._num_epochs is None or passes < self._num_epochs:
            yield from self._one_epoch(passes)
            passes += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin the epoch from its first batch, unless it is the one that was just restored.

        With `num_epochs=n`, its passes have the orders `epoch * n` and following; without end, `epoch` and following.
        """
        restored, self._restored_epoch = self._restored_epoch, None
        if self._num_epochs != 1 and restored == epoch:
            return
        self._state, self._passes, self._epoch = None, 0, epoch
        self._loader.set_epoch(epoch * (self._num_epochs or 1))

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`; `outer_epoch` and `pass` say where in the `num_epochs` the loader is."""
        return self._state or self._with_place(self._loader.state_dict(), self._passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Loader.load_state_dict`.

        Raises:
            CheckpointError: the state was made with another `num_epochs`, or is that of another loader.
        """
        made_with = state_dict.get("num_epochs", 1)
        if made_with != self._num_epochs:
            raise CheckpointError(
                f"The checkpoint was made with num_epochs={made_with}, not {self._num_epochs}, so its position means other "
                f"rows. Use num_epochs={made_with} to resume."
            )
        self._loader.load_state_dict(state_dict)
        self._state = None
        self._passes = state_dict.get("pass", 0)
        self._epoch = self._restored_epoch = state_dict.get("outer_epoch", state_dict["epoch"])
        if self._num_epochs != 1:  # a pass that had ended is not begun again, nor is the next one taken for it
            self._loader.set_epoch(state_dict["epoch"])

    def _with_place(self, state: dict[str, Any], passes: int) -> dict[str, Any]:
        if self._num_epochs == 1:
            return state
        return {**state, "num_epochs": self._num_epochs, "outer_epoch": self._epoch, "pass": passes}

    def _one_epoch(self, passes: int) -> Iterator[dict[str, Any]]:
        """Transform batches in threads, a few ahead, in order; the state follows what is handed out."""
        waiting: deque[tuple[Future[dict[str, Any]], dict[str, Any]]] = deque()
        ragged = self._loader.padded_columns
        with ThreadPoolExecutor(self._workers, "footplate-transform") as pool:
            for batch in self._loader:
                made = pool.submit(self._make, batch, ragged)
                waiting.append((made, self._with_place(self._loader.state_dict(), passes)))
                if len(waiting) > self._workers + 1:
                    yield self._hand_out(*waiting.popleft())
            while waiting:
                yield self._hand_out(*waiting.popleft())
        self._state = None

    def _make(self, batch: dict[str, Any], ragged: Sequence[str]) -> Any:
        if self._schema is None:
            return _apply(self._spec, self._dtype, batch, ragged)
        rows = decode_rows(self._schema, batch)
        return self._collate(rows if self._spec is None else [transform_row(self._spec, row) for row in rows])

    def _hand_out(self, made: Future[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
        result = made.result()
        self._state = state
        return result


def make_spark_converter(
    df: Any,
    parquet_row_group_size_bytes: int = ROW_GROUP_BYTES,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """A converter of a Spark DataFrame, which is computed once, or of anything else that `Table` takes.

    Args:
        df: the DataFrame, or a path, a table, a frame.
        parquet_row_group_size_bytes: the size of a row group of the computed table, before compression.
        compression_codec: of the computed table, such as "zstd" or "uncompressed"; None for Spark's own.
        dtype: "float32" or "float64" gives columns of floating-point numbers this type; None leaves them.

    Raises:
        ConfigError: a size or a codec for data that isn't computed, or another `dtype`.
    """
    given = (parquet_row_group_size_bytes, compression_codec)
    if given != (ROW_GROUP_BYTES, None):
        if not is_spark(df):
            raise ConfigError(
                "make_spark_converter(parquet_row_group_size_bytes=…, compression_codec=…) are for a Spark DataFrame: "
                "tables are read as they are."
            )
        uri = computed_uri(df, *given)
        return SparkDatasetConverter(Table(uri), dtype, uri)
    if isinstance(df, Table):
        return SparkDatasetConverter(df, dtype)
    table = Table(df)
    return SparkDatasetConverter(table, dtype, table.uri if is_spark(df) else None)


class Reader:
    """Gives a named tuple of numpy arrays for each batch of rows (or of values, for each row); a context manager.

    It is an iterator: `next` and another loop go on after the last batch, also in several threads. After the end, a loop
    begins again. After `stop`, or the end of a `with` statement, it gives nothing more.

    Args:
        table: the rows.
        rows: whether to give single rows.
        num_epochs: how many times over the rows; None has no end.
        loader: reads them.
        spec: what to do with them.
        schema: the table's Unischema; None for columns as they are stored.
    """

    def __init__(
        self,
        table: Table,
        rows: bool,
        num_epochs: int | None,
        loader: Loader,
        spec: TransformSpec | None,
        schema: Unischema | None = None,
    ) -> None:
        self.table, self.num_epochs, self.transform_spec, self.loader = table, num_epochs, spec, loader
        self.schema = schema
        self._rows = rows
        self._lock = threading.Lock()  # a generator can't be entered by two threads
        self._begun, self._ended, self._stopped = self._read(), False, False
        self._moved = False

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
            if self._stopped:
                raise RuntimeError("Trying to read a sample of a reader that has stopped. Make another reader.")
            self._moved = True
            try:
                return next(self._begun)
            except StopIteration:
                self._ended = True
                raise

    def reset(self) -> None:
        """Begin again from the first row.

        Raises:
            NotImplementedError: in the middle of the rows, as in Petastorm.
        """
        with self._lock:
            if self._moved and not self._ended:
                raise NotImplementedError("reset() before the end of the rows isn't there. Make another reader.")
            self._restart()

    def stop(self) -> None:
        """Give no more rows, and end the threads that prepare them."""
        with self._lock:
            self._stopped = True
            self._begun.close()

    def join(self) -> None:
        """Nothing is left to wait for after `stop`."""

    def _restart(self) -> None:
        self._begun, self._ended, self._moved = self._read(), False, False

    def _read(self) -> Generator[Any, None, None]:
        if self.schema is not None:
            batches = BatchLoader(self.loader, self.num_epochs, 2, self.transform_spec, None, self.schema, list)
            rows: Iterator[Any] = itertools.chain.from_iterable(batches)
            for row in rows:
                yield namedtuple("Row", row)(*row.values())
            return
        for batch in BatchLoader(self.loader, self.num_epochs, 2, self.transform_spec, None):
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
    """A reader of batches of rows of a table (`Table` says of which kinds).

    Args:
        dataset_url_or_urls: path or URI.
        schema_fields: the columns to read: names, regular expressions that match whole names, fields of a Unischema.
        num_epochs: how many times over the rows; None has no end.
        shuffle_row_groups: False keeps the order of the table.
        cur_shard: which shard, from 0.
        shard_count: of how many.
        transform_spec: what to do with the rows.
        seed: of the order.
        predicate: which rows, by a function; see `footplate.compat.petastorm_predicates`.
        filters: which rows, as for pyarrow: `[("year", ">=", 2020)]`. Rows are filtered exactly, not only by row group.
        **petastorm_settings: Petastorm's settings of its worker pools, queues and cache, which change no row: they have
            no effect here. Others are refused by name.

    Raises:
        DataError: several places, or nothing that is a table, or a filter that doesn't fit it.
        ConfigError: a setting that would change the rows.
    """
    settings = _check_order("make_batch_reader", shuffle_row_groups, petastorm_settings)
    _check_settings("make_batch_reader", settings)
    return _reader(
        dataset_url_or_urls, False, schema_fields, num_epochs, shuffle_row_groups, cur_shard, shard_count,
        transform_spec, seed, filters, predicate,
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
    """As `make_batch_reader`, but gives single rows.

    The values of a table that Petastorm's `materialize_dataset` wrote are decoded: they have the types and shapes of its
    Unischema. A `TransformSpec` is then given a dict of one row.
    """
    settings = _check_order("make_reader", shuffle_row_groups, petastorm_settings)
    _check_settings("make_reader", settings)
    return _reader(
        dataset_url, True, schema_fields, num_epochs, shuffle_row_groups, cur_shard, shard_count, transform_spec, seed,
        filters, predicate,
    )  # fmt: skip


class DataLoader(BatchLoader):
    """Petastorm's loader over a reader.

    Args:
        reader: what `make_reader` or `make_batch_reader` gave.
        batch_size: rows of a batch.
        collate_fn: makes a batch of a list of rows, each a dict, for a reader of a table with a Unischema. It is refused
            for other readers, whose batches are dicts of tensors.
        transform_fn: refused: use the reader's `transform_spec`.
        shuffling_queue_capacity: how many rows Petastorm mixes with each other. Any number above 0 is what the reader does
            already, which mixes all rows.
        **petastorm_settings: Petastorm's other settings of its shuffling queue, which have no effect.

    Raises:
        ConfigError: a setting that would change the batches; rows are to be mixed of a reader that keeps their order.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        collate_fn: Any = None,
        transform_fn: Any = None,
        shuffling_queue_capacity: int = 0,
        **petastorm_settings: Any,
    ) -> None:
        if shuffling_queue_capacity and not reader.loader.shuffle:
            raise ConfigError(
                f"DataLoader(shuffling_queue_capacity={shuffling_queue_capacity!r}) of a reader with "
                "shuffle_row_groups=False is not supported: rows are mixed over the whole table, or not at all. Make the "
                "reader with shuffle_row_groups=True."
            )
        refused = {"transform_fn": transform_fn, "collate_fn": None if reader.schema else collate_fn}
        _check_settings("DataLoader", {**refused, **petastorm_settings})
        own = reader.loader
        loader = Loader(
            reader.table, batch_size, shuffle=own.shuffle, seed=own.seed, world=own.world, image_mode="bytes"
        )
        super().__init__(loader, reader.num_epochs, 2, reader.transform_spec, None, reader.schema, collate_fn)


BatchedDataLoader = DataLoader


def _reader(
    url: Any,
    rows: bool,
    fields: Iterable[str | UnischemaField] | None,
    num_epochs: int | None,
    shuffle: bool,
    cur_shard: int | None,
    shard_count: int | None,
    spec: TransformSpec | None,
    seed: int | None,
    filters: Any,
    predicate: Any,
) -> Reader:
    if isinstance(url, (list, tuple)):
        if len(url) != 1:
            raise DataError(f"{len(url)} places were given; a reader takes one: a directory or a glob of files.")
        url = url[0]
    schema = read_unischema(url) if rows and isinstance(url, (str, os.PathLike)) else None
    table = _table(url, fields, filters)
    if schema is not None or predicate is not None:
        check_predicate(predicate)
        table = encoded(table, schema, predicate)
    _check_epochs(num_epochs)
    world = _world(cur_shard, shard_count)
    size = max(1, min(_ENDLESS_ROWS_PER_BATCH, table.num_rows // world.size))
    loader = Loader(table, size, shuffle=shuffle, seed=seed or 0, world=world, image_mode="bytes")
    return Reader(table, rows, num_epochs, loader, spec, schema)


def _table(url: Any, fields: Iterable[str | UnischemaField] | None, filters: Any) -> Table:
    """A table with the columns whose names match one of the regular expressions.

    Raises:
        DataError: none matches.
    """
    table = _without_nested(Table(url, filter=filters))
    if fields is None:
        return table
    patterns = [re.escape(field.name) if isinstance(field, UnischemaField) else field for field in fields]
    columns = [name for name in table.columns if any(re.fullmatch(pattern, name) for pattern in patterns)]
    if not columns:
        raise DataError(
            f"No fields matching the criteria schema_fields={patterns!r}: the columns are {', '.join(table.columns)}."
        )
    return table.select(columns)


def _without_nested(table: Table) -> Table:
    """The table without its columns of structs, maps and lists of lists, which Petastorm leaves out too; warns of them."""
    nested = [field.name for field in table.schema if _is_nested(field.type)]
    if not nested:
        return table
    warnings.warn(f"Columns of nested types are left out: {', '.join(nested)}.", stacklevel=4)
    return table.select([name for name in table.columns if name not in nested])


def _is_nested(kind: pa.DataType) -> bool:
    is_list = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    return pt.is_nested(kind.value_type) if is_list else pt.is_nested(kind)


def _check_order(function: str, shuffle_row_groups: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that mix rows: `shuffle_row_groups` mixes all rows here.

    Raises:
        ConfigError: rows are to be mixed, and row groups are to keep their order.
    """
    rows, partitions = settings.pop("shuffle_rows", False), settings.pop("shuffle_row_drop_partitions", 1)
    if (rows or partitions not in (None, 1)) and not shuffle_row_groups:
        name = f"shuffle_rows={rows!r}" if rows else f"shuffle_row_drop_partitions={partitions!r}"
        raise ConfigError(
            f"{function}({name}, shuffle_row_groups=False) is not supported: rows are mixed over the whole table, or not "
            "at all. Use shuffle_row_groups=True."
        )
    return settings


def _check_settings(function: str, settings: dict[str, Any]) -> None:
    """Refuse what would change rows or batches; Petastorm's default, None or False, is no wish."""
    for name, value in settings.items():
        if value not in _CHOICES.get(name, (value,)):
            raise ConfigError(f"Unknown {name}: {value!r}. Petastorm has {', '.join(map(str, _CHOICES[name]))}.")
        if name in _WITHOUT_EFFECT or (name in _REFUSED and (value is None or value is False)):
            continue
        advice = _REFUSED.get(name, "remove it: Petastorm's readers and loaders here have no such argument")
        raise ConfigError(f"{function}({name}={value!r}) is not supported: {advice}.")


def _world(cur_shard: int | None, shard_count: int | None) -> World:
    if (cur_shard is None) != (shard_count is None):
        raise ConfigError(f"cur_shard={cur_shard}, shard_count={shard_count}: give both or neither.")
    if cur_shard is None or shard_count is None:
        return World.present()
    if not (_is_integer(cur_shard) and _is_integer(shard_count) and 0 <= cur_shard < shard_count):
        raise ConfigError(
            f"cur_shard={cur_shard!r}, shard_count={shard_count!r}: expected integers, with cur_shard from 0 to "
            "shard_count - 1."
        )
    return World(int(cur_shard), int(shard_count))


def _check_epochs(num_epochs: Any) -> None:
    if num_epochs is not None and not (_is_integer(num_epochs) and num_epochs > 0):
        raise ConfigError(f"num_epochs={num_epochs!r}: expected a number from 1, or None for no end.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _apply(
    spec: TransformSpec | None, dtype: str | None, batch: dict[str, Any], ragged: Sequence[str]
) -> dict[str, Any]:
    if spec is not None:
        batch = _transform(spec, batch, ragged)
    wanted = _DTYPES[dtype]
    if wanted is None:
        return batch
    converted = (torch.float32, torch.float64)
    return {
        name: values.to(wanted) if isinstance(values, torch.Tensor) and values.dtype in converted else values
        for name, values in batch.items()
    }


def _transform(spec: TransformSpec, batch: dict[str, Any], ragged: Sequence[str]) -> dict[str, Any]:
    """A batch through the user's function of a pandas frame."""
    pandas = require("pandas", "petastorm", "TransformSpec")
    lengths = {name: f"{name}_length" for name in ragged}
    shown = [name for name in batch if name not in lengths.values()]
    frame = pandas.DataFrame({name: _column(batch[name], batch.get(lengths.get(name, ""))) for name in shown})
    if spec.func is not None:
        frame = spec.func(frame)
    kept = kept_columns(spec, frame.columns)
    edited = {field[0]: field for field in spec.edit_fields or ()}
    return {str(name): _tensor(frame[name].tolist(), edited.get(name)) for name in kept}


def _column(values: Any, lengths: torch.Tensor | None) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    if lengths is not None:
        return [row[:length].numpy() for row, length in zip(values, lengths.tolist(), strict=True)]
    return values.numpy() if values.ndim == 1 else list(values.numpy())


def _tensor(values: list[Any], field: tuple[Any, ...] | None) -> Any:
    """A column of a frame as a tensor, of the type and shape that `edit_fields` states; text stays a list."""
    if not values or isinstance(values[0], (str, bytes)) or values[0] is None:
        return values
    array = np.stack([np.asarray(value) for value in values])
    if field is not None:
        array = array.astype(field[1], copy=False)
        shape = tuple(size if size is not None else -1 for size in field[2] or ())
        array = array.reshape(len(values), *shape)
    return torch.from_numpy(np.ascontiguousarray(array))


def _as_array(values: Any) -> np.ndarray:
    return values.numpy() if isinstance(values, torch.Tensor) else np.array(values, dtype=object)
