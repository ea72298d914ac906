"""Cut a batch into rows for several copies of a model, and join the outputs of the copies.

    {"image": (10, 3, 8, 8), "name": 10 strings, "scale": 0.5}   in 4   →   3 + 3 + 2 + 2 rows, each with the scale

The rows of a batch are the first dimension of its tensors, wherever in the batch they are. The first tensor gives their
number. Lists and tuples of that length without tensors (names, for instance) are cut too. Objects without rows go to all
copies: numbers, texts, tensors of no dimension. A batch whose rows are ambiguous is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from footplate.core.errors import ConfigError
from footplate.distributed.loss_sum import LOSS_SUM, WEIGHT
from footplate.hardware.transfer import rebuild, to_device


@dataclass(frozen=True)
class Piece:
    """The piece of a batch for one copy.

    Attributes:
        batch: of the same structure as the whole batch.
        rows: its number of rows.
        share: its part of the whole batch, 0 … 1.
    """

    batch: Any
    rows: int
    share: float


def cut(batch: Any, count: int) -> list[Piece]:
    """Cut a batch into `count` pieces with almost the same number of rows, the larger pieces first.

    If there are fewer rows than `count`, there are fewer pieces.

    Raises:
        ConfigError: the batch has no tensor with rows, tensors of different lengths, or an object with unknown rows.
    """
    rows = _rows(batch)
    if rows is None:
        raise _refused("no tensor in it has a first dimension")
    count = max(1, min(count, rows))
    edges = [-(-rows * index // count) for index in range(count + 1)]
    return [
        Piece(_slice(batch, rows, start, stop), stop - start, (stop - start) / rows if rows else 1.0)
        for start, stop in itertools.pairwise(edges)
    ]


def joined(outputs: Sequence[Any], pieces: Sequence[Piece], device: torch.device) -> Any:
    """Join the outputs of several training steps to that of one step with the whole batch, detached, on one device.

    Losses and tensors of no dimension become their mean, weighted by rows. A sum of losses and its weight are added up.
    Tensors with rows are concatenated. Anything else becomes a list. A copy that returned None counts as a loss of 0.
    """
    present = [(output, piece.share) for output, piece in zip(outputs, pieces, strict=True) if output is not None]
    if not present:
        return None
    first = present[0][0]
    if isinstance(first, Mapping):
        sums = (LOSS_SUM, WEIGHT) if LOSS_SUM in first else ()
        return {
            key: _added([output.get(key) for output, _ in present], device)
            if key in sums
            else _combined([(output.get(key), share) for output, share in present], key == "loss", device)
            for key in first
        }
    return _combined(present, True, device) if isinstance(first, Tensor) else first


def _combined(weighted_values: Sequence[tuple[Any, float]], is_loss: bool, device: torch.device) -> Any:
    values = [value for value, _ in weighted_values]
    if not all(isinstance(value, Tensor) for value in values):
        return values
    if all(value.numel() == 1 if is_loss else value.ndim == 0 for value in values):
        return weighted(weighted_values, device)
    return torch.cat([to_device(value.detach(), device) for value in values])


def _added(values: Sequence[Any], device: torch.device) -> Any:
    """The sum of numbers or one-element tensors. If one is neither, return it, so that the step raises."""
    wrong = [value for value in values if not isinstance(value, (Tensor, int, float))]
    if wrong:
        return wrong[0]
    total, *others = [value.detach().to(device) if isinstance(value, Tensor) else value for value in values]
    for other in others:
        total = total + other
    return total


def weighted(values: Sequence[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """The sum of one-element tensors times their weights, in their order, on one device."""
    total, *others = [to_device(value.detach(), device) * weight for value, weight in values]
    for other in others:
        total = total + other
    return total


def _rows(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch that has one."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else None
    return next((rows for rows in map(_rows, _inside(batch)) if rows is not None), None)


def _inside(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def _slice(batch: Any, rows: int, start: int, stop: int) -> Any:
    def inner(value: Any) -> Any:
        return _slice(value, rows, start, stop)

    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim and batch.shape[0] != rows:
            raise _refused(f"one of its tensors has the shape {tuple(batch.shape)}, where the first has {rows} rows")
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, (list, tuple)) and not _any_to_cut(batch):
        return batch[start:stop] if len(batch) == rows else batch
    return _mapped(batch, inner)


def _any_to_cut(batch: Any) -> bool:
    """Return True if a container holds something that may have rows of its own."""
    return any(
        isinstance(part, (Tensor, np.ndarray)) or hasattr(part, "to") or _any_to_cut(part) for part in _inside(batch)
    )


def _mapped(batch: Any, inner: Callable[[Any], Any]) -> Any:
    """A container of the same type, with `inner` applied to its content."""
    if isinstance(batch, Mapping):
        mapped = {key: inner(value) for key, value in batch.items()}
        return mapped if type(batch) is dict else rebuild(batch, mapped)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(inner, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: inner(getattr(batch, name)) for name in fields})
    if callable(getattr(batch, "to", None)):
        raise _refused(f"a {type(batch).__name__} in it doesn't say what its rows are")
    return batch


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f'strategy="replicas" cuts each batch into rows, and this one can\'t be cut: {why}. Give batches whose tensors all '
        'have the row as their first dimension, or use strategy="ddp", where each process makes batches of its own.'
    )
