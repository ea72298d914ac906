"""Footers of Parquet files, read with as few requests as possible.

A footer has the row groups of a file, their sizes, types, and the bounds of their values.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.data.remote.location import Stamp

_TAIL_BYTES = 64 * 1024
_MAGIC = b"PAR1"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


@dataclass(frozen=True)
class Footer:
    """Footer of a Parquet file.

    Attributes:
        metadata: the file's metadata.
        content: a hash of the footer and of the file's size.
        stamp: the file's stamp.
    """

    metadata: pq.FileMetaData
    content: str
    stamp: Stamp

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns. Spark's timestamps (INT96) are in microseconds: the years 1 to 9999 don't fit into nanoseconds."""
        schema = self.metadata.schema.to_arrow_schema()
        for column in map(self.metadata.schema.column, range(self.metadata.num_columns)):
            if column.physical_type == "INT96" and column.path == column.name:
                at = schema.get_field_index(column.name)
                kind = schema.field(at).type
                schema = schema.set(at, schema.field(at).with_type(pa.timestamp("us", kind.tz)))
        return schema


def read_footer(filesystem: pafs.FileSystem, path: str) -> Footer:
    """Read a file's footer: with one ranged read for most files, with two if the footer is large.

    Raises:
        DataError: the file is missing, empty, truncated, or not Parquet.
    """
    try:
        stamp = Stamp.of(filesystem, path)
        with filesystem.open_input_file(path) as file:
            size = file.size()
            tail = file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
            if size < 12 or tail[-4:] != _MAGIC:
                raise DataError(
                    f"{path}: not a complete Parquet file (it doesn't end with PAR1). It is truncated, or of "
                    "another format. Write it again, or leave it out."
                )

            length = struct.unpack("<I", tail[-8:-4])[0] + 8
            if length > len(tail):
                tail = file.read_at(min(size, length), max(0, size - length))

        footer = tail[-length:]
        return Footer(pq.read_metadata(pa.BufferReader(footer)), hashed(footer, size), stamp)
    except FileNotFoundError:
        raise DataError(
            f"{path}: this file of the table doesn't exist, or not any more. Restore it, or open another version of "
            "the table."
        ) from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path}: its Parquet footer can't be read ({error}). Write the file again, or leave it out."
        ) from error


def is_part_of(path: str, columns: set[str]) -> bool:
    """Return True if a path names one of the columns, or a part of one. A column's own name may have dots too."""
    parts = path.split(".")
    return any(".".join(parts[:end]) in columns for end in range(1, len(parts) + 1))


def decoded_nbytes(chunk: pq.ColumnChunkMetaData) -> int:
    """Return the size of a column chunk when decoded. For numbers in a dictionary, it is more than the file states."""
    return max(chunk.total_uncompressed_size, chunk.num_values * _WIDTHS.get(chunk.physical_type, 0))
