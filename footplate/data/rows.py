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

from footplate.errors import ConfigError, DataError

Row = dict[str, Any]
Transform = Callable[..., Row]


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


def unbatch(batch: dict[str, Any], rows: int) -> list[Row]:
    """The rows of a collated batch, as a transform sees them."""
    columns: dict[str, Any] = {}
    for name, values in batch.items():
        if name.removesuffix("_length") in batch and name.endswith("_length"):
            continue
        lengths = batch.get(f"{name}_length")
        if lengths is not None and isinstance(values, torch.Tensor):
            columns[name] = [values[row, :length] for row, length in enumerate(lengths.tolist())]
        elif isinstance(values, torch.Tensor) and values.ndim == 1:
            columns[name] = list(values.numpy()) if values.is_floating_point() else values.tolist()
        else:
            columns[name] = values
    return [{name: values[row] for name, values in columns.items()} for row in range(rows)]


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """A batch of what a transform returned: tensors are stacked, numbers become tensors, anything else a list.

    Raises:
        DataError: rows of different keys, or tensors of different shapes.
    """
    names = rows[0].keys()
    for row in rows:
        if not isinstance(row, dict) or row.keys() != names:
            raise DataError(
                f"transform= returned {_keys(row)} for one row and {_keys(rows[0])} for another; rows need equal keys."
            )
    return {name: _stack(name, [row[name] for row in rows]) for name in names}


def _stack(name: str, values: list[Any]) -> Any:
    first = values[0]
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


def _keys(row: Any) -> str:
    return ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
