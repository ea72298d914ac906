"""The user's function of a row (`transform=`): its arguments, and how its results become a batch.

    def augment(row, rng):                      # rng: a numpy Generator that belongs to this row in this epoch
        if rng.random() < 0.5:
            row["image"] = row["image"].flip(-1)
        return row

A row is a dict. An image is a uint8 tensor (channels, height, width), an integer an int, a float a numpy scalar (so it
keeps its width), a list a tensor, text a str. The transform returns a dict, which may have other keys. It is called
from several threads, or in several processes (`num_workers=`).

If the transform has a parameter named `rng`, it gets the row's generator. Draw from nothing else, and a run can be repeated
and resumed exactly. The random transforms of torchvision draw from torch's global generator instead. They work, but their
draws don't repeat.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from footplate.core.errors import ConfigError, DataError

Row = dict[str, Any]
Transform = Callable[..., Row]

_NUMBERS = (bool, int, float, np.bool_, np.number, torch.Tensor, np.ndarray)


def takes_rng(transform: Transform) -> bool:
    """Return True if a transform has a parameter named `rng`.

    Raises:
        ConfigError: the transform can't be called.
    """
    if not callable(transform):
        raise ConfigError(f"transform={transform!r}: expected a function of a row, or of (row, rng).")
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):
        return False


def row_generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Return the generator of a row in an epoch. `row` is the row's number in the table."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, row, 0, 0]))


def unbatch(batch: dict[str, Any], rows: int, ragged: Sequence[str] = ()) -> list[Row]:
    """Split a collated batch into rows, as a transform gets them.

    Args:
        batch: the values of the batch.
        rows: the number of its rows.
        ragged: its columns of padded lists.
    """
    columns: dict[str, Any] = {}
    length_columns = {f"{name}_length" for name in ragged}
    for name, values in batch.items():
        if name in length_columns:
            continue
        if name in ragged:
            lengths = batch[f"{name}_length"]
            columns[name] = [values[row, :length] for row, length in enumerate(lengths.tolist())]
        elif isinstance(values, torch.Tensor) and values.ndim == 1:
            columns[name] = list(values.numpy()) if values.is_floating_point() else values.tolist()
        else:
            columns[name] = values
    return [{name: values[row] for name, values in columns.items()} for row in range(rows)]


def collate(rows: Sequence[Row], ragged: Sequence[str] = ()) -> dict[str, Any]:
    """Make a batch of the rows that a transform returned.

    Tensors are stacked, numbers become tensors, anything else becomes a list.

    Args:
        rows: the rows that the transform returned.
        ragged: the table's columns of lists. If their values are still lists, they are padded, as without a transform.

    Raises:
        DataError: rows of different keys, or tensors of different shapes.
    """
    names = rows[0].keys()
    for row in rows:
        if row.keys() != names:
            raise DataError(
                f"transform= returned {', '.join(row)} for one row and {', '.join(names)} for another. Return "
                "the same keys for every row."
            )

    batch: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in rows]
        if name in ragged and f"{name}_length" not in names and all(map(_is_list_of_numbers, values)):
            batch[name], batch[f"{name}_length"] = _padded(values)
        else:
            batch[name] = _stack(name, values)
    return batch


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 1


def _padded(values: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lists filled with 0, (rows, longest), and their lengths, (rows,)."""
    tensors = [torch.as_tensor(value) for value in values]
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), lengths


def _stack(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, _NUMBERS) and not all(isinstance(value, _NUMBERS) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DataError(
            f"transform= returned {name!r} as {kinds}, which don't go together in a batch. Return "
            "one type for every row."
        )

    if isinstance(first, (torch.Tensor, np.ndarray)):
        tensors = [torch.as_tensor(value) for value in values]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise DataError(
                f"transform= returned {name!r} in different shapes ({', '.join(map(str, sorted(shapes)[:4]))}), which "
                "can't be stacked into a batch. Make them equal (image_size= does so for images)."
            )
        return torch.stack(tensors)

    if isinstance(first, (bool, int, np.bool_, np.integer, np.floating)):
        array = np.asarray(values)
        return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array)
    if isinstance(first, float):
        return torch.tensor(values, dtype=torch.get_default_dtype())
    return values
