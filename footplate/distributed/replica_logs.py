"""The logs of a module's copies that train side by side, merged as if one copy had seen the whole batch.

Each copy's calls of `self.log` are kept apart (`MetricLog.apart`). Afterwards, the first call of a name by every copy
becomes one call, then the second, and so on. Values are combined in the order of copies, by the name's reduction:

    "mean"         weighted by rows, or by the `batch_size` of the call
    "sum"          added up
    "min", "max"   the least, the greatest
    a function     gets every copy's value
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from footplate.distributed.batch_splitting import weighted
from footplate.hardware.transfer import to_device


class Logged(NamedTuple):
    """One call of `self.log`, with its arguments under their names. `footplate.Module.log` describes them."""

    name: str
    value: Any
    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str | Callable[[Tensor], Tensor] = "mean"
    sync_dist: bool = False
    add_dataloader_idx: bool = True
    batch_size: float | Tensor | None = None


def together(calls: Sequence[Sequence[Logged]], rows: Sequence[int], device: torch.device) -> list[Logged]:
    """Merge the calls of several copies into those of one.

    Args:
        calls: the calls of each copy.
        rows: the number of rows of each copy.
        device: where tensors are combined.
    """
    # The entries of all copies, by name and by how often the name was logged before.
    matching: dict[tuple[str, int], list[tuple[Logged, int]]] = {}
    for calls_of_copy, count in zip(calls, rows, strict=True):
        repeats: dict[str, int] = {}
        for call in calls_of_copy:
            repeat = repeats[call.name] = repeats.get(call.name, 0) + 1
            matching.setdefault((call.name, repeat), []).append((call, count))
    return [merged for same in matching.values() for merged in _merged(same, device)]


def _merged(same: Sequence[tuple[Logged, int]], device: torch.device) -> list[Logged]:
    first = same[0][0]
    values = [call.value for call, _ in same]
    if callable(first.reduce_fx) and first.reduce_fx not in (torch.mean, torch.sum, torch.min, torch.max):
        return [call._replace(batch_size=1) for call, _ in same]
    kind = first.reduce_fx if isinstance(first.reduce_fx, str) else first.reduce_fx.__name__
    weights = [float(rows if call.batch_size is None else call.batch_size) for call, rows in same]
    total = sum(weights)
    if kind == "mean":
        # Leave out values without weight: a mean over nothing may be NaN.
        weighted_ones = [index for index, weight in enumerate(weights) if weight]
        if weighted_ones:
            values = [values[index] for index in weighted_ones]
            weights = [weights[index] / total for index in weighted_ones]
        else:
            weights = [1 / len(same)] * len(same)
        return [first._replace(value=_weighted(values, weights, device), batch_size=total)]
    if kind == "sum":
        return [first._replace(value=_weighted(values, [1.0] * len(same), device))]
    if not any(isinstance(value, Tensor) for value in values):
        return [first._replace(value=min(values) if kind == "min" else max(values))]
    stacked = torch.stack([_tensor(value, device) for value in values])
    return [first._replace(value=stacked.amin() if kind == "min" else stacked.amax())]


def _weighted(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        return sum(float(value) * weight for value, weight in zip(values, weights, strict=True))
    return weighted(list(zip((_tensor(value, device) for value in values), weights, strict=True)), device)


def _tensor(value: Any, device: torch.device) -> Tensor:
    """Convert a one-element value to a tensor of no dimension, on a device."""
    if isinstance(value, Tensor):
        return to_device(value.detach().reshape(()), device)
    return torch.tensor(float(value), device=device)
