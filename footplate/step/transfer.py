"""Batches to devices: every tensor inside a nested batch, whatever holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor on `device`; anything that has a `.to(device)` of its own is asked to move itself.

    Copies from pinned memory don't wait for the device.
    """
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def map_tensors(batch: Any, function: Any) -> Any:
    """`batch` with `function` applied to every tensor (and to objects with a `.to`), its containers kept as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in batch.items()}
        return mapped if type(batch) is dict else _rebuild(batch, mapped)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, function) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {f.name: map_tensors(getattr(batch, f.name), function) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **changed)
    if callable(getattr(batch, "to", None)):
        return function(batch)
    return batch


def detach(output: Any) -> Any:
    """What a step returned, without its graph."""
    if isinstance(output, Tensor):
        return output.detach() if output.requires_grad else output
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output


def _rebuild(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """A mapping of another type (transformers' BatchEncoding, OrderedDict …) with new values."""
    try:
        copied = batch.copy()  # type: ignore[attr-defined]
        copied.update(mapped)
    except (AttributeError, TypeError):
        return mapped
    return copied
