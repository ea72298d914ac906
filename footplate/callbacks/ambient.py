"""Callbacks for every trainer that runs in a block of code, without a change to that code.

    with everywhere(Probe()):
        train()          # each trainer that runs in here has a Probe, after its own callbacks

They apply to this process only, not to processes that the code starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from footplate.callbacks.base import Callback

_present: list[Callback] = []


@contextlib.contextmanager
def everywhere(*callbacks: Callback) -> Iterator[None]:
    """Add these callbacks to every trainer that runs in this process inside the block."""
    before = list(_present)
    _present.extend(callbacks)
    try:
        yield
    finally:
        _present[:] = before


def present() -> list[Callback]:
    """Return the callbacks that currently apply to every trainer."""
    return list(_present)
