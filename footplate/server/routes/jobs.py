"""Jobs: submit, check, list, describe, wait, cancel, resubmit, profile, delete, and their recorded figures."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from footplate.core.profile_requests import MAX_STEPS
from footplate.jobs.backends import OPTIONS
from footplate.jobs.listing import select
from footplate.jobs.questions import processes_of
from footplate.jobs.states import FINAL, State
from footplate.jobs.submission import plan, submit
from footplate.server import submission, views
from footplate.server.dependencies import Context
from footplate.server.figures import figures
from footplate.server.models import (
    Checked,
    Figures,
    GoodputView,
    JobList,
    JobView,
    Name,
    ProfileView,
    Submission,
    Submitted,
    error_responses,
)

router = APIRouter(prefix="/api", tags=["jobs"])
LOOKUP_S = 0.3
LONGEST_WAIT_S = 300.0


@router.get("/jobs", responses=error_responses())
def list_jobs(
    context: Context,
    wanted: Annotated[
        str, Query(alias="filter", max_length=1000, examples=["state=RUNNING AND labels.team=vision"])
    ] = "",
    order: Annotated[str, Query(alias="sortBy", max_length=200, examples=["state,~startTime"])] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="the most jobs to return")] = 100,
) -> JobList:
    """List jobs, the newest first, or filtered and ordered as by `footplate jobs list`."""
    with context.open() as jobs:
        jobs.reconcile()
        rows, count = select(jobs.store, wanted, order, limit)
    return JobList(jobs=[views.row(summary, context.mask) for summary in rows], more=count > limit)


@router.post("/jobs", status_code=201, responses=error_responses(400, 409, 413))
def submit_job(context: Context, body: Submission) -> Submitted:
    """Check a job, and put it into the queue. It begins at once if its resources are free."""
    planned = plan(submission.translate(body, context))
    with context.open() as jobs:
        notices = [*planned.job.notices, *submit(planned, jobs)]
        view = views.view(jobs, jobs.store.find(planned.job.name or ""), context.mask)
    return Submitted(job=view, notices=[context.mask.text(notice) for notice in notices])


@router.get("/backends", responses=error_responses())
def list_backends() -> dict[str, dict[str, str]]:
    """List the backends with their options, which go into `place`."""
    return {name: dict(options) for name, options in OPTIONS.items()}


@router.post("/check", responses=error_responses(400, 413))
def check_job(context: Context, body: Submission) -> Checked:
    """Check a job without submitting it: its problems, or its resolved spec. You may leave out the program.

    With a program and a `backend` that has a service, also the request to it, as `jobs submit training --dry-run`.
    """
    return views.checked(submission.check(body, context), context.mask)


@router.get("/jobs/{name}", responses=error_responses(404))
def describe_job(context: Context, name: Name) -> JobView:
    """Describe a job with all details."""
    with context.open() as jobs:
        return views.view(jobs, jobs.find(name), context.mask)


@router.get("/jobs/{name}/wait", responses=error_responses(404))
async def wait_for_job(
    request: Request,
    context: Context,
    name: Name,
    timeout: Annotated[
        float, Query(ge=0, le=LONGEST_WAIT_S, description="seconds after which the job is returned in any state")
    ] = 30,
) -> JobView:
    """Wait for the end of a job, or for the timeout. `state` shows which of them came first."""

    def look_up() -> State:
        with context.open() as jobs:
            return jobs.find(name).state

    # The first lookup is always a new one: a client that has just resubmitted the job must not see its old state.
    deadline = time.monotonic() + timeout
    state = await context.lookups.state(name, look_up, age_s=0.0)
    while state not in FINAL:
        if time.monotonic() >= deadline or await request.is_disconnected():
            break
        await asyncio.sleep(min(LOOKUP_S, max(0.0, deadline - time.monotonic())))
        state = await context.lookups.state(name, look_up, age_s=LOOKUP_S)
    return await run_in_threadpool(describe_job, context, name)


@router.post("/jobs/{name}/cancel", responses=error_responses(404, 409))
def cancel_job(context: Context, name: Name) -> JobView:
    """Cancel a job: at once if it is queued, else after its processes have had time to save."""
    with context.open() as jobs:
        jobs.cancel(name)
    return describe_job(context, name)


@router.post("/jobs/{name}/resubmit", responses=error_responses(404, 409))
def resubmit_job(context: Context, name: Name) -> JobView:
    """Put a job that failed or was cancelled into the queue again, with the same package."""
    with context.open() as jobs:
        jobs.resubmit(name)
    return describe_job(context, name)


@router.delete("/jobs/{name}", status_code=204, response_class=Response, responses=error_responses(404, 409))
def delete_job(context: Context, name: Name) -> None:
    """Delete a job that has ended, with its logs. The files in its job directory stay."""
    with context.open() as jobs:
        jobs.delete(name)
    context.profiles.pop(name, None)


@router.post("/jobs/{name}/profile", status_code=202, responses=error_responses(404, 409))
def profile_job(
    context: Context,
    name: Name,
    steps: Annotated[int, Query(ge=1, le=MAX_STEPS, description="how many steps to record")] = 10,
) -> ProfileView:
    """Profile the next steps of a running job's training. `GET …/profile` tells when the files are written."""
    with context.open() as jobs:
        processes = processes_of(jobs.store, jobs.find(name), "profile")
    context.profiles[name] = processes.profile(steps)
    return ProfileView(state="waiting")


@router.get("/jobs/{name}/profile", responses=error_responses(404))
def profile_of_job(context: Context, name: Name) -> ProfileView:
    """Return the latest profile of a job that was requested over this server. Its state is "idle" if there is none."""
    with context.open() as jobs:
        jobs.store.find(name)
    profile = context.profiles.get(name)
    return ProfileView(state="idle") if profile is None else views.profile(profile.status(), context.mask)


@router.get("/jobs/{name}/figures", responses=error_responses(404))
def figures_of_job(context: Context, name: Name) -> Figures:
    """Return curves: the metrics of the job's runs, and its use of the machine."""
    with context.open() as jobs:
        job = jobs.store.find(name)
    return figures(job, context.home, context.mask)


@router.get("/jobs/{name}/goodput", responses=error_responses(404))
def goodput_of_job(context: Context, name: Name) -> GoodputView:
    """Return the time and the money of a job by cause, and the steps that were lost."""
    with context.open() as jobs:
        return views.goodput(jobs, jobs.store.find(name), context.mask)
