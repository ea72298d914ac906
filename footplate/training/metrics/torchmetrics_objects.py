"""Torchmetrics objects, recognised by their methods, and whether their states can be gathered from all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_torchmetric(value: Any) -> bool:
    """Return True for an object of torchmetrics."""
    return isinstance(value, nn.Module) and hasattr(value, "compute") and hasattr(value, "reset")


def list_lengths(metric: Any) -> dict[str, int]:
    """Return the number of tensors in each state that is a list."""
    states = {name: getattr(metric, name) for name in getattr(metric, "_defaults", ())}
    return {name: len(value) for name, value in states.items() if isinstance(value, list)}


def would_deadlock(metric: Any, items: list[dict[str, int]], ranks: int) -> bool:
    """Return True if torchmetrics' own gathering would wait for a tensor that a rank doesn't have.

    Torchmetrics gathers lists of tensors one by one. A metric that gathers in a way of its own is left alone.
    """
    nested = any(part is not metric and hasattr(part, "_defaults") for part in metric.modules())
    if nested or type(metric)._sync_dist.__qualname__ != "Metric._sync_dist":
        return False
    items = [*items, *[{}] * (ranks - len(items))]
    for name in dict.fromkeys(name for of_rank in items for name in of_rank):
        counts = {of_rank.get(name, 0) for of_rank in items}
        # A "cat" state is joined to one tensor before it is gathered.
        joined = "cat" in getattr(metric._reductions[name], "__name__", "")
        if len(counts) > 1 and (not joined or 0 in counts):
            return True
    return False


def gather_over(module: nn.Module, group: Any) -> None:
    """Let the torchmetrics objects of a module gather their states over a process group, unless they have one.

    Ranks that read the same rows would count them several times.
    """
    for part in module.modules():
        if is_torchmetric(part) and getattr(part, "process_group", group) is None:
            part.process_group = group


def gather_over_all(module: nn.Module, group: Any) -> None:
    """Undo `gather_over`, so that the module can be copied: a process group can't."""
    for part in module.modules():
        if is_torchmetric(part) and getattr(part, "process_group", None) is group:
            part.process_group = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def to_device(value: Any, device: torch.device) -> Any:
    """Return a state with its tensors on a device."""
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value
