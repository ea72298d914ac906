"""Transforms of a batch: a user's function of a pandas frame, and types of columns.

`TransformSpec` is Petastorm's description of a transform. `transform_batch` applies one to a batch of a plain table. The
rows of a table with a Unischema have a transform of their own, in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from footplate.compat.petastorm.rows import kept_columns
from footplate.core.optional import require

DTYPES = {None: None, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TransformSpec:
    """A function of a pandas frame of rows, and a description of the columns that it returns.

    Attributes:
        func: takes and returns a frame (a dict of one row, in `make_reader` over a table with a Unischema). None only
            drops and selects columns.
        edit_fields: `(name, numpy dtype, shape, nullable)` of columns that the function makes or changes; see
            `edit_field`. Values get this type, and a value of another shape is an error.
        removed_fields: columns that are left out after the function.
        selected_fields: the only columns that remain after the function, in this order.

    Examples:
        >>> from footplate.compat.petastorm import TransformSpec, make_batch_reader
        >>> def halve(frame):
        ...     frame["half"] = frame["label"] / 2
        ...     return frame
        >>> spec = TransformSpec(halve, edit_fields=[("half", "float32", (), False)], removed_fields=["x"])
        >>> with make_batch_reader("flowers.parquet", transform_spec=spec, shuffle_row_groups=False) as reader:
        ...     next(reader).half
        array([0. , 0.5, 1. , 0. , 0.5, 1. , 0. , 0.5], dtype=float32)
    """

    func: Callable[[Any], Any] | None = None
    edit_fields: Sequence[tuple[Any, ...]] | None = None
    removed_fields: Sequence[str] | None = None
    selected_fields: Sequence[str] | None = None


def edit_field(name: str, numpy_dtype: Any, shape: tuple[int | None, ...], nullable: bool = False) -> tuple[Any, ...]:
    """Describe a column for `TransformSpec(edit_fields=…)`.

    Examples:
        >>> from footplate.compat.petastorm import TransformSpec, edit_field
        >>> spec = TransformSpec(edit_fields=[edit_field("half", "float32", ())])
    """
    return name, numpy_dtype, shape, nullable


def transform_batch(
    spec: TransformSpec | None, dtype: str | None, batch: dict[str, Any], ragged: Sequence[str]
) -> dict[str, Any]:
    """Apply a transform to a batch, and convert its floating-point columns.

    Args:
        spec: the transform; None for none.
        dtype: "float32" or "float64"; None keeps the columns' types.
        batch: its columns by name: tensors, or lists for text and bytes.
        ragged: columns of lists of different lengths. They are padded, and a column `NAME_length` has the lengths.
    """
    if spec is not None:
        batch = _transform(spec, batch, ragged)
    wanted = DTYPES[dtype]
    if wanted is None:
        return batch
    converted = (torch.float32, torch.float64)
    return {
        name: values.to(wanted) if isinstance(values, torch.Tensor) and values.dtype in converted else values
        for name, values in batch.items()
    }


def _transform(spec: TransformSpec, batch: dict[str, Any], ragged: Sequence[str]) -> dict[str, Any]:
    pandas = require("pandas", "petastorm", "TransformSpec")

    # The user's function gets lists of their true lengths, and no columns of lengths.
    lengths = {name: f"{name}_length" for name in ragged}
    columns = [name for name in batch if name not in lengths.values()]
    frame = pandas.DataFrame({name: _column(batch[name], batch.get(lengths.get(name, ""))) for name in columns})
    if spec.func is not None:
        frame = spec.func(frame)

    edited = {field[0]: field for field in spec.edit_fields or ()}
    return {str(name): _tensor(frame[name].tolist(), edited.get(name)) for name in kept_columns(spec, frame.columns)}


def _column(values: Any, lengths: torch.Tensor | None) -> Any:
    """A column of a batch as a column of a frame."""
    if not isinstance(values, torch.Tensor):
        return values
    if lengths is not None:
        return [row[:length].numpy() for row, length in zip(values, lengths.tolist(), strict=True)]
    return values.numpy() if values.ndim == 1 else list(values.numpy())


def _tensor(values: list[Any], field: tuple[Any, ...] | None) -> Any:
    """A column of a frame as a tensor, of the type and shape that `edit_fields` states; text stays a list."""
    if not values or isinstance(values[0], (str, bytes)) or values[0] is None:
        return values
    array = np.stack([np.asarray(value) for value in values])
    if field is not None:
        array = array.astype(field[1], copy=False)
        shape = tuple(size if size is not None else -1 for size in field[2] or ())
        array = array.reshape(len(values), *shape)
    return torch.from_numpy(np.ascontiguousarray(array))
