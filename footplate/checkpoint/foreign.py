"""Checkpoints of other libraries, as run states that training can continue from.

This package reads its own checkpoints and torch files. A `ForeignFormat` translates a torch file that another library
wrote. Formats are listed by name, as `"module:attribute"`, and imported when a file that isn't Footplate's is met, so that
nothing here depends on them. Add one of your own with `register("my_package.checkpoints:FORMAT")`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FORMATS = ["footplate.compat.checkpoints:LIGHTNING"]


@dataclass(frozen=True)
class ForeignFormat:
    """A library's checkpoints.

    Attributes:
        name: of the library.
        recognises: returns True if a state was written by this library. It gets what the file holds, a dict.
        translate: turns such a state into a run state under Footplate's names (see `run_state.py`). It sets `"footplate"`,
            and `"made_by"` to the library and its version. What has no place in a run state is kept, for hooks.
    """

    name: str
    recognises: Callable[[dict[str, Any]], bool]
    translate: Callable[[dict[str, Any]], dict[str, Any]]


def register(name: str) -> None:
    """Add a foreign format.

    Args:
        name: where the `ForeignFormat` is: `"module:attribute"`.
    """
    if name not in _FORMATS:
        _FORMATS.append(name)


def to_run_state(state: dict[str, Any]) -> dict[str, Any]:
    """Translate the state of a checkpoint if another library wrote it; return any other state unchanged."""
    if "footplate" in state:
        return state
    for name in _FORMATS:
        foreign: ForeignFormat = pkgutil.resolve_name(name)
        if foreign.recognises(state):
            return foreign.translate(state)
    return state
