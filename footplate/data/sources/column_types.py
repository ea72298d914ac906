"""Kinds of Arrow types. This file doesn't import torch, since code that only opens a table needs it too."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column is cast to before it is loaded. Dictionaries and views become plain values."""
    if pt.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pt.is_string_view(kind):
        return pa.large_string()
    if pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind):
        return pa.large_binary()
    return kind


def is_bytes(kind: pa.DataType) -> bool:
    """Return True if a column holds binary values."""
    kind = plain_type(kind)
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def is_float(kind: pa.DataType) -> bool:
    """Return True if a column holds floats, whose nulls become NaN."""
    return pt.is_floating(plain_type(kind))
