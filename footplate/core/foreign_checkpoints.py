"""Checkpoints of other libraries, as run states that training can continue from.

`footplate.checkpoint` reads its own checkpoints and torch files. A `ForeignFormat` translates a torch file that another
library wrote. Formats are registered by name, as `"module:attribute"`, and imported when a file that isn't Footplate's is
met. `footplate/__init__.py` registers ours. Add one of your own with `register("my_package.checkpoints:FORMAT")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_formats: list[str] = []


@dataclass(frozen=True)
class ForeignFormat:
    """A library's checkpoints.

    Attributes:
        name: of the library.
        recognises: returns True if a state was written by this library. It gets what the file holds, a dict.
        translate: turns such a state into a run state under Footplate's names (see `checkpoint/run_state.py`). It sets
            `"footplate"`, and `"made_by"` to the library and its version. It keeps the rest, for hooks.
    """

    name: str
    recognises: Callable[[dict[str, Any]], bool]
    translate: Callable[[dict[str, Any]], dict[str, Any]]


def register(name: str) -> None:
    """Add a foreign format.

    Args:
        name: where the `ForeignFormat` is: `"module:attribute"`.
    """
    if name not in _formats:
        _formats.append(name)


def to_run_state(state: dict[str, Any]) -> dict[str, Any]:
    """Translate the state of a checkpoint if another library wrote it; return any other state unchanged."""
    if "footplate" in state:
        return state
    # Import it here: most programs meet no such checkpoint.
    import pkgutil

    for name in _formats:
        foreign: ForeignFormat = pkgutil.resolve_name(name)
        if foreign.recognises(state):
            return foreign.translate(state)
    return state
