"""The states of torchmetrics objects in a module, for checkpoints.

torchmetrics leaves its states out of `state_dict()`. Suppose that a module updates an object in each step, and computes and
resets it at the end of the epoch. After a resume, the object would count only the rest of the epoch. So a checkpoint holds
the states of every object that has been updated since its last reset, by its path in the module. The states of objects
that were passed to `self.log` are saved with the logged metrics (`training/metrics.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

log = logging.getLogger(__name__)

COUNT = "_update_count"


def states_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Collect the states of a module's metric objects that were updated since their last reset, by path."""
    for part in module.modules():
        # In a collection, a group of metrics updates one member for all of them.
        if getattr(part, "_groups_checked", False):
            part._compute_groups_create_state_ref()  # type: ignore[operator]

    collected = {}
    for path, metric in _metrics(module):
        states = {name: getattr(metric, name) for name in metric._defaults}
        if not getattr(metric, COUNT):
            continue
        if not all(map(_can_be_saved, states.values())):
            _warn_not_saved(type(metric).__name__)
            continue

        # A reset empties lists in place, so the checkpoint needs lists of its own.
        collected[path] = {name: list(value) if isinstance(value, list) else value for name, value in states.items()}
        collected[path][COUNT] = getattr(metric, COUNT)
    return collected


def restore(module: nn.Module, states: dict[str, dict[str, Any]]) -> None:
    """Load states into the module's metric objects. States of objects that no longer exist are ignored."""
    for path, metric in _metrics(module):
        for name, value in states.get(path, {}).items():
            setattr(metric, name, _to_device(value, metric.device))


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        if hasattr(part, "_defaults") and hasattr(part, COUNT):
            yield path, part


def _can_be_saved(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(item, Tensor) for item in value))


def _to_device(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [item.to(device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


@functools.cache
def _warn_not_saved(kind: str) -> None:
    log.warning("Checkpoints don't hold the states of %s, because they aren't tensors.", kind)
