"""A checkpoint that several ranks write into one directory, each a file of its own: complete or not there.

    rank 0        .tmp-ckpt-TOKEN/                           made first, and looked for by the others
    every rank    .tmp-ckpt-TOKEN/shard-00001.safetensors    its shards, synced
                  .tmp-ckpt-TOKEN/shard-00001.json           its word that they are: their size and checksum
    rank 0        .tmp-ckpt-TOKEN/state.safetensors          all that isn't sharded, synced
                  waits for the word of every rank
                  .tmp-ckpt-TOKEN/meta.json                  the marker, with the size and checksum of every file
                  renames the directory to the checkpoint's name

All of that happens in background threads while the ranks train on. They tell each other by files alone: a collective call
in such a thread could come before one of the main thread on one rank and after it on another, and both would wait for
ever; a group of its own would avoid that, but not the wait for a rank that has died. The directory they share anyway.

A rank that dies, or whose disk is full, never gives its word. The others learn of it in their main threads, which meet
before the next save and at the end (`Trainer.wait_for_save`); rank 0 then gives up after `LOST_S`, and removes what there
is. If rank 0 dies, what is left is a `.tmp-…` that the next run sweeps away. Either way the checkpoint isn't there, and one
that was there before is as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from footplate.checkpoint.format.statefile import Frozen, Written
from footplate.checkpoint.storage.base import META, STATE, marker
from footplate.checkpoint.storage.local import TEMPORARY, cannot_write, replace, sync_directory
from footplate.core.errors import CheckpointError

POLL_S = 0.02
LOST_S = 2.0  # how long rank 0 still waits for the others once it is told to make haste


def begin(path: Path) -> str:
    """Make the directory of a save that all ranks make together, on rank 0; gives its token.

    Raises:
        CheckpointError: it can't be made.
    """
    token = uuid.uuid4().hex
    try:
        directory_of(path, token).mkdir(parents=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return token


def abandon(path: Path, token: str) -> None:
    """Remove it again."""
    shutil.rmtree(directory_of(path, token), ignore_errors=True)


def write_part(path: Path, token: str, name: str, part: Frozen) -> None:
    """Write one rank's file of a checkpoint, and give the word for it.

    Args:
        path: the checkpoint.
        token: of this save; the same on all ranks, and never used before.
        name: the file's.
        part: what is in it.

    Raises:
        CheckpointError: it can't be written.
    """
    directory = directory_of(path, token)
    try:
        written = _write(directory / name, part)
        draft = directory / f"{name}.tmp"
        draft.write_text(json.dumps([written.nbytes, written.crc32]))
        draft.rename(_word(directory, name))
    except OSError as error:
        raise cannot_write(path, error) from error


def complete(
    path: Path, token: str, names: list[str], state: Frozen, meta: dict[str, Any], haste: threading.Event
) -> None:
    """Write the rest of a checkpoint, wait for the parts of all ranks, and let it be one; on rank 0.

    Args:
        path: the checkpoint.
        token: see `write_part`.
        names: of the files of all ranks.
        state: what isn't sharded.
        meta: see `META`.
        haste: set when a rank may be lost.

    Raises:
        CheckpointError: it can't be written, or a part didn't come.
    """
    directory = directory_of(path, token)
    try:
        written = _write(directory / STATE, state)
        parts = _words(path, directory, names, haste)
        with (directory / META).open("xb") as file:
            file.write(marker(meta, written, parts))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)
        replace(directory, path)
        sync_directory(path.parent)
    except CheckpointError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise cannot_write(path, error) from error


def _words(path: Path, directory: Path, names: list[str], haste: threading.Event) -> dict[str, Written]:
    """What the ranks say of their files, once all have; their words are taken away."""
    found: dict[str, Written] = {}
    deadline = None
    while True:
        for name in names:
            word = _word(directory, name)
            if name not in found and word.exists():
                found[name] = Written(*json.loads(word.read_text()))
                word.unlink()
        if len(found) == len(names):
            return found
        if haste.is_set():
            deadline = deadline or time.monotonic() + LOST_S
            if time.monotonic() > deadline:
                missing = ", ".join(sorted(set(names) - found.keys()))
                raise CheckpointError(f"The checkpoint {path} could not be written: {missing} never came.")
        time.sleep(POLL_S)


def _write(file: Path, content: Frozen) -> Written:
    with file.open("xb", buffering=0) as opened:
        written = content.write(opened)
        os.fsync(opened.fileno())
    return written


def directory_of(path: Path, token: str) -> Path:
    """Where the ranks write until the checkpoint is complete."""
    return path.with_name(f"{TEMPORARY}{token}")


def _word(directory: Path, name: str) -> Path:
    return directory / f"{name.removesuffix('.safetensors')}.json"
