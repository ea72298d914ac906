"""Finding checkpoints, checking that they are complete, and loading their state.

A checkpoint is complete if it has a readable marker and every file has the size that the marker gives. `load` also compares
the checksum of every byte that it reads. No code of a file is ever run.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from footplate.checkpoint.format import shards, statefile
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.checkpoint.storage.base import META, STATE, note_time
from footplate.core.errors import CheckpointError, did_you_mean


def load(path: str | Place, map_location: Any = "cpu") -> dict[str, Any]:
    """Load a checkpoint's state without running any code of it. A torch file, such as a Lightning `.ckpt`, works too.

    Args:
        path: the checkpoint: a path or a URI.
        map_location: the device that tensors are loaded to; anything but a device or its name means the CPU.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or loading it would run code.
    """
    place = to_place(path)
    store = store_of(place)
    kind = store.kind(place)
    if kind is None:
        raise CheckpointError(f"There is no checkpoint at {place}.{_neighbours(place)}")

    if kind == "directory":
        state = _load_directory(place, map_location)
    else:
        state = _load_pickle(place, map_location)

    if not isinstance(state, dict) or "state_dict" not in state:
        raise CheckpointError(f'{place} is no checkpoint: it has no "state_dict".')
    return state


def _load_directory(place: Place, map_location: Any) -> Any:
    files = read_meta(place)["files"]
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    place = store_of(place).resolve(place)
    (state,) = read_file(place, STATE, files[STATE], lambda *file: statefile.read(*file, device=device))

    if len(files) > 1:
        parts = (read_file(place, name, files[name], statefile.read_tensors) for name in files if name != STATE)
        state = shards.put_together(state, parts, str(place), device)
    return state


def read_file(place: Place, name: str, expected: dict[str, Any], reader: Callable[..., tuple[Any, ...]]) -> Any:
    """Read a file of a checkpoint with `reader`, and compare its checksum with the marker's.

    Args:
        place: the checkpoint's directory.
        name: the file.
        expected: its entry in the marker.
        reader: takes the open file, its size and its name; returns what it has read, and then what was written.

    Raises:
        CheckpointError: the file is damaged.
    """
    with store_of(place).open(place, name) as file:
        *content, written = reader(file, expected["bytes"], str(place / name))
    if written.crc32 != expected.get("crc32"):
        raise CheckpointError(
            f"{place} is damaged: the checksum of {name} differs from the one that was saved. "
            f"Nothing was loaded.{_neighbours(place)}"
        )
    return content


def _load_pickle(path: Place, map_location: Any) -> Any:
    store = store_of(path)
    try:
        with store.open(store.resolve(path), "") as file:
            content = file if isinstance(path, Path) else io.BytesIO(file.read())
            return torch.load(content, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        needs_code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds {needs_code.group(1)}, and loading that would run code" if needs_code else "it is damaged"
        raise CheckpointError(f"{path} can't be read: {reason}. Nothing was loaded.{_neighbours(path)}") from error


def read_meta(path: str | Place) -> dict[str, Any]:
    """Read the marker of a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete.
    """
    meta, fault = examine(path)
    if fault:
        raise CheckpointError(f"{fault}{_neighbours(to_place(path))}")
    return meta


def examine(path: str | Place) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's marker and its fault; the fault is empty if the checkpoint is complete."""
    place = to_place(path)
    store = store_of(place)
    place = store.resolve(place)
    try:
        meta = json.loads(store.read_marker(place) or b"")
        expected = {name: int(meta["files"][name]["bytes"]) for name in (STATE, *meta["files"])}
        created = float(meta["created"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, f"{path} is not a complete checkpoint: it has no readable {META}."

    for name, nbytes in expected.items():
        actual = store.size(place, name) or 0
        if actual != nbytes:
            return meta, f"{path} is damaged: {name} has {actual} bytes instead of {nbytes}."
    note_time(created)
    return meta, ""


def identity(path: str | Place) -> str:
    """Describe a checkpoint in a few words that differ for any other checkpoint, for comparison between ranks.

    Raises:
        CheckpointError: the checkpoint is incomplete.
    """
    place = to_place(path)
    store = store_of(place)
    if store.kind(place) == "file":
        return f"one of {store.size(store.resolve(place), '')} bytes"
    meta = read_meta(place)
    checksums = " ".join(f"{name} {meta['files'][name].get('crc32')}" for name in sorted(meta["files"]))
    return f"one of step {meta.get('global_step')} ({zlib.crc32(checksums.encode()):08x})"


def is_complete(path: str | Place) -> bool:
    """Return True if a checkpoint can be loaded."""
    return not examine(path)[1]


def exists(path: str | Place) -> bool:
    """Return True if there is a checkpoint, complete or not."""
    place = to_place(path)
    return store_of(place).kind(place) is not None


def find(directory: str | Place) -> list[Place]:
    """List everything below a directory that may be a checkpoint, by name; links are left out."""
    place = to_place(directory)
    return store_of(place).find(place)


def newest(
    directories: Iterable[str | Place], wanted: Callable[[dict[str, Any]], bool] = lambda meta: True
) -> Place | None:
    """Find the newest complete checkpoint in some directories.

    Args:
        directories: where to look.
        wanted: a function that returns True for the marker of a checkpoint that may be chosen.

    Returns:
        Its path; None if there is none.
    """
    candidates: list[tuple[float, str, Place]] = []
    for directory in directories:
        for path in find(directory):
            meta, fault = examine(path)
            if not fault and wanted(meta):
                candidates.append((meta["created"], str(path), path))
    return max(candidates)[2] if candidates else None


def _neighbours(path: Place) -> str:
    """The complete checkpoints beside a path, as the end of an error's text."""
    names = [
        other.name for other in store_of(path).find(path.parent, deep=False) if other != path and is_complete(other)
    ]
    return f" {did_you_mean(path.name, names)}" if names else ""
