"""Run a function in several processes that are restarted when they fail: `launch`, `Restarts`.

Importing this package imports neither; a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.lazy import lazy

if TYPE_CHECKING:
    from footplate.launch.policy import Restarts as Restarts
    from footplate.launch.supervisor import launch as launch

_HOMES = {
    "Restarts": "footplate.launch.policy",
    "launch": "footplate.launch.supervisor",
}

__all__ = ["Restarts", "launch"]

__getattr__ = lazy(__name__, _HOMES)
