"""A copy of a module on another device, which is kept equal to the module.

    made          deep-copied at the beginning of each epoch, so it includes what hooks have set up or unfrozen
    each batch    buffers, and plain values (numbers, texts, True, None) that are attributes of the module or its layers;
                  parameters, in flat buckets

If `training_step` stores something elsewhere (in a list that it appends to, in a tensor that is no buffer), each copy has
its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.distributed.buckets import buckets, moved

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
OF_TORCH = ("_parameters", "_buffers", "_modules")


class Copy:
    """A copy of a module that stays on its device.

    Args:
        module: the original. Both share its trainer.
        device: the device of the copy.

    Attributes:
        module: the copy.
        counterpart: the copy's parameter for each of the original's, by id.

    Raises:
        ConfigError: an attribute of the module can't be copied; the error names it.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.module: Any = copied(module).to(device)
        self._parts = [
            (vars(mine), vars(its)) for mine, its in zip(module.modules(), self.module.modules(), strict=True)
        ]
        for mine, its in self._parts:
            if "_trainer" in mine:
                its["_trainer"] = mine["_trainer"]
        self._buffers = [(mine["_buffers"], its["_buffers"]) for mine, its in self._parts if mine["_buffers"]]
        pairs = list(zip(module.parameters(), self.module.parameters(), strict=True))
        self.counterpart = {id(mine): its for mine, its in pairs}
        self._metrics = [
            (path, part)
            for path, part in self.module.named_modules()
            if hasattr(part, "_update_count") and hasattr(part, "_defaults")
        ]
        # The update count of each metric, when the copy last caught up.
        self._updates: list[int] = []
        self._buckets = [
            (bucket, [self.counterpart[id(mine)] for mine in bucket]) for bucket in buckets(mine for mine, _ in pairs)
        ]

    @torch.no_grad()
    def catch_up(self) -> None:
        """Copy parameters, buffers and plain values from the original. Nothing may use it meanwhile."""
        for mine, its in self._parts:
            for name, value in mine.items():
                if type(value) in PLAIN and its.get(name) is not value:
                    its[name] = value
        for mine, its in self._buffers:
            for name, buffer in mine.items():
                its[name] = _copied_buffer(buffer, its.get(name), self.device)
        for mine, its in self._buckets:
            torch._foreach_copy_(its, moved(mine, self.device))  # pyright: ignore[reportPrivateImportUsage]
        self._updates = [part._update_count for _, part in self._metrics]

    def updated_metric(self) -> str | None:
        """The path of a torchmetrics object that the copy has updated since it caught up; None if there is none."""
        pairs = zip(self._metrics, self._updates, strict=True)
        return next((path for (path, part), before in pairs if part._update_count != before), None)


def copied(module: nn.Module) -> nn.Module:
    """Make a deep copy.

    Raises:
        ConfigError: an attribute can't be copied; the error names it.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise _copy_error(module, error) from error


def _copy_error(module: nn.Module, error: Exception) -> ConfigError:
    for path, part in module.named_modules():
        attributes = {name: value for name, value in vars(part).items() if name not in OF_TORCH}
        for name, value in {**attributes, **part._parameters, **part._buffers}.items():
            try:
                copy.deepcopy(value)
            except Exception as fault:
                # Copying a user's class may raise anything.
                where = f"{path}.{name}" if path else name
                return ConfigError(
                    f'strategy="replicas" copies {type(module).__name__} to each device, but its attribute {where} '
                    f"({type(value).__name__}) can't be copied: {fault}. Keep it outside the module, or give its class a "
                    '__deepcopy__; strategy="ddp" copies nothing.'
                )
    return ConfigError(
        f'strategy="replicas" copies {type(module).__name__} to each device, but it can\'t be copied: {error}.'
    )


def _copied_buffer(buffer: Tensor | None, before: Tensor | None, device: torch.device) -> Tensor | None:
    if buffer is None:
        return None
    if before is None or before.shape != buffer.shape or before.dtype != buffer.dtype:
        return buffer.to(device, copy=True)
    return before.copy_(buffer, non_blocking=before.device.type != "cpu")
