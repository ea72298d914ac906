"""Parcels: pickled objects that travel between processes in a file without a name.

A function with its arguments goes out, a report with a result comes home; both may be hundreds of megabytes. The file is
memory where the system has such files (Linux), else a deleted temporary one. What is handed over is its descriptor: no
pipe to fill, no file to clean up, and however many workers there are, the function's bytes exist once.

cloudpickle takes functions and classes of `__main__` and of notebooks by value, so a worker needn't run the user's script.
"""

from __future__ import annotations

import mmap
import os
import pickle
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

    os.ftruncate(fd, 0)
    with _opened(fd, "wb") as file:
        for value in values:
            cloudpickle.dump(value, file)


def get(fd: int) -> Any:
    """The first value in the file. Several processes may do that at once: they share no position."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
        return pickle.loads(content)


def opened(fd: int) -> tuple[Any, Callable[[], Any]]:
    """The first value in the file, and a function that loads the second; the file is closed by the caller alone."""
    file = _opened(fd, "rb")
    return pickle.load(file), lambda: pickle.load(file)


def _opened(fd: int, mode: str) -> IO[Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    return os.fdopen(fd, mode, closefd=False)
