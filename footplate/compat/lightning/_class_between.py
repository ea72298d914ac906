"""Classes that put our methods between a user's subclass and Lightning's class.

The module's name begins with an underscore so that the classes made here count as private. Otherwise jsonargparse, which
LightningCLI is built on, would find two classes under a name such as `ModelCheckpoint`, and refuse the name as ambiguous.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

PACKAGES = ("lightning.", "pytorch_lightning.")


def is_lightnings(kind: type) -> bool:
    """Return True if Lightning defines a class."""
    return kind.__module__.startswith(PACKAGES)


def lightning_classes(instance: Any) -> list[str]:
    """The names of the Lightning classes among an object's class and its bases, nearest first."""
    return [kind.__name__ for kind in type(instance).__mro__ if is_lightnings(kind)]


def is_lightning(instance: Any) -> bool:
    """Return True if an object's class is, or inherits from, one of Lightning's classes."""
    return bool(lightning_classes(instance))


def users_classes(kind: type) -> list[type]:
    """The classes of a callback that come before Lightning's."""
    return list(itertools.takewhile(lambda base: not is_lightnings(base), kind.__mro__))


class Between(type):
    """Metaclass of a class with two bases: a user's or Lightning's class, and the replacement.

    It puts the replacement's methods directly in front of Lightning's.
    """

    def mro(cls) -> list[type]:
        kind, replacement = cls.__bases__
        users = users_classes(kind)
        between = [base for base in replacement.__mro__ if base not in kind.__mro__]
        return [cls, *users, *between, *kind.__mro__[len(users) :]]


@functools.cache
def between(kind: type, replacement: type) -> type:
    """Make a class named like `kind`, with the methods of `replacement` in front of Lightning's."""
    module = __name__ if is_lightnings(kind) else kind.__module__
    attributes = {"__module__": module, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
    return Between(kind.__name__, (kind, replacement), attributes)


def _reduce(callback: Any, protocol: int) -> tuple[Any, ...]:
    return _rebuild, type(callback).__bases__, object.__reduce_ex__(callback, 2)[2]


def _rebuild(kind: type, replacement: type) -> Any:
    return object.__new__(between(kind, replacement))
