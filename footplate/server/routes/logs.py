"""The output of a job's processes: as text, or live.

Live output is a stream of server-sent events, until the job has ended:

    event: state   data: {"state": "RUNNING", "cause": "", "attempt": 1}           first, and at each change
    event: lines   data: [{"attempt": 1, "source": "master-0", "text": "…\\n"}, …]  in order, up to `BATCH` at once
    event: end     data: {}                                                        the stream is complete

A comment every few seconds keeps the connection open, and lets the server notice a client that has gone. While a client
listens, the server advances jobs, as `footplate jobs stream-logs` does. The next line of the same source overwrites a line
that ends with a carriage return, as in a progress bar.
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
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from footplate.jobs.operations import RECONCILE_S
from footplate.jobs.states import FINAL, State
from footplate.jobs.supervision.follow import Follower, Line
from footplate.server.dependencies import Context, ServerContext
from footplate.server.log_search import Hits, search
from footplate.server.models import Name, error_responses

router = APIRouter(prefix="/api/jobs/{name}", tags=["logs"])
POLL_S = 0.3
KEEP_ALIVE_S = 10.0

# The most lines of an event.
BATCH = 500
_Attempt = Annotated[int | None, Query(ge=1, le=2**31, description="only of this attempt")]
_Source = Annotated[
    str | None,
    Query(pattern=r"^((master|worker|parameter_server|evaluator)-\d{1,6}|prepare)$", description="such as master-0"),
]
_Tail = Annotated[int | None, Query(ge=0, le=1_000_000, description="only this many of the last lines")]
_Search = Annotated[
    str | None,
    Query(
        alias="search",
        min_length=1,
        max_length=200,
        description="only lines that contain this text, in any case: the last 1000 of them. Each begins with "
        "[ATTEMPT SOURCE:NUMBER]. The header X-Footplate-Hits counts all; X-Footplate-Complete is false if the search took "
        "too long",
    ),
]
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event"],
}


@router.get(
    "/logs",
    response_class=StreamingResponse,
    responses={**error_responses(404), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def logs(
    context: Context,
    name: Name,
    attempt: _Attempt = None,
    source: _Source = None,
    tail: _Tail = None,
    wanted: _Search = None,
) -> Any:
    """Return the output so far, as text, or its lines with a text. Unless both are given, lines begin with their source."""
    follower = _follower(context, name)
    if wanted is not None:
        return _found(search(follower.lines(last=True), wanted, context.mask, attempt, source), tail)
    plain = attempt is not None and source is not None
    if tail is not None:
        follower.skip_to_tail(tail, attempt, source)
    lines = _tail(_wanted(follower.lines(last=True), attempt, source), tail)

    def rendered() -> Iterator[str]:
        for line in lines:
            text = context.mask.text(line.text)
            end = "" if text.endswith("\n") else "\n"
            yield f"{text}{end}" if plain else f"[{line.attempt} {line.source}] {text}{end}"

    return StreamingResponse(rendered(), media_type="text/plain; charset=utf-8")


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={**error_responses(404), 200: {"content": {"text/event-stream": {"schema": _EVENT}}}},
)
async def events(
    context: Context, name: Name, attempt: _Attempt = None, source: _Source = None, tail: _Tail = None
) -> Any:
    """Stream the output so far, and new output and states until the job has ended."""
    follower = await run_in_threadpool(_follower, context, name)
    return StreamingResponse(_live(context, name, follower, attempt, source, tail), media_type="text/event-stream")


async def _live(
    context: ServerContext, name: str, follower: Follower, attempt: int | None, source: str | None, tail: int | None
) -> AsyncIterator[str]:
    last_state: dict[str, Any] | None = None
    alive, swept = time.monotonic(), time.monotonic()
    if tail is not None:
        await run_in_threadpool(follower.skip_to_tail, tail, attempt, source)
    while True:
        due = time.monotonic() - swept > RECONCILE_S
        swept = time.monotonic() if due else swept
        state = await run_in_threadpool(_state, context, name, due)
        over = state is None or State(state["state"]) in FINAL
        if state is not None and state != last_state:
            last_state = state
            yield _event("state", state)

        # The tail limits only the output that existed when the stream began.
        lines = _tail(_wanted(follower.lines(last=over), attempt, source), tail)
        tail = None
        while batch := await run_in_threadpool(lambda lines=lines: list(islice(lines, BATCH))):
            alive = time.monotonic()
            yield _event("lines", [_wire(line, context) for line in batch])

        if over:
            yield _event("end", {})
            return
        if time.monotonic() - alive > KEEP_ALIVE_S:
            alive = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)


def _found(search_hits: Hits, tail: int | None) -> Response:
    hits = search_hits.hits if tail is None else search_hits.hits[max(0, len(search_hits.hits) - tail) :]
    text = "".join(f"[{hit.attempt} {hit.source}:{hit.number}] {hit.text}\n" for hit in hits)
    headers = {"X-Footplate-Hits": str(search_hits.count), "X-Footplate-Complete": str(search_hits.complete).lower()}
    return PlainTextResponse(text, headers=headers)


def _follower(context: ServerContext, name: str) -> Follower:
    with context.open() as jobs:
        return jobs.output(jobs.find(name))


def _state(context: ServerContext, name: str, due: bool) -> dict[str, Any] | None:
    """Return the state of a job, after reconciling the jobs if that is due; None if the job was deleted."""
    with context.open() as jobs:
        if due:
            jobs.reconcile()
        job = jobs.store.get(name)
    return job and {"state": str(job.state), "cause": context.mask.text(job.cause), "attempt": job.attempt}


def _wanted(lines: Iterator[Line], attempt: int | None, source: str | None) -> Iterator[Line]:
    return (line for line in lines if attempt in (None, line.attempt) and source in (None, line.source))


def _tail(lines: Iterator[Line], tail: int | None) -> Iterator[Line]:
    if tail is None:
        yield from lines
    else:
        yield from deque(lines, maxlen=tail)


def _wire(line: Line, context: ServerContext) -> dict[str, Any]:
    return {"attempt": line.attempt, "source": line.source, "text": context.mask.text(line.text)}


def _event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
