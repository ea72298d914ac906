"""Arrow columns become values of a batch, by their type:

| column | in a batch of n rows |
| --- | --- |
| integers of any width | int64 tensor (n,), as torch's own collation and its losses expect |
| floats | tensor (n,) of their own width; null is NaN |
| bool | bool tensor (n,) |
| date, time, timestamp, duration | int64 tensor (n,), in the column's own unit |
| string | list of n str; null is None |
| binary that holds images | uint8 tensor (n, channels, height, width) |
| other binary | list of n bytes; null is None |
| fixed-size list of numbers, nested too | tensor (n, size, …) |
| list of numbers | tensor (n, longest), filled with 0, and `NAME_length`, int64 (n,); a null list has length 0 |

A null integer, bool, date or fixed-size list has no meaning. It is an error, or with `on_error="skip"` the row is left out.
Other types are refused with the name of the column.

Each kind of column has two functions. `load` turns the rows of a window into a block, once, in a reader thread.
`collate` turns slices of blocks into values of a batch. Columns of numbers of one type are one block, (columns, rows).
So one copy collates a batch of them, and its tensors are the rows of one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch

from footplate.core.errors import DataError
from footplate.data.pipeline.buffers import Buffers
from footplate.data.sources.arrow import indices
from footplate.data.sources.column_types import plain_type

_DTYPES = {
    getattr(pa, name)(): np.dtype(name) for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64")
}
_DTYPES |= {getattr(pa, name)(): np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")}

# A block, and the first and the last row (excluded) of a slice of it.
BlockSlice = tuple[Any, int, int]


@dataclass(frozen=True)
class Columns:
    """Columns of one kind that become one block.

    Attributes:
        names: the names of the columns, and of the values in a batch.
        keeps_nulls: True if a null becomes a value. Otherwise, its row is a bad row.
    """

    names: tuple[str, ...]
    keeps_nulls = True

    def load(self, values: Sequence[pa.ChunkedArray], order: np.ndarray | None, buffers: Buffers) -> Any:
        """Return the block of a window's rows, in the order in which they are handed out.

        Args:
            values: the columns, in the order of the table.
            order: the permutation, (rows,), or None.
            buffers: memory for the block.
        """
        raise NotImplementedError

    def collate(self, slices: Sequence[BlockSlice], buffers: Buffers) -> dict[str, Any]:
        """Return the batch's values of some slices of blocks, by the names of the columns."""
        raise NotImplementedError


class Numbers(Columns):
    """Scalars and fixed-size lists of one type. The block is a numpy array (columns, rows, …)."""

    keeps_nulls = False

    def load(self, values: Sequence[pa.ChunkedArray], order: np.ndarray | None, buffers: Buffers) -> np.ndarray:
        """Permute the columns into one array."""
        if pt.is_fixed_size_list(values[0].type):
            for name, column in zip(self.names, values, strict=True):
                for chunk in column.chunks:
                    refuse_null_items(name, chunk.flatten())
        first = _joined(values[0])
        block = buffers.take((len(values), *first.shape), first.dtype)
        for out, column in zip(block, values, strict=True):
            _permute(_joined(column), order, out)
        for name, numbers in zip(self.names, block, strict=True):
            refuse_too_large(name, numbers)
        return block

    def collate(self, slices: Sequence[BlockSlice], buffers: Buffers) -> dict[str, Any]:
        """Return one tensor for each column. All of them share one array."""
        block = slices[0][0]
        rows = sum(stop - start for _, start, stop in slices)
        dtype = np.int64 if block.dtype.kind in "iu" else block.dtype
        tensor = buffers.tensor((len(block), rows, *block.shape[2:]), dtype)
        array, at = tensor.numpy(), 0
        for block, start, stop in slices:
            array[:, at : at + stop - start] = block[:, start:stop]
            at += stop - start
        return dict(zip(self.names, tensor.unbind(), strict=True))


class Texts(Columns):
    """A column of strings or plain bytes. The block is an Arrow array."""

    def load(self, values: Sequence[pa.ChunkedArray], order: np.ndarray | None, buffers: Buffers) -> pa.ChunkedArray:
        """Return the values in their new order."""
        return values[0] if order is None else values[0].take(indices(order))

    def collate(self, slices: Sequence[BlockSlice], buffers: Buffers) -> dict[str, Any]:
        """Return a list of Python values."""
        return {self.names[0]: [value for block, start, stop in slices for value in block[start:stop].to_pylist()]}


class Ragged(Columns):
    """A column of lists of numbers of any length. The block is (values, starts, lengths), numpy arrays."""

    def load(
        self, values: Sequence[pa.ChunkedArray], order: np.ndarray | None, buffers: Buffers
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the items of all lists in one array, and each row's first item and length."""
        items: list[np.ndarray] = []
        starts, lengths, base = [], [], 0
        for chunk in values[0].chunks:
            offsets = chunk.offsets.to_numpy().astype(np.int64)
            length = np.diff(offsets)
            if chunk.null_count:
                length = np.where(chunk.is_valid().to_numpy(zero_copy_only=False), length, 0)
            refuse_null_items(self.names[0], chunk.values)
            items.append(to_numpy(chunk.values))
            starts.append(offsets[:-1] + base)
            lengths.append(length)
            base += len(items[-1])
        start, length = (np.concatenate([np.zeros(0, np.int64), *part]) for part in (starts, lengths))
        flat = items[0] if len(items) == 1 else np.concatenate(items) if items else np.zeros(0)
        refuse_too_large(self.names[0], flat)
        return (flat, start, length) if order is None else (flat, start[order], length[order])

    def collate(self, slices: Sequence[BlockSlice], buffers: Buffers) -> dict[str, Any]:
        """Return a padded tensor, and the lengths under `NAME_length`."""
        name = self.names[0]
        lengths = buffers.zeros((sum(stop - start for _, start, stop in slices),), np.int64)
        np.concatenate([block[2][start:stop] for block, start, stop in slices], out=lengths.numpy())
        dtype = slices[0][0][0].dtype
        longest = int(lengths.numpy().max(initial=0))
        tensor = buffers.zeros((len(lengths), longest), np.int64 if dtype.kind in "iu" else dtype)
        padded, row = tensor.numpy(), 0
        for (flat, starts, sizes), start, stop in slices:
            for begin, size in zip(starts[start:stop].tolist(), sizes[start:stop].tolist(), strict=True):
                padded[row, :size] = flat[begin : begin + size]
                row += 1
        return {name: tensor, f"{name}_length": lengths}


def columns_for(fields: Iterable[pa.Field]) -> tuple[Columns, ...]:
    """Group the columns without images by kind. Columns of numbers of one type are one group.

    Raises:
        DataError: a type that a batch can't hold.
    """
    fields = list(fields)
    names = {field.name for field in fields}
    numbers: dict[pa.DataType, list[str]] = {}
    other_columns: list[Columns] = []
    for field in fields:
        kind = plain_type(field.type)
        if _is_number(kind) or (pt.is_fixed_size_list(kind) and _is_number(_innermost(kind))):
            numbers.setdefault(kind, []).append(field.name)
        elif pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
            other_columns.append(Texts((field.name,)))
        elif (pt.is_list(kind) or pt.is_large_list(kind)) and _is_number(kind.value_type):
            if f"{field.name}_length" in names:
                raise DataError(
                    f"Column '{field.name}_length' has the name under which a batch holds the lengths of the lists in "
                    f"{field.name!r}. Leave it out with columns=[…], or rename it."
                )
            other_columns.append(Ragged((field.name,)))
        else:
            raise DataError(
                f"Column {field.name!r} is {field.type}, which a batch can't hold. Leave it out with columns=[…], "
                "or write it as numbers, strings, bytes or lists of numbers."
            )
    return (*(Numbers(tuple(names)) for names in numbers.values()), *other_columns)


def _is_number(kind: pa.DataType) -> bool:
    if pt.is_interval(kind):
        return False
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_temporal(kind)


def _zeros(kind: pa.DataType) -> Any:
    return [_zeros(kind.value_type)] * kind.list_size if pt.is_fixed_size_list(kind) else 0


def _innermost(kind: pa.DataType) -> pa.DataType:
    return _innermost(kind.value_type) if pt.is_fixed_size_list(kind) else kind


def refuse_null_items(name: str, items: pa.Array) -> None:
    """Raise if there is a null number within a list. It has no meaning, and its row can't be left out."""
    while pt.is_fixed_size_list(items.type):
        items = items.flatten()
    if items.null_count and not pt.is_floating(items.type):
        raise DataError(
            f"Column {name!r} has nulls within its lists, which have no meaning in a batch: fill them first."
        )


def refuse_too_large(name: str, numbers: np.ndarray) -> None:
    """Raise if an integer is too large for int64. It would become negative."""
    if numbers.dtype == np.uint64 and numbers.size and numbers.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"Column {name!r} holds {numbers.max()}, which is too large for int64, the type of integers in a batch. "
            "Leave the column out with columns=[…], or write it as floats or strings."
        )


def _joined(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column in one piece. There is no copy if it is in one piece already."""
    chunks = column.chunks
    return to_numpy(chunks[0]) if len(chunks) == 1 else np.concatenate([to_numpy(chunk) for chunk in chunks])


def _permute(array: np.ndarray, order: np.ndarray | None, out: np.ndarray) -> None:
    """Write the rows of an array into `out`, permuted by `order` if it isn't None."""
    if order is None:
        out[:] = array
    elif array.ndim > 1:
        # With mode="raise", np.take would make a copy.
        np.take(array, order, axis=0, out=out, mode="clip")
    else:
        # torch is half as fast again, in one thread. It takes any type if its bits are viewed as an integer.
        bits = np.dtype(f"i{array.itemsize}")
        rows = torch.from_numpy(np.asarray(_Readable(array)).view(bits))
        torch.index_select(rows, 0, torch.from_numpy(order), out=torch.from_numpy(out.view(bits)))


class _Readable:
    """An array that torch believes to be writable. torch warns of read-only arrays, even if it only reads them."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def to_numpy(chunk: pa.Array) -> np.ndarray:
    """Convert to numpy, without a copy if possible. A null that isn't a float becomes 0, since its row is bad anyway."""
    dtype = None if chunk.null_count else _DTYPES.get(chunk.type)
    if dtype is not None:
        return np.frombuffer(chunk.buffers()[1], dtype)[chunk.offset : chunk.offset + len(chunk)]
    if pt.is_floating(chunk.type):
        return chunk.to_numpy(zero_copy_only=False)
    if pt.is_fixed_size_list(chunk.type):
        size = chunk.type.list_size
        if chunk.null_count:
            chunk = chunk.fill_null(pa.scalar(_zeros(chunk.type), chunk.type))
        inner = to_numpy(chunk.values.slice(chunk.offset * size, len(chunk) * size))
        return inner.reshape(len(chunk), size, *inner.shape[1:])
    if pt.is_temporal(chunk.type):
        chunk = chunk.view(pa.int64() if chunk.type.bit_width == 64 else pa.int32())
    if chunk.null_count:
        chunk = chunk.fill_null(False if pt.is_boolean(chunk.type) else 0)
    return chunk.to_numpy(zero_copy_only=False)
