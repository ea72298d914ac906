"""The contract of a store of checkpoints. A checkpoint is a directory with two files, or more if a model is sharded:

    state.safetensors    the run state
    shard-….safetensors  each rank's parts of sharded tensors
    meta.json            the marker: a description of the run, and each file's size and checksum

A directory without a marker is no checkpoint. The marker is written last and deleted first.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from footplate.checkpoint.format.state_hash import combined
from footplate.checkpoint.format.statefile import Frozen, Written

STATE, META = "state.safetensors", "meta.json"
SUFFIX = ".ckpt"


@dataclass(frozen=True, order=True)
class RemotePath:
    """A path in an object store. It has the part of `Path` that checkpoints need, and is never taken for a local path.

    Attributes:
        uri: such as `s3://bucket/run`, without a slash at its end.
    """

    uri: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The part before the last slash."""
        return RemotePath(self.uri.rpartition("/")[0])


Place: TypeAlias = Path | RemotePath


class Store(ABC):
    """Stores checkpoints. All methods may be called in any thread.

    A path that can't be reached, read or written raises `CheckpointError`.
    """

    @abstractmethod
    def prepare(self, directory: Any) -> None:
        """Create a directory if it doesn't exist, and check that it can be written to.

        Raises:
            ConfigError: the directory can't be written to.
        """

    @abstractmethod
    def clean_up(self, directory: Any) -> None:
        """Remove what interrupted writes and deletions left in a directory."""

    @abstractmethod
    def kind(self, path: Any) -> Literal["directory", "file"] | None:
        """Return what is at a path, complete or not. Links are followed."""

    @abstractmethod
    def find(self, directory: Any, deep: bool = True) -> list[Any]:
        """List every path in a directory (with `deep`, anywhere below) that may be a checkpoint, by name, without links."""

    @abstractmethod
    def resolve(self, path: Any) -> Any:
        """Return the checkpoint that a link points to; return any other path unchanged."""

    @abstractmethod
    def read_marker(self, path: Any) -> bytes | None:
        """Read the marker of a checkpoint; None if there is none."""

    @abstractmethod
    def size(self, path: Any, name: str) -> int | None:
        """Size in bytes of one file of a checkpoint, or of the path itself if `name` is empty; None if there is no file."""

    @abstractmethod
    def open(self, path: Any, name: str) -> BinaryIO:
        """Open one file of a checkpoint, or the path itself if `name` is empty."""

    @abstractmethod
    def write(self, path: Any, state: Frozen, meta: dict[str, Any]) -> None:
        """Write a checkpoint, completely or not at all. An existing one is replaced."""

    @abstractmethod
    def write_file(self, path: Any, write: Callable[[BinaryIO], object]) -> None:
        """Write a plain file with `write`, completely or not at all. An existing one is replaced."""

    @abstractmethod
    def delete(self, path: Any) -> None:
        """Delete a checkpoint. If that fails, log a warning and leave it."""

    @abstractmethod
    def point(self, link: Any, target: Any) -> None:
        """Make `link` (such as `last.ckpt`) point to a checkpoint. If that fails, log a warning."""

    @abstractmethod
    def unpoint(self, link: Any) -> None:
        """Remove a link that `point` made. Anything else stays."""


def marker(meta: dict[str, Any], written: Written, shards: Mapping[str, Written] | None = None, **more: str) -> bytes:
    """Encode a marker: `meta`, the time, the state's hash, and the size and checksum of the state and of each shard."""
    files = {STATE: {**_figures(written), **more}}
    files |= {name: _figures(shard) for name, shard in (shards or {}).items()}
    hashes = [written.state_hash, *(shard.state_hash for _, shard in sorted((shards or {}).items()))]
    created = max(time.time(), _latest + 0.001)
    note_time(created)
    return json.dumps({**meta, "created": created, "state_hash": combined(hashes), "files": files}).encode()


def _figures(written: Written) -> dict[str, Any]:
    return {"bytes": written.nbytes, "crc32": written.crc32}


# The latest creation time of any checkpoint that this process has seen.
_latest = 0.0


def note_time(created: float) -> None:
    """Make the next checkpoint newer than this time, even if the machine's clock is set back in between."""
    global _latest
    _latest = max(_latest, created)
