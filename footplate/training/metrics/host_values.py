"""Host floats of values that are still on devices, read in one transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from footplate.core.device_scalar import DeviceScalar
from footplate.core.errors import ConfigError


def to_floats(values: Iterable[Any], name: str = "a metric") -> list[float]:
    """Return host floats of numbers and one-element tensors, with one transfer for each device and type."""
    values = list(values)
    result: list[float] = [0.0] * len(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    later: dict[type[DeviceScalar], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            groups.setdefault((value.device, value.dtype), []).append(index)
        elif isinstance(value, DeviceScalar):
            later.setdefault(type(value), []).append(index)
        else:
            result[index] = float(value)

    for kind, indices in later.items():
        for index, number in zip(indices, kind.read([values[index] for index in indices]), strict=True):
            result[index] = number

    # One transfer for all tensors of a device and type.
    for indices in groups.values():
        tensors = [values[index] for index in indices]
        if any(tensor.ndim for tensor in tensors):
            if any(tensor.numel() != 1 for tensor in tensors):
                raise ConfigError(f'self.log("{name}", …): every value must be one number, got a tensor of several.')
            tensors = [tensor.reshape(()) for tensor in tensors]
        for index, number in zip(indices, torch.stack(tensors).tolist(), strict=True):
            result[index] = float(number)
    return result


def snapshot_value(value: Any) -> Any:
    """Return a copy of the value on its device, so that its owner may change it in place later."""
    if isinstance(value, Tensor):
        # With `loss_parallel`, a loss is a sharded tensor, and all ranks log it.
        whole: Any = value
        value = whole.full_tensor() if hasattr(whole, "full_tensor") else value
        return value.detach().clone()
    return value if isinstance(value, DeviceScalar) else float(value)
