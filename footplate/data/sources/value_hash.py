"""A hash of all values of an Arrow table: equal for equal tables, however their memory is laid out.

Arrow keeps one and the same table in many ways: in chunks of any length, as a slice of a longer one, with anything in the
place of a null, strings beside their offsets. So a column is not hashed as it lies in memory, but as its values mean: which
are null, then the bytes of the others. Pieces of 64 Ki rows are hashed in threads, as `hashlib` releases Python's lock.
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
    """A hash of the names, types and values of a table's columns, and of the order of its rows."""
    pieces = itertools.product(range(table.num_columns), range(0, table.num_rows, _ROWS_PER_PIECE))
    with ThreadPoolExecutor(thread_name_prefix="footplate-hash") as pool:
        hashes = pool.map(lambda piece: _hash_piece(table.column(piece[0]).slice(piece[1], _ROWS_PER_PIECE)), pieces)
        named = [(field.name, str(field.type)) for field in table.schema]
        return hashed(table.num_rows, named, list(hashes))


def _hash_piece(column: pa.ChunkedArray) -> str:
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # strings of more than 2 GiB don't fit into one array
        return hashed([list(_parts(chunk)) for chunk in values.chunks])
    return hashed(list(_parts(values)))


def _parts(values: Any) -> Iterator[Any]:
    """What the values of an array mean, as bytes and arrays."""
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
    else:  # maps, views, unions: slow, but complete
        yield repr(values.to_pylist())


def _fixed_width(values: Any, valid: np.ndarray | None) -> np.ndarray:
    """The bytes of values that take as many each, (rows, bytes); 0 in the place of a null."""
    nbytes = values.type.bit_width // 8
    held = values.buffers()[1]
    if held is None or not nbytes:
        return np.zeros((len(values), nbytes), np.uint8)
    found = np.frombuffer(held, np.uint8, len(values) * nbytes, values.offset * nbytes).reshape(-1, nbytes)
    return found if valid is None else np.where(valid[:, None], found, np.uint8(0))


def _bytes(values: Any, valid: np.ndarray | None) -> Iterator[Any]:
    """The lengths of strings or bytes, and all their bytes."""
    if valid is not None:
        values = values.drop_null()
    large = pt.is_large_binary(values.type) or pt.is_large_string(values.type)
    _, places, held = values.buffers()
    if not len(values):
        return
    width = np.dtype(np.int64 if large else np.int32)
    offsets = np.frombuffer(places, width, len(values) + 1, values.offset * width.itemsize)
    yield np.diff(offsets)
    yield b"" if held is None else np.frombuffer(held, np.uint8)[offsets[0] : offsets[-1]]
