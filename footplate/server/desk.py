"""Where requests get at jobs: a store's connection is of one thread, so each request has one of its own."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from footplate.jobs.home import Home
from footplate.jobs.operations import Jobs
from footplate.jobs.redaction import Mask
from footplate.jobs.states import State
from footplate.jobs.store import open_store

PATIENCE_S = 5.0  # for a store that is away: then the request is answered with that


class Looks:
    """Looks at the state of jobs, each made once for all requests that wait for the job."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, asyncio.Future[State]]] = {}

    async def state(self, name: str, look: Callable[[], State], age_s: float) -> State:
        """A job's state.

        Args:
            name: the job's.
            look: finds the state out, in a thread.
            age_s: a look that began less than this time ago is used again.
        """
        now = time.monotonic()
        begun, found = self._begun.get(name, (-math.inf, None))
        if found is None or now - begun >= age_s:
            found = asyncio.ensure_future(run_in_threadpool(look))
            recent = {key: (at, one) for key, (at, one) in self._begun.items() if now - at < age_s}
            self._begun = {**recent, name: (now, found)}
        return await asyncio.shield(found)  # others wait for it when this request is given up


@dataclass(frozen=True)
class Desk:
    """What requests need.

    Attributes:
        home: whose jobs they are.
        mask: what no answer may hold.
        local: whether only this machine can ask: then it may name directories of it.
        looks: what requests that wait for the same job have looked up.
    """

    home: Home
    mask: Mask = field(default_factory=Mask)
    local: bool = True
    looks: Looks = field(default_factory=Looks)

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
