"""The logger of every rank except rank 0, and under `fast_dev_run`: it records nothing.

With it, `self.logger.experiment.add_image(…)` in a module runs on all ranks and writes on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from footplate.tracking.base import Logger


class Silent(Logger):
    """A logger that ignores everything: every attribute, item and result of a call is the object itself."""

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
