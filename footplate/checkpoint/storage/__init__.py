"""Storage of checkpoints: this machine's disk, or an object store.

A `Place` is the path of a checkpoint or of a directory of checkpoints: a `Path`, or a `RemotePath` such as
`s3://bucket/run/checkpoints`. A `Store` (`base.py`) has the operations that differ: write a checkpoint completely or not at
all, delete it so that half a checkpoint never counts as one, let `last.ckpt` point to another. `local.py` does this by
renaming, `objects.py` by the order in which objects are written and deleted.
"""

from __future__ import annotations

import re
from pathlib import Path

from footplate.checkpoint.storage.base import Place, RemotePath, Store
from footplate.checkpoint.storage.local import LocalStore

__all__ = ["Place", "RemotePath", "Store", "is_remote", "store_of", "to_place"]

# One slash is enough, because Path("s3://…") drops the other.
_URI = re.compile(r"(s3a?|gs|gcs|abfss?|az):/{1,2}([^/].*)")
_LOCAL = LocalStore()


def to_place(path: str | Path | RemotePath) -> Place:
    """Turn a path or a URI into a `Place`."""
    if isinstance(path, RemotePath):
        return path
    uri = _URI.fullmatch(str(path))
    return RemotePath(f"{uri.group(1)}://{uri.group(2).rstrip('/')}") if uri else Path(path)


def is_remote(path: str | Path | RemotePath) -> bool:
    """Return True if a place is in an object store."""
    return isinstance(to_place(path), RemotePath)


def store_of(place: Place) -> Store:
    """The store that a place is in."""
    if isinstance(place, Path):
        return _LOCAL
    from footplate.checkpoint.storage.objects import ObjectStore

    return ObjectStore.of(place)
