"""The logger that a module finds on every rank but the first, and under `fast_dev_run`: it keeps nothing.

`self.logger.experiment.add_image(…)` in a module then runs on all ranks and writes on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from footplate.tracking.base import Logger


class Silent(Logger):
    """Every attribute, item and result of a call is the object itself."""

    name = "silent"
    version = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass
