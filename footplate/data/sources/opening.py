"""From what a user names to a source: Delta where there is a log, else by the files that there are, else from memory."""

from __future__ import annotations

import os
from typing import Any

import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.data.remote.file_cache import FileCache
from footplate.data.remote.location import Location, exists, find_files, locate
from footplate.data.sources.base import Source
from footplate.data.sources.delta import open_delta
from footplate.data.sources.imagefolder import open_image_folder
from footplate.data.sources.memory import open_memory
from footplate.data.sources.parquet import open_parquet
from footplate.data.sources.spark import is_spark, open_spark
from footplate.data.sources.tfrecord import open_tfrecord


def open_source(data: Any, version: Any, cache: FileCache | None = None) -> Source:
    """The source that a path, a URI or a frame stands for.

    Args:
        data: what `Table` was given.
        version: of a Delta table.
        cache: keeps what is read of remote files.

    Raises:
        DataError: nothing is there, or nothing that is a table.
    """
    if not isinstance(data, (str, os.PathLike)):
        source = open_spark(data) if is_spark(data) else open_memory(data)
        if source is None:
            raise DataError(
                f"Table({type(data).__name__}): expected a path or URI, an Arrow table, a pandas, polars or Spark "
                "frame, or a dict of columns."
            )
        return _without_version(source, version)
    place = locate(data, cache=cache)
    if exists(place, f"{place.path.rstrip('/')}/_delta_log") == pafs.FileType.Directory:
        return open_delta(place.uri, place.delta_uri, place.filesystem, place.path, version, place.options)
    _refuse_inside_delta(place)
    files = find_files(place)
    for opener in (open_parquet, open_tfrecord, open_image_folder):
        source = opener(place, files)
        if source is not None:
            return _without_version(source, version)
    raise _nothing_at(place)


def _without_version(source: Source, version: Any) -> Source:
    if version is not None:
        raise DataError(
            f"{source.uri}: version={version!r}, but only Delta tables have versions; this is {source.kind}."
        )
    return source


def _refuse_inside_delta(place: Location) -> None:
    """Files of a Delta table read by themselves would bring back deleted rows."""
    parts = place.path.split("/")
    for end in range(2, len(parts)):
        table = "/".join(parts[:end])
        if exists(place, f"{table}/_delta_log") == pafs.FileType.Directory:
            raise DataError(
                f"{place.uri}: this is inside of the Delta table {table}, whose log says which rows are live. Read "
                f'Table("{table}"), with filter= for a partition.'
            )


def _nothing_at(place: Location) -> DataError:
    if any(mark in place.path for mark in "*?["):
        return DataError(f"{place.uri}: no file matches.")
    if exists(place, place.path) == pafs.FileType.NotFound:
        return DataError(f"{place.uri}: there is nothing. Expected a Delta table, or Parquet files.")
    return DataError(
        f"{place.uri}: neither a Delta table (no _delta_log) nor Parquet, TFRecord or image files (none in it)."
    )
