"""Classes that put methods of ours between a user's subclass and Lightning's class.

The module's name begins with an underscore so that the classes made here count as private. Else jsonargparse, on which
LightningCLI is built, would find two classes under a name such as `ModelCheckpoint`, and refuse the name as ambiguous.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

HOMES = ("lightning.", "pytorch_lightning.")


def is_lightnings(kind: type) -> bool:
    """Whether Lightning defines a class."""
    return kind.__module__.startswith(HOMES)


def users_classes(kind: type) -> list[type]:
    """The classes of a callback that come before Lightning's."""
    return list(itertools.takewhile(lambda base: not is_lightnings(base), kind.__mro__))


class Between(type):
    """The class of a class whose bases are a user's or Lightning's class, and the replacement that goes in front of
    Lightning's.
    """

    def mro(cls) -> list[type]:
        kind, replacement = cls.__bases__
        users = users_classes(kind)
        between = [base for base in replacement.__mro__ if base not in kind.__mro__]
        return [cls, *users, *between, *kind.__mro__[len(users) :]]


@functools.cache
def between(kind: type, replacement: type) -> type:
    """A class named like `kind`, with the methods of `replacement` in front of Lightning's."""
    home = __name__ if is_lightnings(kind) else kind.__module__
    names = {"__module__": home, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
    return Between(kind.__name__, (kind, replacement), names)


def _reduce(callback: Any, protocol: int) -> tuple[Any, ...]:
    return _rebuild, type(callback).__bases__, object.__reduce_ex__(callback, 2)[2]


def _rebuild(kind: type, replacement: type) -> Any:
    return object.__new__(between(kind, replacement))
