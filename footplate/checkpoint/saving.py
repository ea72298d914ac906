"""Saving, replacing and deleting checkpoints. `writer.py` does the saving in the background."""

from __future__ import annotations

from typing import Any

from footplate.checkpoint.format import statefile
from footplate.checkpoint.storage import Place, store_of, to_place


def save(state: dict[str, Any], path: str | Place, meta: dict[str, Any]) -> None:
    """Write a checkpoint and return when it is complete.

    Raises:
        CheckpointError: the checkpoint can't be written (a full disk, a service that can't be reached), or the state holds
            a value that can't be saved. A checkpoint that was at `path` before is still there.
    """
    place = to_place(path)
    store_of(place).write(place, statefile.freeze(state), meta)


def prepare(directory: str | Place) -> None:
    """Create a directory for checkpoints, and remove what interrupted writes left in it.

    Raises:
        ConfigError: the directory can't be written to.
    """
    place = to_place(directory)
    store_of(place).prepare(place)
    store_of(place).clean_up(place)


def clean_up(directory: str | Place) -> None:
    """Remove what interrupted writes left in a directory, and finish a replacement that was interrupted."""
    place = to_place(directory)
    store_of(place).clean_up(place)


def delete(path: str | Place) -> None:
    """Delete a checkpoint. Its marker goes first, so that half a checkpoint never counts as one."""
    place = to_place(path)
    store_of(place).delete(place)


def point(link: str | Place, target: str | Place) -> None:
    """Make `link` (such as `last.ckpt`) point to the checkpoint `target`, atomically."""
    place = to_place(link)
    store_of(place).point(place, to_place(target))


def unpoint(link: str | Place) -> None:
    """Remove a link that `point` made. Anything else at that path stays."""
    place = to_place(link)
    store_of(place).unpoint(place)
