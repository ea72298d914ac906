"""A cache of arrays in a local directory: numbers that take a long time to count, such as the lengths of all rows.

The name of a file holds the digest of everything that the array depends on. So a file is never out of date.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np

from footplate.core.errors import DataError


def load_array(file: Path) -> np.ndarray | None:
    """Map an array of a cache into memory, so that the processes of a machine share it.

    It is None if there is none, or if the file is damaged.
    """
    try:
        return np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None


def save_array(file: Path, array: np.ndarray) -> None:
    """Write an array to a cache. Other threads and processes may do the same at the same time.

    Raises:
        DataError: the directory can't be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{secrets.token_hex(8)}.new.npy")
        try:
            np.save(new, array)
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"cache={str(file.parent)!r} can't be used ({error.strerror or error}). Give a writable local directory, or no "
            "cache."
        ) from error
