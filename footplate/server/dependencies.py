"""The context of a request: the jobs of this machine, opened for one thread at a time.

A connection to the store belongs to one thread, so each request opens its own.
"""

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

from footplate.core.profile_requests import RunningProfile
from footplate.jobs.home import Home
from footplate.jobs.operations import Jobs
from footplate.jobs.redaction import Mask
from footplate.jobs.states import State
from footplate.jobs.store import open_store

# A request waits this long for a store that can't be used. Then its answer says so.
PATIENCE_S = 5.0


class StateLookups:
    """Looks up the states of jobs, once for all requests that wait for the same job."""

    def __init__(self) -> None:
        self._recent: dict[str, tuple[float, asyncio.Future[State]]] = {}

    async def state(self, name: str, look_up: Callable[[], State], age_s: float) -> State:
        """Return the state of a job.

        Args:
            name: the name of the job.
            look_up: finds the state; runs in a thread.
            age_s: a lookup that began less than this time ago is used again.
        """
        now = time.monotonic()
        began, lookup = self._recent.get(name, (-math.inf, None))
        if lookup is None or now - began >= age_s:
            lookup = asyncio.ensure_future(run_in_threadpool(look_up))
            recent = {key: (at, future) for key, (at, future) in self._recent.items() if now - at < age_s}
            self._recent = {**recent, name: (now, lookup)}

        # Other requests may wait for this lookup, so a request that is cancelled must not cancel it.
        return await asyncio.shield(lookup)


@dataclass(frozen=True)
class ServerContext:
    """The settings and the shared state that requests need.

    Attributes:
        home: the home of the jobs.
        mask: removes secrets from answers.
        local: True if only this machine can send requests; then they may name directories of this machine.
        lookups: the shared lookups of job states.
        profiles: the latest profile that was requested of each job.
    """

    home: Home
    mask: Mask = field(default_factory=Mask)
    local: bool = True
    lookups: StateLookups = field(default_factory=StateLookups)
    profiles: dict[str, RunningProfile] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[Jobs]:
        """Open the jobs, for one thread and a short time."""
        store = open_store(self.home, PATIENCE_S)
        try:
            yield Jobs(self.home, store)
        finally:
            store.close()


async def _context_of(request: Request) -> ServerContext:
    return request.app.state.context


Context = Annotated[ServerContext, Depends(_context_of)]
