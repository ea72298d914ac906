"""Petastorm's Spark converter: a Spark DataFrame, or any table, as PyTorch loaders.

`make_spark_converter` computes a DataFrame once, into Parquet files under the cache directory, and opens the files as a
table. The files are deleted by `converter.delete()` or when the process ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from footplate.compat.petastorm.arguments import check_settings, world_of
from footplate.compat.petastorm.loaders import BatchLoader
from footplate.compat.petastorm.readers import Reader, without_nested
from footplate.compat.petastorm.transforms import DTYPES, TransformSpec
from footplate.core.errors import ConfigError
from footplate.data.loader import Loader
from footplate.data.sources import spark
from footplate.data.table import Table

_DEFAULT_WORKERS = 2


class SparkDatasetConverter:
    """A table that makes loaders; see `make_spark_converter`.

    Args:
        table: its rows.
        dtype: the type of columns of floating-point numbers, "float32" or "float64"; None keeps their types.
        uri: the directory that `delete` removes; None for a table that wasn't computed here.

    Raises:
        ConfigError: another `dtype`.

    Examples:
        >>> from footplate.compat.petastorm import SparkDatasetConverter
        >>> converter = SparkDatasetConverter(fp.Table("flowers.parquet"))
        >>> len(converter), converter.cache_dir_url
        (8, '...flowers.parquet')
    """

    PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"

    def __init__(self, table: Table, dtype: str | None = "float32", uri: str | None = None) -> None:
        if dtype not in DTYPES:
            raise ConfigError(
                f"dtype {dtype} is not supported. Use 'float32' or 'float64', or None to keep the columns' types."
            )
        self.table = table = without_nested(table)
        self.dataset_size = table.num_rows
        self.file_urls = table.files
        self._dtype = dtype
        self._uri = uri

    def __len__(self) -> int:
        return self.dataset_size

    @property
    def cache_dir_url(self) -> str:
        """The directory that the DataFrame was computed into, or the table."""
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
        data_loader_fn: Callable[..., Any] | None = None,
        **petastorm_settings: Any,
    ) -> Any:
        """Make a loader, which is also a context manager. It gives batches: dicts of tensors (lists, for text).

        Args:
            batch_size: the number of rows of a batch of one shard.
            num_epochs: the number of passes over the rows; None has no end.
            workers_count: the number of threads of the transform.
            transform_spec: the transform of each batch's rows.
            cur_shard: the number of the shard, from 0; by default the rank of this process.
            shard_count: the number of shards.
            seed: of the order; 0 by default.
            shuffle_row_groups: False keeps the order of the table.
            data_loader_fn: makes the loader: it is called with `reader=` and `batch_size=`. `DataLoader` and
                `InMemBatchedDataLoader`, or a `functools.partial` of them, are such functions.
            **petastorm_settings: Petastorm's settings of its worker pools, queues and cache, which change no batch: they
                have no effect here. Others are refused by name.

        Raises:
            ConfigError: one of `cur_shard` and `shard_count` without the other, or a setting that would change batches.
        """
        check_settings("make_torch_dataloader", petastorm_settings)
        workers = workers_count or _DEFAULT_WORKERS
        loader = Loader(
            self.table,
            batch_size,
            shuffle=shuffle_row_groups,
            seed=seed or 0,
            world=world_of(cur_shard, shard_count),
            image_mode="bytes",
        )
        if data_loader_fn is None:
            return BatchLoader(loader, num_epochs, workers, transform_spec, self._dtype)

        reader = Reader(self.table, False, num_epochs, loader, transform_spec, dtype=self._dtype, workers=workers)
        custom_loader = data_loader_fn(reader=reader, batch_size=batch_size)
        return custom_loader if hasattr(custom_loader, "__enter__") else _stopping(reader, custom_loader)

    def delete(self) -> None:
        """Delete the files that the DataFrame was computed into."""
        if self._uri is not None:
            spark.forget(self._uri)


@contextlib.contextmanager
def _stopping(reader: Reader, loader: Any) -> Iterator[Any]:
    """A context of a loader that is no context manager itself: the reader is stopped at its end."""
    with reader:
        yield loader


def make_spark_converter(
    df: Any,
    parquet_row_group_size_bytes: int = spark.ROW_GROUP_BYTES,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Make a converter of a Spark DataFrame, which is computed once, or of anything else that `Table` opens.

    Args:
        df: the DataFrame, or a path, a table, a frame.
        parquet_row_group_size_bytes: the size of a row group of the computed table, before compression.
        compression_codec: of the computed table, such as "zstd" or "uncompressed"; None for Spark's own.
        dtype: the type of columns of floating-point numbers, "float32" or "float64"; None keeps their types.

    Raises:
        ConfigError: a size or a codec for data that isn't computed, or another `dtype`.

    Examples:
        >>> from footplate.compat.petastorm import make_spark_converter
        >>> converter = make_spark_converter("flowers.parquet")  # or a Spark DataFrame
        >>> with converter.make_torch_dataloader(batch_size=4, num_epochs=1) as loader:
        ...     [batch["x"].shape for batch in loader]
        [torch.Size([4, 4]), torch.Size([4, 4])]
    """
    options = (parquet_row_group_size_bytes, compression_codec)
    if options != (spark.ROW_GROUP_BYTES, None):
        if not spark.is_spark(df):
            raise ConfigError(
                "make_spark_converter(parquet_row_group_size_bytes=…, compression_codec=…) are for a Spark DataFrame: "
                "tables are read as they are."
            )
        uri = spark.computed_uri(df, *options)
        return SparkDatasetConverter(Table(uri), dtype, uri)
    if isinstance(df, Table):
        return SparkDatasetConverter(df, dtype)
    table = Table(df)
    return SparkDatasetConverter(table, dtype, table.uri if spark.is_spark(df) else None)


def register_delete_dir_handler(handler: Callable[[str], None] | None) -> None:
    """Let a function delete the directories of computed DataFrames, such as one of a file system of your own.

    Args:
        handler: takes the URL of a directory. None restores Footplate's own deletion.

    Examples:
        >>> from footplate.compat.petastorm import register_delete_dir_handler
        >>> register_delete_dir_handler(lambda url: print("delete", url))
        >>> register_delete_dir_handler(None)
    """
    spark.set_delete_directory(handler)


spark.add_cache_setting(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF)
