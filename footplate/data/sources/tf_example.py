"""A parser of `tf.train.Example`, without TensorFlow: protobuf messages become features.

An Example is a map of feature names to lists of bytes, floats or int64s.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

# The type of a feature, and its values.
Feature = tuple[pa.DataType, list[Any]]


def parse_example(record: bytes) -> dict[str, Feature] | None:
    """Parse the features of an Example. Return None for any other record, such as a SequenceExample."""
    try:
        parts = list(_fields(memoryview(record)))
        if any(tag != 1 for tag, _ in parts):
            return None
        return dict(_entry(entry) for _, features in parts for inner, entry in _fields(features) if inner == 1)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError, TypeError):
        return None


def _entry(entry: memoryview) -> tuple[str, Feature]:
    parts = dict(_fields(entry))
    name = bytes(parts[1]).decode()
    for kind, values in _fields(parts.get(2, memoryview(b""))):
        items = list(_fields(values))
        if kind == 1:
            return name, (pa.binary(), [bytes(item) for _, item in items])
        if kind == 2:
            return name, (pa.float32(), [number for _, item in items for number in _floats(item)])
        if kind == 3:
            return name, (pa.int64(), [number for _, item in items for number in _ints(item)])
    return name, (pa.binary(), [])


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield field numbers and values of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError("no protobuf message")
        if at + length > len(data):
            raise ValueError("truncated")
        yield key >> 3, data[at : at + length]
        at += length


def _floats(item: memoryview) -> list[float]:
    return np.frombuffer(item, "<f4").tolist()


def _ints(item: Any) -> list[int]:
    if isinstance(item, int):
        return [_signed(item)]
    numbers, at = [], 0
    while at < len(item):
        value, at = _varint(item, at)
        numbers.append(_signed(value))
    return numbers


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
