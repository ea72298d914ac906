"""What copies of a module log while they train side by side, put together as if one had seen the whole batch.

Each copy's calls of `self.log` are kept apart (`MetricLog.apart`). Afterwards the first call of a name by every copy
becomes one call, then the second, and so on; values are put together in the order of copies, by the name's reduction:

    "mean"         weighted by rows, or by the `batch_size` that was given
    "sum"          added up
    "min", "max"   the least, the greatest
    a function     gets every copy's value
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from footplate.distributed.batch_splitting import weighted
from footplate.hardware.transfer import to_device


@dataclass(frozen=True)
class Logged:
    """One call of `self.log`, with its arguments under their names."""

    name: str
    value: Any
    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[[Tensor], Tensor]
    sync_dist: bool
    add_dataloader_idx: bool
    batch_size: float | Tensor | None


def together(calls: Sequence[Sequence[Logged]], rows: Sequence[int], device: torch.device) -> list[Logged]:
    """The calls of several copies as those of one.

    Args:
        calls: each copy's.
        rows: each copy's number of rows.
        device: where tensors are put together.
    """
    found: dict[tuple[str, int], list[tuple[Logged, int]]] = {}
    for mine, count in zip(calls, rows, strict=True):
        seen: dict[str, int] = {}
        for call in mine:
            turn = seen[call.name] = seen.get(call.name, 0) + 1
            found.setdefault((call.name, turn), []).append((call, count))
    return [one for same in found.values() for one in _one(same, device)]


def _one(same: Sequence[tuple[Logged, int]], device: torch.device) -> list[Logged]:
    first = same[0][0]
    values = [call.value for call, _ in same]
    if callable(first.reduce_fx) and first.reduce_fx not in (torch.mean, torch.sum, torch.min, torch.max):
        return [replace(call, batch_size=1) for call, _ in same]
    kind = first.reduce_fx if isinstance(first.reduce_fx, str) else first.reduce_fx.__name__
    weights = [float(rows if call.batch_size is None else call.batch_size) for call, rows in same]
    total = sum(weights)
    if kind == "mean":
        weighing = [index for index, weight in enumerate(weights) if weight]  # a mean over nothing may be NaN
        if weighing:
            values, weights = [values[index] for index in weighing], [weights[index] / total for index in weighing]
        else:
            weights = [1 / len(same)] * len(same)
        return [replace(first, value=_weighted(values, weights, device), batch_size=total)]
    if kind == "sum":
        return [replace(first, value=_weighted(values, [1.0] * len(same), device))]
    if not any(isinstance(value, Tensor) for value in values):
        return [replace(first, value=min(values) if kind == "min" else max(values))]
    stacked = torch.stack([_tensor(value, device) for value in values])
    return [replace(first, value=stacked.amin() if kind == "min" else stacked.amax())]


def _weighted(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        return sum(float(value) * weight for value, weight in zip(values, weights, strict=True))
    return weighted(list(zip((_tensor(value, device) for value in values), weights, strict=True)), device)


def _tensor(value: Any, device: torch.device) -> Tensor:
    """A one-element value as a tensor of no dimension, on a device."""
    if isinstance(value, Tensor):
        return to_device(value.detach().reshape(()), device)
    return torch.tensor(float(value), device=device)
