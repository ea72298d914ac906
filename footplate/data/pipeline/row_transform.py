"""The function that a user gives for each row (`transform=`), and what its results become.

    def augment(row, rng):                      # rng: a numpy Generator that belongs to this row in this epoch
        if rng.random() < 0.5:
            row["image"] = row["image"].flip(-1)
        return row

A row is a dict: an image is a uint8 tensor (channels, height, width), an integer an int, a float a numpy scalar (so it
keeps its width), a list a tensor, text a str. The transform returns a dict, which may have other keys. It is called
from several threads, or in several processes (`num_workers=`). A parameter named `rng` is what makes it take the
generator; draw from nothing else, and a run can be repeated and resumed exactly. (The random transforms of torchvision
draw from torch's global generator instead: they work, but don't repeat.)
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
    """Whether a transform has a parameter named `rng`.

    Raises:
        ConfigError: it can't be called.
    """
    if not callable(transform):
        raise ConfigError(f"transform={transform!r}: expected a function of a row, or of (row, rng).")
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):
        return False


def row_generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """The generator of a row (its number in the table) in an epoch."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, row, 0, 0]))


def unbatch(batch: dict[str, Any], rows: int, ragged: Sequence[str] = ()) -> list[Row]:
    """The rows of a collated batch, as a transform sees them; `ragged` are its columns of lists that were padded."""
    columns: dict[str, Any] = {}
    own_lengths = {f"{name}_length" for name in ragged}
    for name, values in batch.items():
        if name in own_lengths:
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
    """A batch of what a transform returned: tensors are stacked, numbers become tensors, anything else a list.

    Args:
        rows: what it returned.
        ragged: the table's columns of lists: those that still are lists are padded, as without a transform.

    Raises:
        DataError: rows of different keys, or tensors of different shapes.
    """
    names = rows[0].keys()
    for row in rows:
        if row.keys() != names:
            raise DataError(
                f"transform= returned {', '.join(row)} for one row and {', '.join(names)} for another; rows need equal "
                "keys."
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
    """Lists, (rows, longest), filled with 0, and how long each is."""
    tensors = [torch.as_tensor(value) for value in values]
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), lengths


def _stack(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, _NUMBERS) and not all(isinstance(value, _NUMBERS) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DataError(f"transform= returned {name!r} as {kinds}, which don't go together in a batch.")
    if isinstance(first, (torch.Tensor, np.ndarray)):
        tensors = [torch.as_tensor(value) for value in values]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise DataError(
                f"transform= returned {name!r} in different shapes ({', '.join(map(str, sorted(shapes)[:4]))}), which "
                "don't stack into a batch. Make them equal (image_size= does so for images)."
            )
        return torch.stack(tensors)
    if isinstance(first, (bool, int, np.bool_, np.integer, np.floating)):
        array = np.asarray(values)
        return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array)
    if isinstance(first, float):
        return torch.tensor(values, dtype=torch.get_default_dtype())
    return values
