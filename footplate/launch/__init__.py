"""Run a function in several processes that are restarted when they fail: `Runner`, `launch`, `Restarts`.

Importing this package imports none of them; a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.launch.policy import Restarts as Restarts
    from footplate.launch.runner import Runner as Runner
    from footplate.launch.supervisor import launch as launch

_HOMES = {
    "Restarts": "footplate.launch.policy",
    "Runner": "footplate.launch.runner",
    "launch": "footplate.launch.supervisor",
}

__all__ = ["Restarts", "Runner", "launch"]

__getattr__ = lazy(__name__, _HOMES)
