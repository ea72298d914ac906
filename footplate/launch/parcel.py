"""Parcels: pickled objects that travel between processes in a file without a name.

A function with its arguments goes out, a report with a result comes home; both may be gigabytes. The file is memory where
the system has such files (Linux), else a deleted temporary one. What is handed over is its descriptor: no pipe to fill, no
file to clean up, and however many workers there are, the function's bytes exist once.

cloudpickle takes functions and classes of `__main__` and of notebooks by value, so a worker needn't run the user's script.
Large arrays and tensors of the CPU stand beside the pickle as they are: written straight from their memory, and at the
other end not read but mapped, so that a page is copied when it is written to and not before. For each value there is

    the place of its table │ its pickle │ large buffers, each from the beginning of a page on │ the table of these

A mapped file is never changed: one process fills it, before it tells others of it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any

_LARGE = 1 << 16  # bytes from which on a buffer stands beside the pickle
_BUFFER = 1 << 16
_PLACE = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")


def empty() -> int:
    """A new file without a name; returns its descriptor, which the caller closes."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("footplate-parcel", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def put(fd: int, *values: Any) -> None:
    """Make `values` the content of the file.

    Raises:
        Exception: whatever pickling raises; the file's content is then of no use.
    """
    os.ftruncate(fd, 0)
    with _opened(fd, "wb") as file:
        for value in values:
            _append(file, value)


def get(fd: int) -> Any:
    """The first value in the file. Several processes may do that at once: they share no position."""
    return _load(fd, 0)[0]


def opened(fd: int) -> tuple[Any, Callable[[], Any]]:
    """The first value in the file, and a function that loads the second; the file is closed by the caller alone."""
    value, end = _load(fd, 0)
    return value, lambda: _load(fd, end)[0]


def _append(file: IO[bytes], value: Any) -> None:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return _reduced(obj) or super().reducer_override(obj)

    large: list[memoryview] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        if data.nbytes < _LARGE:
            return True
        large.append(data)
        return False

    start = file.tell()
    file.write(_PLACE.pack(0))
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays_in_pickle).dump(value)
    entries = []
    for data in large:
        file.seek(-(-file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE)
        entries.append((file.tell(), data.nbytes))
        file.write(data)
    table = file.tell()
    file.write(_PLACE.pack(len(entries)) + b"".join(_ENTRY.pack(*entry) for entry in entries))
    end = file.tell()
    file.seek(start)
    file.write(_PLACE.pack(table))
    file.seek(end)


def _load(fd: int, start: int) -> tuple[Any, int]:
    """The value that begins at a place in the file, and where it ends."""
    (table,) = _PLACE.unpack(os.pread(fd, _PLACE.size, start))
    first = table + _PLACE.size
    end = first + _PLACE.unpack(os.pread(fd, _PLACE.size, table))[0] * _ENTRY.size
    entries = list(_ENTRY.iter_unpack(os.pread(fd, end - first, first)))
    mapped = memoryview(mmap.mmap(fd, table, flags=mmap.MAP_PRIVATE) if entries else b"")
    with io.BufferedReader(_At(fd, start + _PLACE.size), _BUFFER) as file:
        return pickle.load(file, buffers=[mapped[at : at + length] for at, length in entries]), end


class _At(io.RawIOBase):
    """Reads a file at a position of its own, whoever else has the descriptor."""

    def __init__(self, fd: int, position: int) -> None:
        self._fd = fd
        self._position = position

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._fd, [buffer], self._position)
        self._position += count
        return count


def _opened(fd: int, mode: str) -> IO[Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    return os.fdopen(fd, mode, closefd=False)


def _reduced(obj: Any) -> Any:
    """How a tensor's storage on the CPU is pickled; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
        return _typed, (obj._untyped_storage, obj.dtype)
    if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
        data = torch.empty(0, dtype=torch.uint8).set_(obj)
        return _untyped, (pickle.PickleBuffer(data.numpy()),)  # pyright: ignore[reportArgumentType]
    return None


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(data: Any) -> Any:
    import torch

    if not len(data):
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
