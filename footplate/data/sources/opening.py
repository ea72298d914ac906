"""Opening a source: Delta if there is a log, otherwise by the kind of the files. Frames and dicts are in memory."""

from __future__ import annotations

import os
from typing import Any

import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.data.remote.file_cache import FileCache
from footplate.data.remote.location import Location, exists, find_files, full_address, locate
from footplate.data.sources.base import Source
from footplate.data.sources.delta import open_delta
from footplate.data.sources.delta_versions import pinned_version
from footplate.data.sources.imagefolder import open_image_folder
from footplate.data.sources.memory import open_memory
from footplate.data.sources.parquet import open_parquet
from footplate.data.sources.spark import is_spark, open_spark
from footplate.data.sources.tfrecord import open_tfrecord


def open_source(data: Any, version: Any, cache: FileCache | None = None) -> Source:
    """Open the source of a path, a URI, a frame or a table in memory.

    Args:
        data: the argument `source` of `Table`.
        version: the version of a Delta table.
        cache: keeps what is read of remote files.

    Raises:
        DataError: there is no table.
    """
    if not isinstance(data, (str, os.PathLike)):
        source = open_spark(data) if is_spark(data) else open_memory(data)
        if source is None:
            raise DataError(
                f"Table({type(data).__name__}): expected a path or URI, an Arrow table, a pandas, polars or Spark "
                "frame, or a dict of columns."
            )
        return _without_version(source, version)

    location = locate(data, cache=cache)
    if exists(location, f"{location.path.rstrip('/')}/_delta_log") == pafs.FileType.Directory:
        if location.delta_uri is None:
            raise DataError(
                f"{location.uri}: this is a Delta table, and Delta tables at hf:// can't be read. Copy it to a disk or an "
                "object store, or publish its rows as Parquet files."
            )
        version = pinned_version(full_address(location.uri)) if version is None else version
        return open_delta(
            location.uri, location.delta_uri, location.filesystem, location.path, version, location.options
        )

    _refuse_inside_delta(location)
    files = find_files(location)
    for opener in (open_parquet, open_tfrecord, open_image_folder):
        source = opener(location, files)
        if source is not None:
            return _without_version(source, version)
    raise _nothing_at(location)


def _without_version(source: Source, version: Any) -> Source:
    if version is not None:
        raise DataError(
            f"{source.uri}: version={version!r}, but only Delta tables have versions; this is {source.kind}."
        )
    return source


def _refuse_inside_delta(location: Location) -> None:
    """Raise if the files belong to a Delta table: without its log, they would bring back deleted rows."""
    parts = location.path.split("/")
    for end in range(2, len(parts)):
        table = "/".join(parts[:end])
        if exists(location, f"{table}/_delta_log") == pafs.FileType.Directory:
            raise DataError(
                f"{location.uri}: this is inside of the Delta table {table}, whose log says which rows are live. Open "
                f'Table("{table}"), with filter= for a partition.'
            )


def _nothing_at(location: Location) -> DataError:
    if any(mark in location.path for mark in "*?["):
        return DataError(f"{location.uri}: no file matches this pattern. Check the path.")
    if exists(location, location.path) == pafs.FileType.NotFound:
        return DataError(
            f"{location.uri}: there is nothing at this path. Expected a Delta table, or Parquet, TFRecord or image files."
        )
    return DataError(
        f"{location.uri}: neither a Delta table (it has no _delta_log) nor a directory with Parquet, TFRecord or image "
        "files. "
        "Check the path."
    )
