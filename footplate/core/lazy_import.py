"""Lazy packages: importing one imports none of its modules. A name is imported when it is first used.

    __getattr__ = lazy(__name__, {"Trainer": "footplate.training.trainer"})

No garbage is collected during an import. What it makes stays. A collection would look at all objects of torch, which takes
as long as the import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from footplate.core.garbage import no_collection


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports each name from its module in `homes` and keeps it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with no_collection():
            module = importlib.import_module(homes[name])
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find
