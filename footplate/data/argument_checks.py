"""Checks of the arguments of tables and loaders. They import no torch, since code that only opens a table needs none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from footplate.core.errors import ConfigError


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return an argument as an int.

    Raises:
        ConfigError: it isn't an integer of at least `least`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name}={value!r}: expected an integer of at least {least}.")
    return int(value)


def check_cache(cache: str | os.PathLike[str]) -> None:
    """Check that a cache is a local directory. As a path, `s3://lake/cache` would be a new directory with the name `s3:`.

    Raises:
        ConfigError: it is a URI.
    """
    if "://" in os.fspath(cache):
        raise ConfigError(
            f"cache={os.fspath(cache)!r}: expected a directory on a local disk, such as /local/ssd, not a URI."
        )
