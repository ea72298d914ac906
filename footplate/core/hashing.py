"""A hash of plain values, arrays and tensors: equal for equal values, another one for any others.

`repr` is no such thing: NumPy and torch leave out the middle of a long array, and an object without a `__repr__` of its own
shows its address, which differs between processes. Here arrays and tensors count with all their bytes, and such an object
counts with its class alone.
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
    """32 hexadecimal digits (128 bits of SHA-256) for some values.

    Args:
        values: None, numbers, strings, bytes, arrays, tensors, and lists, tuples and mappings of these. The order of a
            mapping's keys counts. Anything else counts with its `repr`.
    """
    made = hashlib.sha256()
    for value in values:
        _feed(made, value)
    return made.hexdigest()[:32]


def _feed(made: Any, value: Any) -> None:
    """Add a value, with its kind and length before it, so that no two lists of values feed the same bytes."""
    if isinstance(value, str):
        _feed_bytes(made, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _feed_bytes(made, b"b", value)
    elif _is_tensor(value):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        _feed_bytes(made, b"t", f"{value.dtype} {tuple(value.shape)}".encode())
        _feed_bytes(made, b"t", flat.view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _feed_items(made, value.tolist())
    elif isinstance(value, np.ndarray):
        _feed_bytes(made, b"a", f"{value.dtype.str} {value.shape}".encode())
        _feed_bytes(made, b"a", np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, (list, tuple)):
        _feed_items(made, value)
    elif isinstance(value, Mapping):
        _feed_items(made, [item for pair in value.items() for item in pair], b"m")
    elif type(value).__repr__ is object.__repr__:
        _feed_bytes(made, b"o", f"{type(value).__module__}.{type(value).__qualname__}".encode())
    else:
        _feed_bytes(made, b"r", repr(value).encode("utf-8", "surrogatepass"))


def _is_tensor(value: Any) -> bool:
    """Whether this is a tensor; doesn't load torch, which a table's own commands do without."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _feed_items(made: Any, values: Any, kind: bytes = b"l") -> None:
    if values and hasattr(values[0], "__index__"):
        try:  # an order of rows is a long list of integers
            _feed_bytes(made, kind + b"q", array.array("q", values))
            return
        except (TypeError, OverflowError):
            pass
    made.update(kind + struct.pack("<q", len(values)))
    for value in values:
        _feed(made, value)


def _feed_bytes(made: Any, kind: bytes, content: Any) -> None:
    made.update(kind + struct.pack("<q", memoryview(content).nbytes))
    made.update(content)
