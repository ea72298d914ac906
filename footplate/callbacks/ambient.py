"""Callbacks that whoever calls a user's code adds to every trainer in it, so that the code needn't know of them.

    with everywhere(Probe()):
        train()          # each trainer that is run in here has a Probe, after the callbacks of its own

They are this process's: a process that the code starts itself has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from footplate.callbacks.base import Callback

_present: list[Callback] = []


@contextlib.contextmanager
def everywhere(*callbacks: Callback) -> Iterator[None]:
    """While entered, trainers of this process have these callbacks, too."""
    before = list(_present)
    _present.extend(callbacks)
    try:
        yield
    finally:
        _present[:] = before


def present() -> list[Callback]:
    """Those that a trainer which is run now is to have."""
    return list(_present)
