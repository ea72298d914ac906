"""Payloads: pickled objects that travel between processes in a file without a name.

A function with its arguments goes to the workers, a report with a result comes back. Both may be gigabytes. The file is
in memory where the system has such files (Linux), else a deleted temporary file. A process passes its descriptor on. So
there is no pipe to fill and no file to clean up, and the function's bytes exist once, for any number of workers.

cloudpickle takes functions and classes of `__main__` and of notebooks by value, so a worker needn't run the user's script.
Large arrays and tensors of the CPU are stored beside the pickle: they are written straight from their memory. The reader
maps them instead of reading them, so a page is copied when somebody writes to it, and not before. For each value there is

    the offset of its table │ its pickle │ large buffers, each from the beginning of a page on │ the table of these

A mapped file never changes: one process fills it, before it passes it on.
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

# A buffer of this size or more is stored beside the pickle.
_LARGE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_OFFSET = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")


def create() -> int:
    """Create an empty payload; return its descriptor, which the caller closes."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("footplate-payload", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write(fd: int, *values: Any) -> None:
    """Pickle `values` into the payload, in place of its content.

    Raises:
        Exception: pickling failed. The content is then undefined.
    """
    os.ftruncate(fd, 0)
    with _opened(fd, "wb") as file:
        for value in values:
            _append(file, value)


def read(fd: int) -> Any:
    """Read the first value. Several processes may do so at once: they share no position."""
    return _load(fd, 0)[0]


def read_two(fd: int) -> tuple[Any, Callable[[], Any]]:
    """Read the first value; return it, and a function that reads the second. Neither closes the descriptor."""
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
        if data.nbytes < _LARGE_BYTES:
            return True
        large.append(data)
        return False

    # The table's offset is known only at the end: leave room for it.
    start = file.tell()
    file.write(_OFFSET.pack(0))
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays_in_pickle).dump(value)

    # Each buffer begins on a page of its own, so that it can be mapped.
    entries = []
    for data in large:
        file.seek(-(-file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE)
        entries.append((file.tell(), data.nbytes))
        file.write(data)

    table = file.tell()
    file.write(_OFFSET.pack(len(entries)) + b"".join(_ENTRY.pack(*entry) for entry in entries))
    end = file.tell()
    file.seek(start)
    file.write(_OFFSET.pack(table))
    file.seek(end)


def _load(fd: int, start: int) -> tuple[Any, int]:
    """Read the value that begins at offset `start`; return it, and the offset of its end."""
    (table,) = _OFFSET.unpack(os.pread(fd, _OFFSET.size, start))
    first = table + _OFFSET.size
    end = first + _OFFSET.unpack(os.pread(fd, _OFFSET.size, table))[0] * _ENTRY.size
    entries = list(_ENTRY.iter_unpack(os.pread(fd, end - first, first)))
    mapped = memoryview(mmap.mmap(fd, table, flags=mmap.MAP_PRIVATE) if entries else b"")
    with io.BufferedReader(_ReaderAt(fd, start + _OFFSET.size), _READ_BYTES) as file:
        return pickle.load(file, buffers=[mapped[at : at + length] for at, length in entries]), end


class _ReaderAt(io.RawIOBase):
    """Reads a file at a position of its own, which no other reader of the descriptor shares."""

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
    """The reduction that pickles a tensor's storage on the CPU; None for any other object."""
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
