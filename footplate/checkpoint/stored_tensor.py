"""Tensors in safetensors files, of which any part can be read alone.

    tensors = tensors_of(folder, "model.safetensors")    only the header of the file is read
    tensors["norm.weight"].read_into(part, (8,))         the elements from index 8 on, as many as `part` has

A rank of a sharded model reads the bytes of its shard, and no others. They go through a small buffer into the memory of
the shard, so a rank needs no memory for the whole tensor. A tensor may lie in several files: the shards of a checkpoint.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from footplate.checkpoint.format import statefile
from footplate.checkpoint.format.shards import offsets_of
from footplate.checkpoint.format.statefile import Sharded
from footplate.checkpoint.storage import Place, store_of
from footplate.core.errors import CheckpointError

# Type, shape, and index of the first byte.
Entry = tuple[torch.dtype, tuple[int, ...], int]

_BUFFER_NBYTES = 16 << 20
_PROBE_NBYTES = 4096


@dataclass(frozen=True)
class StoredPart:
    """A box of a tensor's elements, which lie in a file one after the other.

    Attributes:
        place: the directory of the file.
        file: its name.
        start: the index of the first byte in the file.
        shape: the shape of the box.
        offsets: the index in the whole tensor at which the box begins, in each dimension.
    """

    place: Place
    file: str
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one file or several.

    Attributes:
        name: its name in the files.
        dtype: its type.
        shape: its shape.
        parts: boxes that make up the tensor.
        fingerprint: a number that differs between files with other content, as far as a few bytes of them show.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    fingerprint: int

    @torch.no_grad()
    def read_into(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Read a box of the tensor into `target`, in whose type and on whose device it is then.

        Args:
            target: has the shape of the box.
            offsets: the index in the tensor at which the box begins, in each dimension.

        Raises:
            CheckpointError: a file can't be read.
        """
        for part in self.parts:
            # The overlap of the box and the part, in each dimension.
            firsts = [max(first, begin) for first, begin in zip(offsets, part.offsets, strict=True)]
            ends = [
                min(first + count, begin + size)
                for first, count, begin, size in zip(offsets, target.shape, part.offsets, part.shape, strict=True)
            ]
            if all(first < end for first, end in zip(firsts, ends, strict=True)):
                into = tuple(
                    slice(first - off, end - off) for first, end, off in zip(firsts, ends, offsets, strict=True)
                )
                box = [(first - off, end - first) for first, end, off in zip(firsts, ends, part.offsets, strict=True)]
                self._read_box(part, box, target[into])

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole, (0,) * whole.dim())
        return whole

    def equals(self, other: StoredTensor) -> bool:
        """Compare with another stored tensor of the same shape, some rows at a time."""
        rows = self.shape[0] if self.shape else 1
        row_numel = math.prod(self.shape[1:])
        rows_at_once = max(1, _BUFFER_NBYTES // max(1, row_numel * self.dtype.itemsize))
        for row in range(0, rows, rows_at_once):
            shape = (min(rows_at_once, rows - row), *self.shape[1:]) if self.shape else ()
            offsets = (row, *(0 for _ in self.shape[1:])) if self.shape else ()
            mine, theirs = torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=other.dtype)
            self.read_into(mine, offsets)
            other.read_into(theirs, offsets)
            if not torch.equal(mine, theirs):
                return False
        return True

    def _read_box(self, part: StoredPart, box: Sequence[tuple[int, int]], target: Tensor) -> None:
        """Read a box of a part. `box` has the first index and the number of indices in each dimension."""
        axis, row_numel = row_axis(part.shape, box)
        rows = target.shape[axis] if target.dim() else 1
        rows_at_once = max(1, min(rows, _BUFFER_NBYTES // max(1, row_numel * self.dtype.itemsize)))
        buffer = torch.empty(rows_at_once * row_numel, dtype=self.dtype)
        with store_of(part.place).open(part.place, part.file) as file:
            for index, first in runs(part.shape, box, axis):
                run = target[index] if target.dim() else target
                for row in range(0, rows, rows_at_once):
                    count = min(rows_at_once, rows - row)
                    elements = buffer[: count * row_numel]
                    file.seek(part.start + (first + row * row_numel) * self.dtype.itemsize)
                    _read_all(file, elements, f"{part.place / part.file}")
                    into = run[row : row + count] if target.dim() else run
                    into.copy_(elements.view(into.shape))


def row_axis(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The axis along which a box lies in the file in runs, and the number of elements of one step along it.

    All dimensions after the axis are read whole.
    """
    axis = max((axis for axis, (_, count) in enumerate(box) if count != shape[axis]), default=0)
    return axis, math.prod(shape[axis + 1 :])


def runs(shape: Sequence[int], box: Sequence[tuple[int, int]], axis: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The runs of a box, in which elements follow each other in the file.

    Args:
        shape: of the tensor in the file.
        box: the first index and the number of indices in each dimension.
        axis: see `row_axis`.

    Yields:
        The index of a run in the box, in the dimensions before the axis; and the position of its first element.
    """
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    corner = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    for index in itertools.product(*(range(count) for _, count in box[:axis])):
        yield index, corner + sum(position * stride for position, stride in zip(index, strides, strict=False))


def tensors_of_shards(place: Place, files: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors whose parts are in the files of a checkpoint's shards, by the names of their parts.

    Args:
        place: the checkpoint's directory.
        files: the names of the files.

    Raises:
        CheckpointError: the parts don't make up the tensors.
    """
    parts: dict[str, dict[tuple[int, ...], StoredPart]] = {}
    dtypes: dict[str, torch.dtype] = {}
    fingerprint = 0
    for file in files:
        entries, notes, number = read_header(place, file)
        fingerprint = zlib.crc32(f"{fingerprint} {number}".encode())
        for name, offsets in offsets_of(notes, str(place)).items():
            dtypes[name], shape, start = entries[name]
            # Replicas save the same part.
            parts.setdefault(name, {})[offsets] = StoredPart(place, file, start, shape, offsets)
    return {
        name: StoredTensor(name, dtypes[name], _whole_shape(own.values()), tuple(own.values()), fingerprint)
        for name, own in parts.items()
    }


def _whole_shape(parts: Iterable[StoredPart]) -> tuple[int, ...]:
    ends = [[first + count for first, count in zip(part.offsets, part.shape, strict=True)] for part in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def tensors_of(place: Place, file: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Only its header, and a few bytes of its content, are read.

    Args:
        place: the directory of the file.
        file: its name.

    Raises:
        CheckpointError: the file can't be read, is damaged, or holds a tensor of an unknown type.
    """
    entries, _, fingerprint = read_header(place, file)
    return {
        name: StoredTensor(name, dtype, shape, (StoredPart(place, file, start, shape, (0,) * len(shape)),), fingerprint)
        for name, (dtype, shape, start) in entries.items()
    }


def read_header(place: Place, file: str) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Return type, shape and first byte of each tensor in a safetensors file, its metadata, and its fingerprint.

    Raises:
        CheckpointError: see `tensors_of`.
    """
    store, shown = store_of(place), f"{place / file}"
    nbytes = store.size(place, file)
    if nbytes is None:
        raise CheckpointError(f"{shown} isn't there.")
    with store.open(place, file) as opened:
        entries, metadata = statefile.layout(opened, nbytes, shown)
        opened.seek(nbytes // 2)
        fingerprint = zlib.crc32(opened.read(_PROBE_NBYTES), zlib.crc32(f"{nbytes} {entries}".encode()))
    return entries, metadata, fingerprint


def check_complete(tensor: StoredTensor | None, sharded: Sharded, source: str) -> StoredTensor:
    """Return a tensor in shards, once its parts make up the tensor that the state refers to.

    Raises:
        CheckpointError: they don't.
    """
    if not math.prod(sharded.shape):
        return StoredTensor(sharded.name, sharded.dtype, sharded.shape, (), 0)
    count = 0 if tensor is None else sum(math.prod(part.shape) for part in tensor.parts)
    if (
        tensor is None
        or tensor.shape != sharded.shape
        or tensor.dtype != sharded.dtype
        or count != math.prod(tensor.shape)
    ):
        raise CheckpointError(f"{source} is damaged: its shards don't make up {sharded.name}. Nothing was loaded.")
    return tensor


def _read_all(file: BinaryIO, elements: Tensor, shown: str) -> None:
    """Fill a host tensor with the next bytes of a file."""
    memory = statefile.bytes_of(elements)
    try:
        # One call may read only a part.
        while memory:
            count = file.readinto(memory)  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise CheckpointError(f"{shown} can't be read: it ends before its last tensor.")
            memory = memory[count:]
    except OSError as error:
        raise CheckpointError(f"{shown} can't be read: {error.strerror or error}.") from error
