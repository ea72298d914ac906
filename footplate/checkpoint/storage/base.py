"""What a store of checkpoints can do. A checkpoint is a directory with two files, or more where a model is sharded:

    state.safetensors    the run state
    shard-….safetensors  what each rank has of sharded tensors
    meta.json            the marker: what it is, and each file's size and checksum

Without its marker it is no checkpoint: the marker is the last to come and the first to go.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from footplate.checkpoint.format.statefile import Frozen, Written

STATE, META = "state.safetensors", "meta.json"
SUFFIX = ".ckpt"


@dataclass(frozen=True, order=True)
class RemotePath:
    """A place in an object store, with as much of `Path` as checkpoints need. It can't be mistaken for a local path.

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
        """What follows the last slash."""
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """What comes before it."""
        return RemotePath(self.uri.rpartition("/")[0])


Place: TypeAlias = Path | RemotePath


class Store(ABC):
    """Keeps checkpoints. All methods may be called in any thread.

    Whatever can't be reached, read or written is a `CheckpointError`.
    """

    @abstractmethod
    def prepare(self, directory: Any) -> None:
        """Make a directory, if it isn't there, and see that it can be written to.

        Raises:
            ConfigError: it can't.
        """

    @abstractmethod
    def sweep(self, directory: Any) -> None:
        """Remove what killed writes and deletions have left in a directory."""

    @abstractmethod
    def kind(self, path: Any) -> Literal["directory", "file"] | None:
        """What lies there, whole or not; a link stands for what it points to."""

    @abstractmethod
    def find(self, directory: Any, deep: bool = True) -> list[Any]:
        """Every place in a directory (or, `deep`, anywhere below) that may be a checkpoint, by name; no links."""

    @abstractmethod
    def resolve(self, path: Any) -> Any:
        """The checkpoint that a link stands for; any other path as it is."""

    @abstractmethod
    def read_marker(self, path: Any) -> bytes | None:
        """The marker of a checkpoint; None when there is none."""

    @abstractmethod
    def size(self, path: Any, name: str) -> int | None:
        """The bytes of one file of a checkpoint; of the path itself, if `name` is empty. None when there is none."""

    @abstractmethod
    def open(self, path: Any, name: str) -> BinaryIO:
        """One file of a checkpoint; or the path itself, if `name` is empty."""

    @abstractmethod
    def write(self, path: Any, state: Frozen, meta: dict[str, Any]) -> None:
        """Write a checkpoint, whole or not at all; one that was there before is replaced by it."""

    @abstractmethod
    def write_file(self, path: Any, write: Callable[[BinaryIO], object]) -> None:
        """Let `write` fill a plain file, which is there whole or not at all; one that was there is replaced by it."""

    @abstractmethod
    def delete(self, path: Any) -> None:
        """Delete a checkpoint. One that can't be deleted is said, and left."""

    @abstractmethod
    def point(self, link: Any, target: Any) -> None:
        """Let `link` (such as `last.ckpt`) stand for a checkpoint. Where that can't be, it is said and left."""

    @abstractmethod
    def unpoint(self, link: Any) -> None:
        """Remove a link that `point` has made; anything else is left alone."""


def marker(meta: dict[str, Any], written: Written, shards: Mapping[str, Written] | None = None, **more: str) -> bytes:
    """The content of a marker: `meta`, the time, what the state's file must be, and what each of its shards'."""
    files = {STATE: {**_figures(written), **more}}
    files |= {name: _figures(one) for name, one in (shards or {}).items()}
    created = max(time.time(), _latest + 0.001)
    note_time(created)
    return json.dumps({**meta, "created": created, "files": files}).encode()


def _figures(written: Written) -> dict[str, Any]:
    return {"bytes": written.nbytes, "crc32": written.crc32}


_latest = 0.0  # of the times at which the checkpoints that this process has seen were made


def note_time(created: float) -> None:
    """Let the next checkpoint be newer than one that was seen, though the machine's clock be put back in between."""
    global _latest
    _latest = max(_latest, created)
