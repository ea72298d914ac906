"""What a module finds as its logger on every rank but the first: it takes everything and keeps nothing.

`self.logger.experiment.add_image(…)` in a module then runs on all ranks and writes on rank 0 alone.
"""

from __future__ import annotations

from typing import Any

from footplate.tracking.base import Logger


class Silent(Logger):
    """Whatever is asked of it, is itself; calling it does nothing."""

    name = "silent"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self
