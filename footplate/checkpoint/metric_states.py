"""The states of torchmetrics objects in a module, for checkpoints.

torchmetrics leaves its states out of `state_dict()`. A module that updates an object in each step, and computes and resets
it at the end of the epoch, would count only the rest of the epoch after it was resumed. So a checkpoint holds the states of
every object that has been updated since its last reset, by its path in the module. `self.log` keeps those of the objects
that it was given (`metrics.py`).
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
    """The states of a module's objects that have been updated since they were reset, by path."""
    for part in module.modules():
        if getattr(part, "_groups_checked", False):  # a collection, whose groups update one member for all
            part._compute_groups_create_state_ref()  # type: ignore[operator]
    found = {}
    for path, metric in _metrics(module):
        states = {name: getattr(metric, name) for name in metric._defaults}
        if not getattr(metric, COUNT):
            continue
        if not all(map(_is_kept, states.values())):
            _warn_of(type(metric).__name__)
            continue
        # A reset empties lists in place, so the checkpoint needs lists of its own.
        found[path] = {name: list(value) if isinstance(value, list) else value for name, value in states.items()}
        found[path][COUNT] = getattr(metric, COUNT)
    return found


def restore(module: nn.Module, states: dict[str, dict[str, Any]]) -> None:
    """Give the objects their states back; those that the module no longer has are left out."""
    for path, metric in _metrics(module):
        for name, value in states.get(path, {}).items():
            setattr(metric, name, _on(metric.device, value))


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        if hasattr(part, "_defaults") and hasattr(part, COUNT):
            yield path, part


def _is_kept(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(item, Tensor) for item in value))


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [item.to(device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


@functools.cache
def _warn_of(kind: str) -> None:
    log.warning("Checkpoints leave out what %s has collected: its states aren't tensors.", kind)
