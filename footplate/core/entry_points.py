"""Entry points of the installed packages: how a package offers accelerators or callbacks.

For each question, Python reads the files of all installed packages. With 300 packages this takes 10 ms, and each `Trainer`
asks at least once. So what a folder of `sys.path` has is kept until a package is installed there or removed, which gives
the folder another time of change.
"""

from __future__ import annotations

import functools
import sys
import time
from importlib import metadata
from pathlib import Path

# A file system may give two changes within this time the same time.
RECENT_S = 1.0

# The name of a package and its entry points.
_Package = tuple[str, tuple[metadata.EntryPoint, ...]]


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of a group, such as `"footplate.accelerators"`, in the order of `sys.path`."""
    packages: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    finders = tuple(map(id, sys.meta_path))
    for folder in sys.path:
        for name, entries in _packages_in(folder, finders):
            packages.setdefault(name, entries)
    return [entry for entries in packages.values() for entry in entries if entry.group == group]


def _packages_in(folder: str, finders: tuple[int, ...]) -> list[_Package]:
    """The packages in a folder. A package hides those of the same name in later folders."""
    try:
        changed_at = Path(folder).stat().st_mtime
    except OSError:
        changed_at = 0.0
    is_recent = abs(time.time() - changed_at) < RECENT_S
    return _read(folder) if is_recent else _read_once(folder, changed_at, finders)


@functools.lru_cache(maxsize=64)
def _read_once(folder: str, changed_at: float, finders: tuple[int, ...]) -> list[_Package]:
    return _read(folder)


def _read(folder: str) -> list[_Package]:
    # Its public name is in another file of each package.
    return [
        (package._normalized_name, tuple(package.entry_points))  # pyright: ignore[reportAttributeAccessIssue]
        for package in metadata.distributions(path=[folder])
    ]
