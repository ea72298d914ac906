"""What a job's processes write: whole, or as it comes.

Live it is a stream of server-sent events, until the job has ended:

    event: state   data: {"state": "RUNNING", "cause": "", "attempt": 1}           first, and whenever it changes
    event: lines   data: [{"attempt": 1, "source": "master-0", "text": "…\\n"}, …]  in order, up to `BATCH` at once
    event: end     data: {}                                                        nothing more will come

A comment every few seconds keeps the connection, and shows the server who has gone. While somebody listens, the server
sees to it that jobs go on, as `footplate jobs stream-logs` does. A line that ends with a carriage return is one that the
next of its source overwrites, as a progress bar does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from footplate.jobs.operations import RECONCILE_S
from footplate.jobs.states import FINAL, State
from footplate.jobs.supervision.follow import Follower, Line
from footplate.server.desk import Desk, TheDesk
from footplate.server.models import Name
from footplate.server.routes.answers import answers

router = APIRouter(prefix="/api/jobs/{name}", tags=["logs"])
LOOK_S = 0.3
ALIVE_S = 10.0
BATCH = 500  # lines
_Attempt = Annotated[int | None, Query(ge=1, le=2**31, description="only of this attempt")]
_Source = Annotated[
    str | None,
    Query(pattern=r"^((master|worker|parameter_server|evaluator)-\d{1,6}|prepare)$", description="such as master-0"),
]
_Tail = Annotated[int | None, Query(ge=0, le=1_000_000, description="only so many lines at the end of what there is")]
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event"],
}


@router.get(
    "/logs",
    response_class=StreamingResponse,
    responses={**answers(404), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def logs(desk: TheDesk, name: Name, attempt: _Attempt = None, source: _Source = None, tail: _Tail = None) -> Any:
    """What there is now, as text; with several attempts or processes, each line says whose it is."""
    follower = _follower(desk, name)
    plain = attempt is not None and source is not None
    if tail is not None:
        follower.skip_to_tail(tail, attempt, source)
    lines = _tail(_wanted(follower.lines(last=True), attempt, source), tail)

    def written() -> Iterator[str]:
        for one in lines:
            text = desk.mask.text(one.text)
            end = "" if text.endswith("\n") else "\n"
            yield f"{text}{end}" if plain else f"[{one.attempt} {one.source}] {text}{end}"

    return StreamingResponse(written(), media_type="text/plain; charset=utf-8")


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={**answers(404), 200: {"content": {"text/event-stream": {"schema": _EVENT}}}},
)
async def events(
    desk: TheDesk, name: Name, attempt: _Attempt = None, source: _Source = None, tail: _Tail = None
) -> Any:
    """What there is, and what comes until the job has ended, with its states."""
    follower = await run_in_threadpool(_follower, desk, name)
    return StreamingResponse(_live(desk, name, follower, attempt, source, tail), media_type="text/event-stream")


async def _live(
    desk: Desk, name: str, follower: Follower, attempt: int | None, source: str | None, tail: int | None
) -> AsyncIterator[str]:
    known: dict[str, Any] | None = None
    alive, swept = time.monotonic(), time.monotonic()
    if tail is not None:
        await run_in_threadpool(follower.skip_to_tail, tail, attempt, source)
    while True:
        due = time.monotonic() - swept > RECONCILE_S
        swept = time.monotonic() if due else swept
        now = await run_in_threadpool(_state, desk, name, due)
        over = now is None or State(now["state"]) in FINAL
        if now is not None and now != known:
            known = now
            yield _event("state", now)
        lines = _tail(_wanted(follower.lines(last=over), attempt, source), tail)
        tail = None  # it was for what there was in the beginning
        while found := await run_in_threadpool(lambda lines=lines: list(islice(lines, BATCH))):
            alive = time.monotonic()
            yield _event("lines", [_wire(one, desk) for one in found])
        if over:
            yield _event("end", {})
            return
        if time.monotonic() - alive > ALIVE_S:
            alive = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(LOOK_S)


def _follower(desk: Desk, name: str) -> Follower:
    with desk.open() as jobs:
        return jobs.output(jobs.find(name))


def _state(desk: Desk, name: str, sweep: bool) -> dict[str, Any] | None:
    """Where a job stands, after a sweep if one is due; None of one that has been deleted."""
    with desk.open() as jobs:
        if sweep:
            jobs.reconcile()
        job = jobs.store.get(name)
    return job and {"state": str(job.state), "cause": desk.mask.text(job.cause), "attempt": job.attempt}


def _wanted(lines: Iterator[Line], attempt: int | None, source: str | None) -> Iterator[Line]:
    return (one for one in lines if attempt in (None, one.attempt) and source in (None, one.source))


def _tail(lines: Iterator[Line], tail: int | None) -> Iterator[Line]:
    if tail is None:
        yield from lines
    else:
        yield from deque(lines, maxlen=tail)


def _wire(one: Line, desk: Desk) -> dict[str, Any]:
    return {"attempt": one.attempt, "source": one.source, "text": desk.mask.text(one.text)}


def _event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
