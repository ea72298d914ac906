"""Where checkpoints lie: this machine's disk, or an object store.

A `Place` is a directory, or a checkpoint in one: a `Path`, or a `RemotePath` such as `s3://bucket/run/checkpoints`. A
`Store` (`base.py`) does with places the few things that differ: write a checkpoint whole or not at all, delete it so that
it is never half there, let `last.ckpt` stand for another. `local.py` does it by renaming, `objects.py` by the order in
which objects come and go.
"""

from __future__ import annotations

import re
from pathlib import Path

from footplate.checkpoint.storage.base import Place, RemotePath, Store
from footplate.checkpoint.storage.local import LocalStore

__all__ = ["Place", "RemotePath", "Store", "is_remote", "store_of", "to_place"]

_URI = re.compile(r"(s3a?|gs|gcs):/{1,2}([^/].*)")  # Path("s3://…") has lost a slash
_LOCAL = LocalStore()


def to_place(path: str | Path | RemotePath) -> Place:
    """The place that a path or URI means."""
    if isinstance(path, RemotePath):
        return path
    found = _URI.fullmatch(str(path))
    return RemotePath(f"{found.group(1)}://{found.group(2).rstrip('/')}") if found else Path(path)


def is_remote(path: str | Path | RemotePath) -> bool:
    """Whether a place is not on this machine's disk."""
    return isinstance(to_place(path), RemotePath)


def store_of(place: Place) -> Store:
    """What a place lies in."""
    if isinstance(place, Path):
        return _LOCAL
    from footplate.checkpoint.storage.objects import ObjectStore

    return ObjectStore.of(place)
