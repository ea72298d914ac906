"""Metrics that ranks have collected in an epoch, merged by pure functions, always in the order of ranks.

A rank's part is a running total in float64 (`Part`). So an epoch's value doesn't depend on the distribution of batches: the
mean over all rows is the sum of all ranks' weighted sums, divided by the sum of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A rank's collected values of one metric.

    Attributes:
        total: the sum (weighted, for a mean), or the least or greatest value.
        weight: the sum of the weights; 0 if nothing was collected.
        values: every value, if the reduction is a function.
    """

    total: float = 0.0
    weight: float = 0.0
    values: list[float] = field(default_factory=list)


def merge(reduce_fx: str | Callable[[Tensor], Tensor] | None, parts: Iterable[Part]) -> Part:
    """Merge the parts of all ranks."""
    parts = [part for part in parts if part.weight or part.values]
    values = [value for part in parts for value in part.values]
    if not parts:
        return Part()
    if reduce_fx in ("min", "max"):
        total = parts[0].total
        for part in parts[1:]:
            total = extreme(str(reduce_fx), total, part.total)
        return Part(total, 1.0, values)
    total, weight = 0.0, 0.0
    for part in parts:
        total, weight = total + part.total, weight + part.weight
    return Part(total, weight if reduce_fx == "mean" else min(weight, 1.0), values)


def reduced(reduce_fx: str | Callable[[Tensor], Tensor] | None, part: Part) -> float | None:
    """The value of an epoch; None if nothing was collected, or if the reduction is a function that isn't known here."""
    if callable(reduce_fx):
        return float(reduce_fx(torch.tensor(part.values, dtype=torch.float64))) if part.values else None
    if not part.weight:
        return None
    return part.total / part.weight if reduce_fx == "mean" else part.total


def extreme(reduce_fx: str, kept: float, value: float) -> float:
    """The lesser ("min") or greater ("max") of two numbers. If one is NaN, the result is NaN."""
    if math.isnan(kept) or math.isnan(value):
        return math.nan
    return min(kept, value) if reduce_fx == "min" else max(kept, value)


def merge_states(states: Sequence[dict[str, Any]], reductions: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Merge the `MetricLog.state_dict()` of several ranks into that of a single rank, with the same totals.

    Args:
        states: in the order of ranks.
        reductions: the reductions of a torchmetrics object by its path in the module, state name → function or None.
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        entries = [state[name] for state in states if name in state]
        first = entries[0]
        parts = [Part(entry["total"], entry["weight"], entry["values"]) for entry in entries]
        part = merge(first["reduce_fx"], parts)
        merged[name] = {**first, "total": part.total, "weight": part.weight, "values": part.values}
        if first["metric"]:
            merged[name]["metric_state"] = merge_metric(
                [entry["metric_state"] for entry in entries], reductions(first["metric"])
            )
    return merged


def gathered(states: Sequence[dict[str, Any]], reductions: dict[str, Any]) -> dict[str, Any]:
    """The states of a torchmetrics object on all ranks, by name, in the form in which the object gathers them."""
    combined: dict[str, Any] = {}
    for name, reduction in reductions.items():
        values = [state[name] for state in states]
        if any(isinstance(value, list) for value in values):
            whole: Any = [item for value in values for item in (value if isinstance(value, list) else [value])]
        else:
            whole = torch.stack(values)
        combined[name] = whole if reduction is None or len(whole) == 0 else reduction(whole)
    return combined


def merge_metric(states: Sequence[dict[str, Any]], reductions: dict[str, Any]) -> dict[str, Any]:
    """Merge the saved states of a torchmetrics object on several ranks into those of one, with the same totals."""
    merged: dict[str, Any] = {"_update_count": sum(state["_update_count"] for state in states)}
    for key, value in states[0].items():
        if key == "_update_count":
            continue
        all_values = [state[key] for state in states]
        if isinstance(value, list):
            merged[key] = [item for items in all_values for item in items]
            continue
        reduction = reductions.get(key)
        stacked = torch.stack(all_values)
        name = getattr(reduction, "__name__", "")
        merged[key] = (
            torch.cat(all_values) if "cat" in name else stacked[0] if reduction is None else reduction(stacked)
        )
    return merged
