"""A hash of all values of an Arrow table, independent of the layout of its memory.

Arrow stores the same table in many ways: in chunks of any length, as a slice of a longer table, with any bytes in the
place of a null. So the hash covers the values of a column, not its memory: first which values are null, then the bytes
of the rest. Threads hash pieces of 64 Ki rows, since `hashlib` releases Python's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from footplate.core.hashing import hashed

_ROWS_PER_PIECE = 65_536


def hash_table(table: pa.Table) -> str:
    """Hash the names, types and values of a table's columns, and the order of its rows."""
    pieces = itertools.product(range(table.num_columns), range(0, table.num_rows, _ROWS_PER_PIECE))
    with ThreadPoolExecutor(thread_name_prefix="footplate-hash") as pool:
        hashes = pool.map(lambda piece: _hash_piece(table.column(piece[0]).slice(piece[1], _ROWS_PER_PIECE)), pieces)
        named = [(field.name, str(field.type)) for field in table.schema]
        return hashed(table.num_rows, named, list(hashes))


def _hash_piece(column: pa.ChunkedArray) -> str:
    values = column.combine_chunks()
    # Strings of more than 2 GiB don't fit into one array.
    if isinstance(values, pa.ChunkedArray):
        return hashed([list(_parts(chunk)) for chunk in values.chunks])
    return hashed(list(_parts(values)))


def _parts(values: Any) -> Iterator[Any]:
    """Yield the meaning of an array's values, as bytes and arrays."""
    kind = values.type
    yield len(values)
    if isinstance(values, pa.ExtensionArray):
        yield from _parts(values.storage)
        return
    if pt.is_dictionary(kind):
        yield from _parts(values.dictionary_decode())
        return
    if pt.is_null(kind):
        return

    valid = None
    if values.null_count:
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        yield np.packbits(valid)

    if pt.is_boolean(kind):
        yield np.packbits(values.fill_null(False).to_numpy(zero_copy_only=False))
    elif pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind):
        yield _fixed_width(values, valid)
    elif pt.is_binary(kind) or pt.is_string(kind) or pt.is_large_binary(kind) or pt.is_large_string(kind):
        yield from _bytes(values, valid)
    elif pt.is_struct(kind):
        for part in values.flatten():
            yield from _parts(part)
    elif pt.is_fixed_size_list(kind) or pt.is_list(kind) or pt.is_large_list(kind):
        if not pt.is_fixed_size_list(kind):
            yield values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        yield from _parts(values.flatten())
    else:
        # Maps, views and unions: slow, but complete.
        yield repr(values.to_pylist())


def _fixed_width(values: Any, valid: np.ndarray | None) -> np.ndarray:
    """Return the bytes of values of one width, (rows, bytes). A null is 0."""
    nbytes = values.type.bit_width // 8
    data = values.buffers()[1]
    if data is None or not nbytes:
        return np.zeros((len(values), nbytes), np.uint8)
    rows = np.frombuffer(data, np.uint8, len(values) * nbytes, values.offset * nbytes).reshape(-1, nbytes)
    return rows if valid is None else np.where(valid[:, None], rows, np.uint8(0))


def _bytes(values: Any, valid: np.ndarray | None) -> Iterator[Any]:
    """Yield the lengths of strings or bytes, and all their bytes."""
    if valid is not None:
        values = values.drop_null()
    large = pt.is_large_binary(values.type) or pt.is_large_string(values.type)
    _, offset_buffer, data = values.buffers()
    if not len(values):
        return
    width = np.dtype(np.int64 if large else np.int32)
    offsets = np.frombuffer(offset_buffer, width, len(values) + 1, values.offset * width.itemsize)
    yield np.diff(offsets)
    yield b"" if data is None else np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
