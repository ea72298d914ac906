"""Rows of a table with a Unischema: their transform and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from footplate.compat.petastorm.unischema import UnischemaField
from footplate.core.errors import DataError

# Torch has few operations on these types, so Petastorm's loaders give a wider type that holds all values.
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.bool_): np.uint8}


def transform_row(spec: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Apply a `TransformSpec` to a row; its function gets a dict.

    Raises:
        DataError: the function returned a row without a column that the spec names, or a value of another type or shape
            than `edit_fields` states.
    """
    if spec.func is not None:
        row = spec.func(row)
    fields = {name: UnischemaField(name, kind, tuple(shape or ())) for name, kind, shape in _edited(spec)}
    return {name: fields[name].decode(row[name]) if name in fields else row[name] for name in kept_columns(spec, row)}


def kept_columns(spec: Any, columns: Iterable[str]) -> list[str]:
    """The columns that a `TransformSpec` keeps, of the columns that its function returned.

    Raises:
        DataError: the function returned no column of a name in `selected_fields` or `edit_fields`.
    """
    returned = list(columns)
    removed = set(spec.removed_fields or ())
    kept = list(spec.selected_fields or [name for name in returned if name not in removed])
    edited = [] if spec.selected_fields else [name for name, *_ in _edited(spec) if name not in removed]
    missing = [name for name in [*kept, *edited] if name not in returned]
    if missing:
        raise DataError(
            f"TransformSpec: its function returned no column {missing[0]!r}, only {', '.join(map(str, returned))}."
        )
    return kept


def _edited(spec: Any) -> list[tuple[str, Any, Any]]:
    """Name, type and shape of the columns in `edit_fields`, which may be tuples or fields of a Unischema."""
    return [(field[0], field[1], field[2]) for field in spec.edit_fields or ()]


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a batch of rows: a tensor for each column of numbers, a list for text, Decimals and times.

    Raises:
        DataError: a value is None, or the values of a column have several shapes.
    """
    return {name: _collate(name, [row[name] for row in rows]) for name in rows[0]}


def decimal_friendly_collate(batch: Sequence[Any]) -> Any:
    """Torch's `default_collate` for rows with Decimals: these stay a list (a tuple, in rows that are sequences).

    Examples:
        >>> from decimal import Decimal
        >>> from footplate.compat.petastorm import decimal_friendly_collate
        >>> decimal_friendly_collate([{"label": 1, "price": Decimal("2.50")}, {"label": 2, "price": Decimal("3.10")}])
        {'label': tensor([1, 2]), 'price': [Decimal('2.50'), Decimal('3.10')]}
    """
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
