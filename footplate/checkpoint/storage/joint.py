"""A checkpoint that several ranks write into one directory: each rank writes its own file.

    rank 0        .tmp-ckpt-TOKEN/                           created first; the other ranks write into it
    every rank    .tmp-ckpt-TOKEN/shard-00001.safetensors    its shards, synced
                  .tmp-ckpt-TOKEN/shard-00001.json           its receipt: the file is complete; size, checksum, hash
    rank 0        .tmp-ckpt-TOKEN/state.safetensors          everything that isn't sharded, synced
                  waits for the receipt of every rank
                  .tmp-ckpt-TOKEN/meta.json                  the marker, with the size and checksum of every file
                  renames the directory to the checkpoint's name

This happens in background threads while the ranks continue to train. The threads communicate through files only, because
the ranks share the directory anyway. A collective call in a background thread could run before a collective call of the
main thread on one rank and after it on another, and both would wait forever. A separate process group would avoid that
deadlock, but not the wait for a rank that has died.

A rank that dies, or whose disk is full, never writes its receipt. The other ranks learn this in their main threads, which
meet before the next save and at the end (`Trainer.wait_for_save`). Rank 0 then gives up after `LOST_S` and removes the
directory. If rank 0 dies, a `.tmp-…` remains, which the next run removes. In both cases there is no new checkpoint, and an
older one at the same path is unchanged.
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
# How long rank 0 still waits for the other ranks once one of them may be lost.
LOST_S = 2.0


def begin(path: Path) -> str:
    """Create the directory of a joint save and return its token. Only rank 0 calls this.

    Raises:
        CheckpointError: the directory can't be created.
    """
    token = uuid.uuid4().hex
    try:
        directory_of(path, token).mkdir(parents=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return token


def abandon(path: Path, token: str) -> None:
    """Remove the directory of a joint save."""
    shutil.rmtree(directory_of(path, token), ignore_errors=True)


def write_part(path: Path, token: str, name: str, part: Frozen) -> None:
    """Write one rank's file of a checkpoint, and then its receipt.

    Args:
        path: the checkpoint.
        token: the nonce of this save, the same on all ranks.
        name: the file's name.
        part: the file's content.

    Raises:
        CheckpointError: the file can't be written.
    """
    directory = directory_of(path, token)
    try:
        written = _write(directory / name, part)
        draft = directory / f"{name}.tmp"
        draft.write_text(json.dumps([written.nbytes, written.crc32, written.state_hash]))
        draft.rename(_receipt(directory, name))
    except OSError as error:
        raise cannot_write(path, error) from error


def complete(
    path: Path, token: str, names: list[str], state: Frozen, meta: dict[str, Any], haste: threading.Event
) -> None:
    """Write the rest of a checkpoint, wait for the parts of all ranks, and rename it to its path. Only rank 0 calls this.

    Args:
        path: the checkpoint.
        token: see `write_part`.
        names: the names of the files of all ranks.
        state: everything that isn't sharded.
        meta: the content of the marker.
        haste: set when a rank may be lost.

    Raises:
        CheckpointError: the checkpoint can't be written, or a part is missing.
    """
    directory = directory_of(path, token)
    try:
        written = _write(directory / STATE, state)
        parts = _receipts(path, directory, names, haste)
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


def _receipts(path: Path, directory: Path, names: list[str], haste: threading.Event) -> dict[str, Written]:
    """Wait for the receipts of all ranks, and remove them."""
    received: dict[str, Written] = {}
    deadline = None
    while True:
        for name in names:
            receipt = _receipt(directory, name)
            if name not in received and receipt.exists():
                received[name] = Written(*json.loads(receipt.read_text()))
                receipt.unlink()
        if len(received) == len(names):
            return received

        if haste.is_set():
            deadline = deadline or time.monotonic() + LOST_S
            if time.monotonic() > deadline:
                missing = ", ".join(sorted(set(names) - received.keys()))
                raise CheckpointError(f"The checkpoint {path} could not be written: {missing} was never written.")
        time.sleep(POLL_S)


def _write(file: Path, content: Frozen) -> Written:
    with file.open("xb", buffering=0) as opened:
        written = content.write(opened)
        os.fsync(opened.fileno())
    return written


def directory_of(path: Path, token: str) -> Path:
    """The directory that the ranks write into until the checkpoint is complete."""
    return path.with_name(f"{TEMPORARY}{token}")


def _receipt(directory: Path, name: str) -> Path:
    return directory / f"{name.removesuffix('.safetensors')}.json"
