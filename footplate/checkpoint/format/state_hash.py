"""A hash of the state that training continues with: weights, optimizers, schedulers, the unfinished window.

Two runs that have trained alike have the same hash, on any machine and at any time. So the file's own checksum doesn't
serve: the file also holds times, and the states of callbacks and loggers. The hash is made of the CRC-32 of each tensor's
bytes, which the thread that writes a checkpoint computes from the copy in host memory. Training doesn't wait for it, and
tensors on a device cost nothing more. The header of the file has the checksum of every tensor, so that a comparison can
name the tensors that differ.

CRC-32 finds every flipped bit, and every change inside of 32 bits. Another change of one tensor goes unnoticed once in four
thousand million times. It takes 0.24 s for 1 GB, where SHA-256 takes 0.56 s and BLAKE2b 1.1 s (one core of an AMD EPYC).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from footplate.core.hashing import hashed

PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "step")


def state_hash(tree: Any, checksums: Mapping[str, int]) -> str:
    """Return the hash of a state, 32 hexadecimal digits.

    Args:
        tree: the state in JSON's terms; see `statefile.py`.
        checksums: the CRC-32 of each tensor by its name, which is its path in the state.
    """
    values = {part: tree.get(part) for part in PARTS} if isinstance(tree, dict) else {}
    tensors = sorted((name, checksum) for name, checksum in checksums.items() if is_hashed(name))
    return hashed(json.dumps(values, sort_keys=True), json.dumps(tensors))


def is_hashed(name: str) -> bool:
    """Return True if the tensor of this name is a part of the state that is hashed."""
    return re.split(r"[.\[]", name, maxsplit=1)[0] in PARTS


def combined(hashes: list[str]) -> str:
    """Return the hash of a state in several files: rank 0's file, then the shards of all ranks."""
    return hashes[0] if len(hashes) == 1 else hashed(*hashes)
