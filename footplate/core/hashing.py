"""A hash of plain values, arrays and tensors: equal for equal values, different for different values.

`repr` can't do this. NumPy and torch leave out the middle of a long array. An object without its own `__repr__` shows its
address, which differs between processes. Here, arrays and tensors count with all their bytes, and an object without its
own `__repr__` counts with its class.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def hashed(*values: Any) -> str:
    """Return 32 hexadecimal digits (128 bits of SHA-256) for some values.

    Args:
        values: None, numbers, strings, bytes, arrays, tensors, and lists, tuples and mappings of these. The order of a
            mapping's keys counts. Any other value counts with its `repr`.
    """
    digest = hashlib.sha256()
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()[:32]


def _feed(digest: Any, value: Any) -> None:
    """Add a value to the digest, after its kind and length, so that different lists of values never give equal bytes."""
    if isinstance(value, str):
        _feed_bytes(digest, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _feed_bytes(digest, b"b", value)
    elif _is_tensor(value):
        import torch

        # Some views conjugate or negate their values only when they are read.
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        _feed_bytes(digest, b"t", f"{value.dtype} {tuple(value.shape)}".encode())
        _feed_bytes(digest, b"t", flat.view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _feed_items(digest, value.tolist())
    elif isinstance(value, np.ndarray):
        # The text of a structured type has no fields.
        dtype = value.dtype.str if value.dtype.names is None else str(value.dtype)
        _feed_bytes(digest, b"a", f"{dtype} {value.shape}".encode())
        _feed_bytes(digest, b"a", np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, (list, tuple)):
        _feed_items(digest, value)
    elif isinstance(value, Mapping):
        _feed_items(digest, [item for pair in value.items() for item in pair], b"m")
    elif type(value).__repr__ is object.__repr__:
        _feed_bytes(digest, b"o", f"{type(value).__module__}.{type(value).__qualname__}".encode())
    else:
        _feed_bytes(digest, b"r", repr(value).encode("utf-8", "surrogatepass"))


def _is_tensor(value: Any) -> bool:
    """Return True for a torch tensor. Doesn't import torch, which the commands for tables don't need."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _feed_items(digest: Any, values: Any, kind: bytes = b"l") -> None:
    # An order of rows is a long list of integers: hash it as one array.
    if values and hasattr(values[0], "__index__"):
        try:
            _feed_bytes(digest, kind + b"q", array.array("q", values))
            return
        except (TypeError, OverflowError):
            pass
    digest.update(kind + struct.pack("<q", len(values)))
    for value in values:
        _feed(digest, value)


def _feed_bytes(digest: Any, kind: bytes, content: Any) -> None:
    digest.update(kind + struct.pack("<q", memoryview(content).nbytes))
    digest.update(content)
