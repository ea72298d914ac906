"""Copying batches to devices: all tensors inside a nested batch of any type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from footplate.core.hooks import overrides

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a batch to a device. An object with its own `.to(device)` is moved with that method.

    Copies from pinned memory don't wait for the device. A copy to the CPU is complete when this returns.
    """
    # Code on the CPU may read the copy at once.
    waits = device.type == "cpu"

    def move(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(device, non_blocking=not waits)
        # `.to` may move the object in place and return None.
        moved = item.to(device)
        return item if moved is None else moved

    return map_tensors(batch, move, moves_itself)


def make_transfer(
    module: Any, datamodule: Any, device: torch.device, moved: bool = False
) -> Callable[[Any, int], Any] | None:
    """Make the function that copies a batch of a loader (by its index) to the device; None if there is nothing to do.

    Each of the three batch-transfer hooks is the data module's if it overrides the hook, otherwise the module's.

    Args:
        module: the module.
        datamodule: its data module, if it has one.
        device: the target device.
        moved: True if the batch is already there (see `moves_plainly`), so that only `on_after_batch_transfer` is left.
    """
    before, move, after = (_owner(module, datamodule, name) for name in TRANSFER_HOOKS)
    if moved:
        return None if after is None else after.on_after_batch_transfer
    if device.type == "cpu" and before is None and move is None and after is None:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if move is not None:
            batch = move.transfer_batch_to_device(batch, device, dataloader_idx)
        elif device.type != "cpu":
            batch = to_device(batch, device)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return transfer


def moves_plainly(module: Any, datamodule: Any) -> bool:
    """Return True if no hook takes part in the copy of a batch, so that it may be copied before its step."""
    return all(_owner(module, datamodule, name) is None for name in TRANSFER_HOOKS[:2])


def _owner(module: Any, datamodule: Any, name: str) -> Any:
    """The object whose batch-transfer hook counts; None if no object overrides it."""
    return next((owner for owner in (datamodule, module) if owner is not None and overrides(owner, name)), None)


def moves_itself(batch: Any) -> bool:
    """Return True for an object with its own `.to` that is no tensor: PyG's `Data`, `PackedSequence`, `BatchEncoding`."""
    return not isinstance(batch, Tensor) and not isinstance(batch, type) and callable(getattr(batch, "to", None))


def map_tensors(batch: Any, function: Any, whole: Callable[[Any], bool] | None = None) -> Any:
    """Apply a function to every tensor of a batch, and to objects with a `.to`. The types of containers are kept.

    Args:
        batch: a nested batch.
        function: a function of a tensor or of such an object.
        whole: returns True for a container that `function` gets as a whole.
    """
    if isinstance(batch, Tensor) or (whole is not None and whole(batch)):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, whole) for key, value in batch.items()}
        return mapped if type(batch) is dict else rebuild(batch, mapped)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, whole) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, function, whole) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {
            f.name: map_tensors(getattr(batch, f.name), function, whole) for f in dataclasses.fields(batch) if f.init
        }
        return dataclasses.replace(batch, **changed)
    if callable(getattr(batch, "to", None)):
        return function(batch)
    return batch


def movable(batch: Any) -> Iterator[Any]:
    """Yield every tensor and every object with a `.to` in a nested batch; a mapping with a `.to` yields its values."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from movable(value)
    elif moves_itself(batch):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from movable(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from movable(getattr(batch, field.name))


def as_tensors(data: Any, device: torch.device) -> Any:
    """Convert the numbers in `data` to tensors, and copy all tensors to a device."""
    if isinstance(data, (bool, int, float)):
        return torch.tensor(data, device=device)
    if isinstance(data, Mapping):
        return {key: as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(as_tensors(value, device) for value in data)
    return data.to(device) if isinstance(data, Tensor) else data


def detach(output: Any) -> Any:
    """Detach the output of a step from its graph."""
    if isinstance(output, Tensor):
        return output.detach() if output.requires_grad else output
    if isinstance(output, Mapping):
        return {key: detach(value) for key, value in output.items()}
    return output


def rebuild(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Copy a mapping of any type (transformers' BatchEncoding, OrderedDict …) with new values."""
    try:
        copied = batch.copy()  # type: ignore[attr-defined]
        copied.update(mapped)
    except (AttributeError, TypeError):
        return mapped
    return copied


def batch_rows(batch: Any) -> int:
    """Count the rows of a batch: the first dimension of its first tensor; 1 without a tensor."""
    return next(_row_counts(batch), 1)


def _row_counts(batch: Any) -> Iterator[int]:
    """Yield the first dimensions of a batch's tensors, or the lengths of its lists of strings, in order."""
    if isinstance(batch, Tensor):
        yield batch.shape[0] if batch.ndim else 1
    elif isinstance(batch, str):
        yield len(batch)
    elif isinstance(batch, dict):
        for item in batch.values():
            yield from _row_counts(item)
    elif isinstance(batch, (list, tuple)):
        if batch and isinstance(batch[0], str):
            yield len(batch)
        for item in batch:
            yield from _row_counts(item)
    elif hasattr(batch, "__dict__"):
        for item in vars(batch).values():
            yield from _row_counts(item)
