"""Checkpoints: a run state, saved completely or not at all.

A checkpoint is a directory, `epoch=3-step=940.ckpt/`, with two files:

    state.safetensors    the run state: plain values and tensors (see `format/statefile.py`)
    meta.json            the marker, written last: a description of the run, and the state's size and checksum

If a model is sharded over several ranks, there is also a file of each rank with its shards (see `format/shards.py`).

Saving, in order:

1. At the end of a step, the tensors are copied into host memory that is reused from save to save. Training continues.
2. A thread writes the copy (`writer.py`) to a disk or an object store (`storage/`), completely or not at all.
3. Only then are older checkpoints deleted.

A second save waits until the first is written. If the process is killed at any moment, the old or the new checkpoint
remains, and perhaps temporary files, which the next run removes.

Loading a checkpoint never runs code of the file. `loading.py` finds and reads checkpoints, `by_parts.py` leaves large
tensors in the files until a rank reads its shards, `saving.py` writes and deletes checkpoints, `from_checkpoint.py` builds
modules from them, and `core/foreign_checkpoints.py` translates those of other libraries.
"""

from footplate.checkpoint.from_checkpoint import load_datamodule, load_module
from footplate.checkpoint.loading import examine, exists, find, identity, is_complete, load, newest, read_meta
from footplate.checkpoint.saving import clean_up, delete, point, prepare, save, unpoint
from footplate.checkpoint.storage.base import META, STATE, SUFFIX

LAST = f"last{SUFFIX}"

__all__ = [
    "LAST",
    "META",
    "STATE",
    "SUFFIX",
    "clean_up",
    "delete",
    "examine",
    "exists",
    "find",
    "identity",
    "is_complete",
    "load",
    "load_datamodule",
    "load_module",
    "newest",
    "point",
    "prepare",
    "read_meta",
    "save",
    "unpoint",
]
