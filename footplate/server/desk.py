"""Where requests get at jobs: a store's connection is of one thread, so each request has one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from footplate.jobs.home import Home
from footplate.jobs.masking import Mask
from footplate.jobs.store import open_store
from footplate.jobs.verbs import Jobs

PATIENCE_S = 5.0  # for a store that is away: then the request is answered with that


@dataclass(frozen=True)
class Desk:
    """What requests need.

    Attributes:
        home: whose jobs they are.
        mask: what no answer may hold.
        local: whether only this machine can ask: then it may name directories of it.
    """

    home: Home
    mask: Mask = field(default_factory=Mask)
    local: bool = True

    @contextmanager
    def open(self) -> Iterator[Jobs]:
        """The jobs, for one thread and a short time."""
        store = open_store(self.home, PATIENCE_S)
        try:
            yield Jobs(self.home, store)
        finally:
            store.close()


async def _of(request: Request) -> Desk:
    return request.app.state.desk


TheDesk = Annotated[Desk, Depends(_of)]
