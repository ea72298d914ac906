"""What is known of jobs, as it goes over the wire: without what the supervisor alone needs, and without secrets."""

from __future__ import annotations

import json
from typing import Any

from footplate.jobs.operations import Jobs
from footplate.jobs.record import Job
from footplate.jobs.redaction import Mask
from footplate.jobs.spec.problems import Problem, dotted
from footplate.jobs.store.jobs import Summary
from footplate.server.models import (
    Checked,
    Error,
    ErrorView,
    Holds,
    JobRow,
    JobView,
    ProblemView,
    ProcessView,
    TransitionView,
    moment,
)
from footplate.server.submission import CheckedJob

RESOLVED = ("jobId", "scaleTier", "region", "jobDir", "replicas", "command", "maxRunningTime", "labels")


def row(one: Summary, mask: Mask) -> JobRow:
    """A job in a list."""
    return JobRow(**_common(one, mask), labels=mask.all(json.loads(one.labels)))


def view(jobs: Jobs, job: Job, mask: Mask) -> JobView:
    """A job with its history."""
    return JobView(
        **_common(job, mask),
        labels=mask.all(job.labels),
        queue_time=moment(job.queued),
        failures=job.failures,
        losses=job.losses,
        holds=Holds(cpus=job.needs.cpus, gpus=job.needs.gpus, memory_gb=job.needs.memory_gb),
        devices=list(job.devices),
        job_dir=mask.all(job.plan.get("job_dir")),
        transitions=[
            TransitionView(
                time=moment(one.at),
                source=one.source,
                target=one.target,
                attempt=one.attempt,
                cause=mask.text(one.cause),
            )
            for one in jobs.store.transitions(job.name)
        ],
        processes=[
            ProcessView(
                attempt=one.attempt,
                role=one.role,
                index=one.index,
                pid=one.pid,
                began=moment(one.began),
                ended=moment(one.ended),
                outcome=mask.text(one.outcome),
            )
            for one in jobs.store.processes(job.name)
        ],
        submitted=mask.all(submitted(job)),
        resolved=mask.all({key: job.spec[key] for key in RESOLVED if key in job.spec}),
    )


def submitted(job: Job) -> dict[str, Any]:
    """A job's spec as it was written: config.yaml and flags together."""
    labels = {"labels": job.labels} if job.labels else {}
    return {"jobId": job.name, **labels, "trainingInput": job.spec.get("trainingInput", {})}


def error(code: Any, message: str, problems: list[Problem] | None = None) -> ErrorView:
    """An answer that isn't a success."""
    return ErrorView(error=Error(code=code, message=message, problems=[problem(one) for one in problems or ()]))


def problem(one: Problem) -> ProblemView:
    """One thing that is wrong with a spec."""
    return ProblemView(key=dotted(one.path), place=one.place, problem=one.text)


def checked(found: CheckedJob, mask: Mask) -> Checked:
    """What would happen to a job."""
    return Checked(
        valid=not found.problems,
        problems=[ProblemView(**mask.all(problem(one).model_dump())) for one in found.problems],
        notices=mask.all(found.notices),
        resolved=mask.all(found.job.to_dict()) if found.job else None,
        request=mask.all(found.request),
    )


def _common(one: Job | Summary, mask: Mask) -> dict[str, Any]:
    return {
        "job_id": one.name,
        "state": one.state,
        "cause": mask.text(one.cause),
        "create_time": moment(one.created),
        "start_time": moment(one.started),
        "end_time": moment(one.ended),
        "attempt": one.attempt,
        "host": one.host,
        "backend": one.backend,
        "priority": one.priority,
    }
