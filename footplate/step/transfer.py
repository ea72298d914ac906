"""Batches to devices: every tensor inside a nested batch, whatever holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from footplate.hooks import overrides


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor on `device`; anything that has a `.to(device)` of its own is asked to move itself.

    Copies from pinned memory don't wait for the device.
    """
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def make_transfer(module: Any, datamodule: Any, device: torch.device) -> Callable[[Any, int], Any] | None:
    """The function that brings a batch of a loader (by its index) to the device, or None where there is nothing to do.

    The three batch-transfer hooks are the data module's where it overrides them, else the module's.
    """
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    own = [next((one for one in (datamodule, module) if one is not None and overrides(one, n)), None) for n in names]
    if device.type == "cpu" and all(one is None for one in own):
        return None
    before, move, after = own

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, dataloader_idx)
        elif device.type != "cpu":
            batch = to_device(batch, device)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return transfer


def map_tensors(batch: Any, function: Any) -> Any:
    """`batch` with `function` applied to every tensor (and to objects with a `.to`), its containers kept as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in batch.items()}
        return mapped if type(batch) is dict else rebuild(batch, mapped)
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


def as_tensors(data: Any, device: torch.device) -> Any:
    """`data` with its numbers made tensors, and every tensor on a device."""
    if isinstance(data, (bool, int, float)):
        return torch.tensor(data, device=device)
    if isinstance(data, Mapping):
        return {key: as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(as_tensors(value, device) for value in data)
    return data.to(device) if isinstance(data, Tensor) else data


def detach(output: Any) -> Any:
    """What a step returned, without its graph."""
    if isinstance(output, Tensor):
        return output.detach() if output.requires_grad else output
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output


def rebuild(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """A mapping of another type (transformers' BatchEncoding, OrderedDict …) with new values."""
    try:
        copied = batch.copy()  # type: ignore[attr-defined]
        copied.update(mapped)
    except (AttributeError, TypeError):
        return mapped
    return copied
