"""Rows with a Unischema: their transform, and how a list of them becomes a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from footplate.errors import DataError

# Torch computes little with these types, so Petastorm's loaders give the type that holds all of their values.
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.bool_): np.uint8}


def transform_row(spec: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A row through a `TransformSpec`, whose function is given a dict.

    Raises:
        DataError: the function returned a row without a selected column.
    """
    if spec.func is not None:
        row = spec.func(row)
    names = spec.selected_fields or [name for name in row if name not in set(spec.removed_fields or ())]
    missing = [name for name in names if name not in row]
    if missing:
        raise DataError(f"TransformSpec: its function returned no column {missing[0]!r}, only {', '.join(row)}.")
    return {name: row[name] for name in names}


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of rows: a tensor for each column of numbers, a list for text, Decimals and times.

    Raises:
        DataError: a value of numbers is None, or the values of a column have several shapes.
    """
    return {name: _collate(name, [row[name] for row in rows]) for name in rows[0]}


def decimal_friendly_collate(batch: Sequence[Any]) -> Any:
    """Torch's `default_collate`, which also takes Decimals: they stay a list (a tuple, in rows that are sequences)."""
    first = batch[0]
    if isinstance(first, Decimal):
        return batch
    if isinstance(first, Mapping):
        return {name: decimal_friendly_collate([row[name] for row in batch]) for name in first}
    if isinstance(first, (tuple, list)):
        columns = [decimal_friendly_collate(column) for column in zip(*batch, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    return default_collate(list(batch))


def _collate(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        raise DataError(
            f"Column {name!r} has a None, which no tensor can hold. Leave it out with schema_fields=, replace it in a "
            "transform_spec, or pass a collate_fn."
        )
    if isinstance(values[0], Decimal):
        return values
    arrays = [np.asarray(value) for value in values]
    if arrays[0].dtype.kind not in "biuf":
        return values
    if len({array.shape for array in arrays}) > 1:
        raise DataError(
            f"Column {name!r} has values of several shapes. Pad them in a transform_spec, or pass a collate_fn."
        )
    stacked = np.stack(arrays)
    return torch.from_numpy(stacked.astype(_WIDER.get(stacked.dtype, stacked.dtype), copy=False))
