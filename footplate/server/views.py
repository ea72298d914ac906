"""Makes answers from jobs. Answers have no secrets, and leave out the data that only the supervisor needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from footplate.core.goodput.text import sentences, summary
from footplate.core.profile_requests import ProfileStatus
from footplate.jobs.goodput import job_ledger
from footplate.jobs.hangs import hangs_of
from footplate.jobs.operations import Jobs
from footplate.jobs.record import Job
from footplate.jobs.redaction import Mask
from footplate.jobs.spec.problems import Problem, dotted
from footplate.jobs.store.jobs import Summary
from footplate.jobs.tuning.results import training_output
from footplate.server.models import (
    Checked,
    Error,
    ErrorView,
    GoodputView,
    HangView,
    Holds,
    JobRow,
    JobView,
    ProblemView,
    ProcessView,
    ProfileView,
    QueueView,
    TransitionView,
    TrialView,
    TuningView,
    moment,
)
from footplate.server.submission import CheckedJob

RESOLVED = ("jobId", "scaleTier", "region", "jobDir", "replicas", "command", "maxRunningTime", "labels")


def row(summary: Summary, mask: Mask) -> JobRow:
    """Describe a job in a list."""
    return JobRow(**_common(summary, mask), labels=mask.all(json.loads(summary.labels)))


def view(jobs: Jobs, job: Job, mask: Mask) -> JobView:
    """Describe a job with its history."""
    place = jobs.place(job)
    return JobView(
        **_common(job, mask),
        labels=mask.all(job.labels),
        queue_time=moment(job.queued),
        queue=None if place is None else QueueView(**asdict(place)),
        failures=job.failures,
        losses=job.losses,
        holds=Holds(cpus=job.needs.cpus, gpus=job.needs.gpus, memory_gb=job.needs.memory_gb),
        devices=list(job.devices),
        job_dir=mask.all(job.plan.get("job_dir")),
        transitions=[
            TransitionView(
                time=moment(transition.at),
                source=transition.source,
                target=transition.target,
                attempt=transition.attempt,
                cause=mask.text(transition.cause),
            )
            for transition in jobs.store.transitions(job.name)
        ],
        processes=[
            ProcessView(
                attempt=process.attempt,
                role=process.role,
                index=process.index,
                pid=process.pid,
                began=moment(process.began),
                ended=moment(process.ended),
                outcome=mask.text(process.outcome),
            )
            for process in jobs.store.processes(job.name)
        ],
        hangs=[
            HangView(attempt=hang.attempt, sentence=mask.text(hang.sentence), stacks=mask.text(hang.text))
            for hang in hangs_of(jobs.home, job.name)
        ],
        tuning=_tuning(jobs, job, mask),
        submitted=mask.all(submitted(job)),
        resolved=mask.all({key: job.spec[key] for key in RESOLVED if key in job.spec}),
    )


def _tuning(jobs: Jobs, job: Job, mask: Mask) -> TuningView | None:
    output = training_output(jobs.store, job)
    if output is None:
        return None
    trials = [
        TrialView(
            trial=int(trial["trialId"]),
            job_id=trial["jobId"],
            state=trial["state"],
            parameters=mask.all(trial["hyperparameters"]),
            value=(trial["finalMetric"] or {}).get("objectiveValue"),
            step=(trial["finalMetric"] or {}).get("trainingStep"),
            cause=mask.text(trial["cause"]),
        )
        for trial in output["trials"]
    ]
    best = output["bestTrial"]
    return TuningView(
        metric=output["hyperparameterMetricTag"],
        goal=output["goal"],
        max_trials=output["maxTrials"],
        best=None if best is None else best["jobId"],
        trials=trials,
    )


def goodput(jobs: Jobs, job: Job, mask: Mask) -> GoodputView:
    """Describe the time and the money of a job."""
    result = job_ledger(jobs.home, jobs.store, job)
    values = result.to_dict()
    times = {"began": moment(result.began), "ended": moment(result.ended)}
    attempts = [
        {**attempt, "began": moment(attempt["began"]), "ended": moment(attempt["ended"])}
        for attempt in values["attempts"]
    ]
    notes = [mask.text(sentence) for sentence in sentences(result)]
    return GoodputView.model_validate(
        {**values, **times, "attempts": attempts, "notes": notes, "summary": summary(result)}
    )


def profile(status: ProfileStatus, mask: Mask) -> ProfileView:
    """Describe a profile."""
    texts = {name: getattr(status, name) for name in ("directory", "summary", "error")}
    return ProfileView(
        state=status.state,  # type: ignore[arg-type]
        **{name: None if text is None else mask.text(text) for name, text in texts.items()},
    )


def submitted(job: Job) -> dict[str, Any]:
    """Return the spec of a job as the user wrote it: config.yaml and flags together."""
    labels = {"labels": job.labels} if job.labels else {}
    return {"jobId": job.name, **labels, "trainingInput": job.spec.get("trainingInput", {})}


def error(code: Any, message: str, problems: list[Problem] | None = None) -> ErrorView:
    """Make the answer of a request that failed."""
    return ErrorView(error=Error(code=code, message=message, problems=[problem_view(each) for each in problems or ()]))


def problem_view(problem: Problem) -> ProblemView:
    """Describe a problem of a spec."""
    return ProblemView(key=dotted(problem.path), place=problem.place, problem=problem.text)


def checked(result: CheckedJob, mask: Mask) -> Checked:
    """Describe the result of a check."""
    return Checked(
        valid=not result.problems,
        problems=[ProblemView(**mask.all(problem_view(problem).model_dump())) for problem in result.problems],
        notices=mask.all(result.notices),
        resolved=mask.all(result.job.to_dict()) if result.job else None,
        request=mask.all(result.request),
    )


def _common(job: Job | Summary, mask: Mask) -> dict[str, Any]:
    return {
        "job_id": job.name,
        "state": job.state,
        "cause": mask.text(job.cause),
        "create_time": moment(job.created),
        "start_time": moment(job.started),
        "end_time": moment(job.ended),
        "attempt": job.attempt,
        "host": job.host,
        "backend": job.backend,
        "priority": job.priority,
    }
