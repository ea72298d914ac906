"""Spark DataFrames as a source.

If a DataFrame is nothing but a Parquet table, its files are read directly. They must be exactly the files that Spark
would read, with columns of Spark's types. For any other DataFrame, Spark computes the rows once, into Parquet files
with row groups of 32 MiB, and these are read. The same plan in the same Spark session is not computed again.

The computed files are in the directory of the Spark setting `footplate.cache.dir`, which all workers must
see. They are deleted when the driver ends. To keep rows longer than a session, for example to resume, write them to a
table.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from footplate.core.errors import DataError
from footplate.data.remote.location import find_files, locate
from footplate.data.sources.column_types import plain_type
from footplate.data.sources.parquet import ParquetSource, open_parquet

# Spark settings that name the cache directory; the first that is set counts.
CACHE_SETTINGS = ["footplate.cache.dir"]
ROW_GROUP_BYTES = 32 * 2**20
_SHOWN_FIELDS = "spark.sql.debug.maxToStringFields"
_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
}
_WIDE = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}

_delete_directory: Callable[[str], None] | None = None
# The address of the computed rows, by the key of the plan.
_computed: dict[str, str] = {}


def is_spark(data: Any) -> bool:
    """Return True for a Spark DataFrame. This doesn't import Spark."""
    return type(data).__module__.startswith("pyspark.sql") and type(data).__name__ == "DataFrame"


def open_spark(frame: Any) -> ParquetSource:
    """Open a DataFrame, and compute its rows if necessary.

    Raises:
        DataError: the DataFrame has no rows or columns, or can't be written.
    """
    return _plain_table(frame) or _open(computed_uri(frame))


def computed_uri(frame: Any, row_group_bytes: int = ROW_GROUP_BYTES, compression: str | None = None) -> str:
    """Return the address of a DataFrame's rows as Parquet. The first call for a plan computes them.

    Args:
        frame: the DataFrame.
        row_group_bytes: the size of a row group before compression.
        compression: such as "zstd" or "uncompressed"; None for Spark's own.
    """
    session = frame.sparkSession
    directory = _chosen_cache_dir(session)
    key = _key(frame, directory, row_group_bytes, compression)
    if key not in _computed:
        uri = f"{directory or _temporary_cache_dir()}/{key}"
        writer = frame.write.mode("overwrite").option("parquet.block.size", row_group_bytes)
        try:
            (writer if compression is None else writer.option("compression", compression)).parquet(uri)
        except Exception as error:
            raise DataError(
                f"The Spark DataFrame can't be written to {uri}: {error}. Check the setting footplate.cache.dir."
            ) from error
        _computed[key] = uri
        atexit.register(_forget_at_exit, uri)
    return _computed[key]


def _key(frame: Any, *options: Any) -> str:
    """Return a hash of a DataFrame's whole plan, in which every column of the session has a unique number.

    Spark's `semanticHash` has only 32 bits, so two plans may have the same. By default, Spark shows only 25 columns of
    a plan, so the limit is lifted meanwhile.
    """
    session = frame.sparkSession
    shown = session.conf.get(_SHOWN_FIELDS, None)
    session.conf.set(_SHOWN_FIELDS, str(2**31 - 1))
    try:
        plan = frame._jdf.queryExecution().analyzed().toString()
    finally:
        if shown is None:
            session.conf.unset(_SHOWN_FIELDS)
        else:
            session.conf.set(_SHOWN_FIELDS, shown)
    described = f"{session.sparkContext.applicationId} {frame.semanticHash()} {frame.columns} {options} {plan}"
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def forget(uri: str) -> None:
    """Delete the computed rows of a DataFrame. Any other address is left alone."""
    keys = [key for key, computed in _computed.items() if computed == uri]
    if not keys:
        return
    for key in keys:
        del _computed[key]
    if _delete_directory is not None:
        _delete_directory(uri)
        return
    location = locate(uri)
    with contextlib.suppress(OSError):
        location.filesystem.delete_dir(location.path)


def _forget_at_exit(uri: str) -> None:
    """Delete the directory of a computed DataFrame; a failure is only a warning."""
    try:
        forget(uri)
    except Exception as error:
        warnings.warn(f"The files of a Spark DataFrame in {uri} can't be deleted: {error}", stacklevel=2)


def set_delete_directory(delete: Callable[[str], None] | None) -> None:
    """Let a function delete the directories of computed DataFrames. It takes a URI; None restores our own deletion."""
    global _delete_directory
    _delete_directory = delete


def add_cache_setting(name: str) -> None:
    """Read the cache directory from another Spark setting too."""
    if name not in CACHE_SETTINGS:
        CACHE_SETTINGS.append(name)


def _plain_table(frame: Any) -> ParquetSource | None:
    """Return the Parquet files of a DataFrame that is nothing but a Parquet table; None for any other."""
    plan = frame._jdf.queryExecution().optimizedPlan()
    if plan.getClass().getSimpleName() != "LogicalRelation":
        return None
    relation = plan.relation()
    if relation.getClass().getSimpleName() != "HadoopFsRelation" or relation.fileFormat().toString() != "Parquet":
        return None
    roots = relation.location().rootPaths()
    if roots.length() != 1:
        return None

    # A view of some partitions has other files, and other rows, than the directory.
    location = locate(_tidy(roots.head().toUri().toString()))
    source = open_parquet(location, find_files(location))
    if source is None or set(source.files) != {_path(uri) for uri in frame.inputFiles()}:
        return None

    try:
        schema = _typed(frame, source)
    except DataError:
        # The files differ in their columns. Spark can merge them.
        return None
    return schema and source.typed(schema)


def _typed(frame: Any, source: ParquetSource) -> pa.Schema | None:
    """Return the columns of some files in Spark's types; None if the files have other columns or types."""
    if source.schema.names != frame.columns:
        return None
    fields = []
    for field, (_, kind) in zip(source.schema, frame.dtypes, strict=True):
        own = plain_type(field.type)
        own = _WIDE.get(own, own)

        wanted = _TYPES.get(kind)
        if wanted is None and own in _TYPES.values():
            return None
        if wanted is None or wanted == own:
            fields.append(field)
        elif _all_become(wanted, source.partition_values(field.name)):
            fields.append(field.with_type(wanted))
        else:
            return None
    return pa.schema(fields)


def _all_become(kind: pa.DataType, values: set[Any]) -> bool:
    """Return True if there are values of a partition column, and all can be cast to a type."""
    try:
        return bool([pa.scalar(value, pa.string()).cast(kind) for value in values])
    except pa.ArrowInvalid:
        return False


def _path(uri: str) -> str:
    """Convert a file URI of Spark to pyarrow's path."""
    parts = urlsplit(uri)
    return unquote(parts.netloc + parts.path)


def _open(uri: str) -> ParquetSource:
    location = locate(uri)
    source = open_parquet(location, find_files(location))
    if source is None:
        raise DataError("The Spark DataFrame has no rows. Give a DataFrame with rows.")
    return source


def _chosen_cache_dir(session: Any) -> str | None:
    """Return the directory of the Spark setting, or None."""
    for name in CACHE_SETTINGS:
        directory = session.conf.get(name, None)
        if directory:
            return _tidy(directory.rstrip("/"))
    return None


def _temporary_cache_dir() -> str:
    directory = tempfile.mkdtemp(prefix="footplate-spark-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _tidy(uri: str) -> str:
    """Convert `file:/path`, as Spark writes it, to `file:///path`."""
    return f"file://{uri[5:]}" if uri.startswith("file:/") and not uri.startswith("file://") else uri
