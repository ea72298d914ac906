"""Broadcasts and gathers of whole models, optimizers and Python objects.

Objects are pickled with cloudpickle, as in Horovod. The ranks of a job trust each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from footplate.compat.horovod.submit import send
from footplate.compat.horovod.verbs import allgather, broadcast_
from footplate.compat.horovod.world import ProcessSet, context, global_process_set
from footplate.core.errors import ConfigError


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with those of rank `root_rank`.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: the rank whose values are sent.
        process_set: the ranks that take part.

    Raises:
        ConfigError: a value that is not a tensor.
        MismatchError: the ranks have different names, shapes or types.

    Examples:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else [_named(param) for param in params]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"broadcast_parameters: {name or 'one of params'} is {type(tensor).__name__}, expected a tensor. "
                "Send other values with hvd.broadcast_object."
            )
    parts = ", ".join(name for name, _ in named)
    tensors = [tensor for _, tensor in named]
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        on_device = [tensor for tensor in tensors if tensor.device == device]
        label = f"broadcast_parameters.{device.type}"
        send(on_device, root_rank, label, process_set, parts if on_device == tensors else "").in_place().result()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Send the state and the options (learning rate, …) of the optimizer of rank `root_rank` to all ranks.

    Tensors are sent as tensors, everything else as one object. `model` is accepted and not needed.

    Examples:
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    is_root = context().world.rank == root_rank
    tensors: list[Tensor] = []
    plan = broadcast_object(_without_tensors(optimizer.state_dict(), tensors) if is_root else None, root_rank)
    if not is_root:
        _allocate_tensors(plan, tensors)
    for index, tensor in enumerate(tensors):
        tensors[index] = tensor.detach().clone() if is_root else tensor
    if tensors:
        send(tensors, root_rank, "broadcast_optimizer_state").in_place().result()
    if not is_root:
        optimizer.load_state_dict(_with_tensors(plan))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the `obj` of rank `root_rank` on all ranks. The `obj` of the other ranks is ignored.

    Examples:
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    label = name or "broadcast_object"
    is_root = context().world.rank == root_rank
    data = bytearray(cloudpickle.dumps(obj)) if is_root else bytearray()
    length = broadcast_(torch.tensor([len(data)]), root_rank, f"{label}.length", process_set)
    received = torch.frombuffer(data, dtype=torch.uint8) if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(received, root_rank, f"{label}.data", process_set)
    return obj if is_root else cloudpickle.loads(received.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the `obj` of every rank, in the order of ranks.

    Examples:
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}]
    """
    label = name or "allgather_object"
    data = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(data)]), f"{label}.lengths", process_set)
    gathered = allgather(data, f"{label}.data", process_set)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in gathered.split(lengths.tolist())]


def _named(param: Any) -> tuple[str, Any]:
    return param if isinstance(param, tuple) else ("", param)


@dataclass
class _Missing:
    """Stands for a tensor in a state that is sent without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Take the tensors out of a state, in their order."""
    if isinstance(value, Tensor):
        tensors.append(value.cpu())
        return _Missing(tuple(value.shape), value.dtype)
    return _mapped(value, lambda item: _without_tensors(item, tensors))


def _allocate_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Allocate the tensors of a state, in the same order."""
    if isinstance(value, _Missing):
        value.tensor = torch.empty(value.shape, dtype=value.dtype)
        tensors.append(value.tensor)
        return value
    return _mapped(value, lambda item: _allocate_tensors(item, tensors))


def _with_tensors(value: Any) -> Any:
    return value.tensor if isinstance(value, _Missing) else _mapped(value, _with_tensors)


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(function(item) for item in value)
    return value
