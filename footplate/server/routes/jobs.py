"""Jobs: submit, check, list, describe, wait, cancel, resubmit, delete, and what they have recorded."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from footplate.jobs.backends import OPTIONS
from footplate.jobs.listing import select
from footplate.jobs.states import FINAL, State
from footplate.jobs.submission import plan, submit
from footplate.server import submission, views
from footplate.server.desk import TheDesk
from footplate.server.figures import figures
from footplate.server.models import Checked, Figures, JobList, JobView, Name, Submission, Submitted
from footplate.server.routes.answers import answers

router = APIRouter(prefix="/api", tags=["jobs"])
LOOK_S = 0.3
LONGEST_WAIT_S = 300.0


@router.get("/jobs", responses=answers())
def list_jobs(
    desk: TheDesk,
    wanted: Annotated[
        str, Query(alias="filter", max_length=1000, examples=["state=RUNNING AND labels.team=vision"])
    ] = "",
    order: Annotated[str, Query(alias="sortBy", max_length=200, examples=["state,~startTime"])] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="at most so many")] = 100,
) -> JobList:
    """Jobs, the newest first, or filtered and ordered as by `footplate jobs list`."""
    with desk.open() as jobs:
        jobs.reconcile()
        rows, count = select(jobs.store, wanted, order, limit)
    return JobList(jobs=[views.row(one, desk.mask) for one in rows], more=count > limit)


@router.post("/jobs", status_code=201, responses=answers(400, 409, 413))
def submit_job(desk: TheDesk, given: Submission) -> Submitted:
    """Check a job, and put it into the queue; it begins at once if there is room."""
    planned = plan(submission.translate(given, desk))
    with desk.open() as jobs:
        notices = [*planned.job.notices, *submit(planned, jobs)]
        view = views.view(jobs, jobs.store.find(planned.job.name or ""), desk.mask)
    return Submitted(job=view, notices=[desk.mask.text(one) for one in notices])


@router.get("/backends", responses=answers())
def list_backends() -> dict[str, dict[str, str]]:
    """Where jobs can run, and the options that say where exactly, which go into `place`."""
    return {name: dict(options) for name, options in OPTIONS.items()}


@router.post("/check", responses=answers(400, 413))
def check_job(desk: TheDesk, given: Submission) -> Checked:
    """Say all that is wrong with a job, and what it comes to, without submitting it; its program may be left out.

    With the program, and a `backend` elsewhere, also what would be asked of that: as `jobs submit training --dry-run`.
    """
    return views.checked(submission.check(given, desk), desk.mask)


@router.get("/jobs/{name}", responses=answers(404))
def describe_job(desk: TheDesk, name: Name) -> JobView:
    """All that is known of a job."""
    with desk.open() as jobs:
        return views.view(jobs, jobs.find(name), desk.mask)


@router.get("/jobs/{name}/wait", responses=answers(404))
async def wait_for_job(
    request: Request,
    desk: TheDesk,
    name: Name,
    timeout: Annotated[
        float, Query(ge=0, le=LONGEST_WAIT_S, description="seconds, after which it is answered anyway")
    ] = 30,
) -> JobView:
    """A job as soon as it has ended, or as it is when the time is over: `state` says which."""

    def look() -> State:
        with desk.open() as jobs:
            return jobs.find(name).state

    until = time.monotonic() + timeout
    state = await desk.looks.state(name, look, age_s=0.0)  # never as it was before the client asked
    while state not in FINAL:
        if time.monotonic() >= until or await request.is_disconnected():
            break
        await asyncio.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
        state = await desk.looks.state(name, look, age_s=LOOK_S)
    return await run_in_threadpool(describe_job, desk, name)


@router.post("/jobs/{name}/cancel", responses=answers(404, 409))
def cancel_job(desk: TheDesk, name: Name) -> JobView:
    """End a job: at once if it waits, else after its processes have had the time to save."""
    with desk.open() as jobs:
        jobs.cancel(name)
    return describe_job(desk, name)


@router.post("/jobs/{name}/resubmit", responses=answers(404, 409))
def resubmit_job(desk: TheDesk, name: Name) -> JobView:
    """Put a job that failed or was cancelled into the queue again, with the same package."""
    with desk.open() as jobs:
        jobs.resubmit(name)
    return describe_job(desk, name)


@router.delete("/jobs/{name}", status_code=204, response_class=Response, responses=answers(404, 409))
def delete_job(desk: TheDesk, name: Name) -> None:
    """Forget a job that has ended, with its logs; what it has written to its job directory stays."""
    with desk.open() as jobs:
        jobs.delete(name)


@router.get("/jobs/{name}/figures", responses=answers(404))
def figures_of_job(desk: TheDesk, name: Name) -> Figures:
    """Curves: the metrics of its runs, and how busy it keeps the machine."""
    with desk.open() as jobs:
        job = jobs.store.find(name)
    return figures(job, desk.home, desk.mask)
