"""Delta Lake tables as a source: the log is read by delta-rs, the rows by the Parquet reader.

The log of one version lists the live files, their partition values, and the rows that deletion vectors hide. Reading
the directory instead would bring back deleted rows. A table is refused if it uses a feature that makes a plain Parquet
read wrong.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.sources.arrow import table_from
from footplate.data.sources.column_types import is_bytes
from footplate.data.sources.delta_versions import Version, number_of
from footplate.data.sources.parquet import DataFile, ParquetSource

_READABLE = {"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "columnMapping", "typeWidening"}
_READABLE |= {"typeWidening-preview"}


def open_delta(
    uri: str, location: str, filesystem: pafs.FileSystem, path: str, version: Version, options: dict[str, str] | None
) -> ParquetSource:
    """Open the snapshot of a Delta table at a version (by default the newest). The version is then pinned.

    Args:
        uri: the table as the user named it, for messages.
        location: the table for delta-rs: a local path or a URI.
        filesystem: pyarrow's file system.
        path: the table's path within `filesystem`.
        version: see `footplate.data.sources.delta_versions`.
        options: delta-rs storage options.

    Raises:
        DataError: no such version, an unreadable log, or an unsupported feature.
    """
    table = _at_version(uri, location, version, options, filesystem, path)
    renamed = _column_mapping(uri, table)
    schema = _clean(pa.schema(table.schema().to_arrow()))
    physical: dict[str, str] = {own: name for name, own in renamed.items()}
    actions = table_from(table.get_add_actions(flatten=False)).to_pylist()
    masks = _deletion_masks(uri, table)

    for name in table.metadata().partition_columns:
        if is_bytes(schema.field(name).type):
            raise DataError(
                f"{uri}: it is partitioned by the binary column {name!r}, whose values its log states in more than one "
                "way. Write the rows to a table that isn't partitioned by it."
            )

    # The digest covers what the log says of each live file.
    prefix = path.rstrip("/") + "/"
    files, live = [], []
    for action in sorted(actions, key=lambda action: action["path"]):
        relative = unquote(action["path"])
        if "://" in relative or relative.startswith("/"):
            raise DataError(
                f"{uri}: its log points to files outside of it ({relative}). A shallow clone can't be read: make a "
                "deep clone."
            )
        values: dict[str, Any] = {
            physical.get(str(key), str(key)): value for key, value in (action.get("partition") or {}).items()
        }
        files.append(DataFile(prefix + relative, values, masks.pop(relative, None)))
        live.append((relative, action["size_bytes"], str(action["modification_time"]), values))

    # Every deletion vector belongs to a live file, or deleted rows would come back.
    if masks:
        raise DataError(
            f"{uri}: its log has deletion vectors of unknown files ({', '.join(masks)}), so the table can't be read "
            "safely. "
            "Read another version, or write the rows to a new table."
        )

    content = hashed(str(table.metadata().id), str(schema), renamed, live)
    return ParquetSource(uri, files, filesystem, "delta", table.version(), content, schema, renamed)


def _at_version(
    uri: str, location: str, version: Version, options: dict[str, str] | None, filesystem: pafs.FileSystem, path: str
) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        table = DeltaTable(location, storage_options=options)
    except (DeltaError, OSError) as error:
        raise DataError(f"{uri}: its Delta log can't be read ({error}). Check the path and the credentials.") from error
    number = number_of(uri, table, version, filesystem, path)
    if number == table.version():
        return table
    try:
        table.load_as_version(number)
    except (DeltaError, OSError) as error:
        raise DataError(
            f"{uri}: version {number} can't be opened ({error}). An old version is gone after the table was vacuumed and "
            "its log cleaned up. Use a newer version."
        ) from error
    return table


def _column_mapping(uri: str, table: Any) -> dict[str, str]:
    """Map the table's column names to the files' own, for tables with column mapping."""
    features = set(table.protocol().reader_features or ())
    if features - _READABLE:
        raise DataError(
            f"{uri}: the table uses {', '.join(sorted(features - _READABLE))}, which Footplate can't read. Read "
            "another version, or write the rows to a table without it."
        )
    configuration = table.metadata().configuration
    mode = configuration.get("delta.columnMapping.mode", "none")
    if mode == "none":
        return {}
    fields = json.loads(table.schema().to_json())["fields"]
    nested = [field["name"] for field in fields if not isinstance(field["type"], str)]
    if mode != "name" or nested:
        raise DataError(
            f"{uri}: the table maps its columns by {mode}"
            + (f" and has nested ones ({', '.join(nested)})" if nested else "")
            + ", which Footplate can't read: only plain columns mapped by name. Write the rows to a table without it."
        )
    return {field["name"]: field["metadata"]["delta.columnMapping.physicalName"] for field in fields}


def _deletion_masks(uri: str, table: Any) -> dict[str, np.ndarray]:
    """Map relative file paths to masks of the rows that are not deleted, for files with a deletion vector."""
    from deltalake.exceptions import DeltaError

    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    try:
        vectors = table_from(table.deletion_vectors())
    except DeltaError as error:
        raise DataError(
            f"{uri}: its deletion vectors can't be read, so neither can its rows ({error}). Read another version."
        ) from error
    root = _path_of(table.table_uri)
    masks: dict[str, np.ndarray] = {}
    for batch in vectors.to_batches():
        for path, mask in zip(batch.column(0), batch.column(1), strict=True):
            relative = unquote(_path_of(path.as_py()).removeprefix(root).lstrip("/"))
            masks[relative] = np.asarray(mask.values.to_numpy(zero_copy_only=False), dtype=bool)
    return masks


def _path_of(uri: str) -> str:
    return (urlparse(uri).path if "://" in uri else uri).rstrip("/")


def _clean(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, field.type, field.nullable) for field in schema])
