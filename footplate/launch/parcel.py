"""Parcels: pickled objects that travel between processes in a file without a name.

A function with its arguments goes out, a report with a result comes home; both may be gigabytes. The file is memory where
the system has such files (Linux), else a deleted temporary one. What is handed over is its descriptor: no pipe to fill, no
file to clean up, and however many workers there are, the function's bytes exist once.

cloudpickle takes functions and classes of `__main__` and of notebooks by value, so a worker needn't run the user's script.
Tensors of the CPU are written straight from their memory and read straight into it; torch's own pickling would copy them
twice on the way out and once on the way in.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any


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
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return _reduced(obj) or super().reducer_override(obj)

    os.ftruncate(fd, 0)
    with _opened(fd, "wb") as file:
        for value in values:
            Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


def get(fd: int) -> Any:
    """The first value in the file. Several processes may do that at once: they share no position."""
    with io.BufferedReader(_At(fd), _BUFFER) as file:
        return pickle.load(file)


def opened(fd: int) -> tuple[Any, Callable[[], Any]]:
    """The first value in the file, and a function that loads the second; the file is closed by the caller alone."""
    file = io.BufferedReader(_At(fd), _BUFFER)
    return pickle.load(file), lambda: pickle.load(file)


_BUFFER = 1 << 16


class _At(io.RawIOBase):
    """Reads a file from its beginning at a position of its own, whoever else has the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0

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


def _untyped(data: bytearray) -> Any:
    import torch

    if not len(data):
        return torch.UntypedStorage(0)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
