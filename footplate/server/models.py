"""The data of requests and answers, as `/api/openapi.json` describes it. JSON names are in camelCase, times in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from footplate.core.goodput import Cause
from footplate.jobs.states import State

Name = Annotated[
    str, Path(description="the job's name", pattern="^[A-Za-z][A-Za-z0-9_]{0,127}$", examples=["flowers_1"])
]
Code = Literal[
    "bad_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "conflict",
    "too_slow",
    "too_large",
    "invalid",
    "unavailable",
]


class Wire(BaseModel):
    """The base of all requests and answers."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")


class ProblemView(Wire):
    """A problem of a spec: its key, the place where it was written, and a description."""

    key: str
    place: str
    problem: str


class Error(Wire):
    """An error. `message` says what was given, what was expected and what to do."""

    code: Code
    message: str
    problems: list[ProblemView] = []


class ErrorView(Wire):
    """The answer of a request that failed."""

    error: Error


class JobRow(Wire):
    """A job in a list."""

    job_id: str
    state: State
    cause: str
    create_time: datetime
    start_time: datetime | None
    end_time: datetime | None
    attempt: int
    host: str
    backend: str
    priority: int
    labels: dict[str, str]


class JobList(Wire):
    """Jobs, the newest first. `more` is true if the limit has cut the list."""

    jobs: list[JobRow]
    more: bool


class Holds(Wire):
    """The resources of the machine that a job holds while it runs."""

    cpus: float
    gpus: int
    memory_gb: float


class QueueView(Wire):
    """The place of a job in the queue. `position` is 1 for the next job. `waits_for` is what must be free first."""

    position: int
    length: int
    waits_for: str


class TransitionView(Wire):
    """A change of a job's state. `source` is null for the first one."""

    time: datetime
    source: State | None
    target: State
    attempt: int
    cause: str


class ProcessView(Wire):
    """A process of an attempt. `outcome` is empty while it runs."""

    attempt: int
    role: str
    index: int
    pid: int
    began: datetime
    ended: datetime | None
    outcome: str


class HangView(Wire):
    """A hang that was explained. `stacks` has the stacks of all ranks."""

    attempt: int
    sentence: str
    stacks: str


class ProfileView(Wire):
    """The latest profile that was requested of a job.

    `directory` is on the machine of the job. `summary` has the most important results, once the profile is done.
    """

    state: Literal["idle", "waiting", "recording", "writing", "done", "failed"]
    directory: str | None = None
    summary: str | None = None
    error: str | None = None


class TrialView(Wire):
    """A trial of a tuning. `value` and `step` are null without a result."""

    trial: int
    job_id: str
    state: str
    parameters: dict[str, Any]
    value: float | None
    step: float | None
    cause: str


class TuningView(Wire):
    """A tuning: its goal, and its trials, the best first. `best` is the job of the best trial."""

    metric: str
    goal: Literal["MAXIMIZE", "MINIMIZE"]
    max_trials: int
    best: str | None
    trials: list[TrialView]


class JobView(JobRow):
    """A job with all details. `submitted` is its spec as written, `resolved` is the spec with all values filled in.

    `queue` is null unless the job waits for resources of this machine, `tuning` unless the job tunes.
    """

    queue_time: datetime
    queue: QueueView | None
    failures: int
    losses: int
    holds: Holds
    devices: list[int]
    job_dir: str | None
    transitions: list[TransitionView]
    processes: list[ProcessView]
    hangs: list[HangView]
    tuning: TuningView | None
    submitted: dict[str, Any]
    resolved: dict[str, Any]


class Submission(Wire):
    """A job to submit: `config`, and further settings that win over it, as on the command line.

    The program is an uploaded package, a directory of the server's machine, or `packageUris`.
    """

    job_id: str | None = Field(None, max_length=200, examples=["flowers_1"])
    config: dict[str, Any] | str = Field(
        {},
        description="the text of config.yaml, or its content as JSON: {trainingInput: …}",
        examples=[{"trainingInput": {}}],
    )
    args: list[str] = Field([], description="the arguments of the program; they replace those of the config")
    modernize: bool = Field(False, description="replace withdrawn machines by current ones")

    package: str | None = Field(None, description="the digest from POST /api/packages", pattern="^[0-9a-f]{64}$")
    package_path: str | None = Field(
        None, description="the directory of a package; only if the server listens on a loopback address"
    )
    backend: str = Field("local", max_length=40, description="the backend that runs the job")
    place: dict[str, str] = Field({}, description="the options of the backend, as on the command line")


class Submitted(Wire):
    """A job in the queue, with notices about its package and about surprising settings."""

    job: JobView
    notices: list[str]


class Checked(Wire):
    """The problems of a job, and its resolved spec, which is null if there are problems.

    `request` is the request to the service of the backend; null if the backend has no service, or without a program.
    """

    valid: bool
    problems: list[ProblemView]
    notices: list[str]
    resolved: dict[str, Any] | None
    request: dict[str, Any] | None


class FileView(Wire):
    """A file of a package."""

    name: str
    bytes: int


class PackageView(Wire):
    """A package that the server has stored."""

    digest: str
    files: list[FileView]
    warnings: list[str]


class Series(Wire):
    """A curve. A value that isn't a finite number is null.

    An area of "Time by cause" also has `total`, the seconds of its cause in all, and `colour`, the cause's number.
    """

    name: str
    x: list[float]
    y: list[float | None]
    total: float | None = None
    colour: int | None = None


class Figure(Wire):
    """Curves in one chart. `x` is their axis: steps, or seconds since the job began to run.

    Curves of the kind "stacked" have the same `x`, and are drawn as areas, one on top of the other.
    """

    title: str
    kind: Literal["lines", "stacked"] = "lines"
    unit: Literal["", "cores", "bytes", "share", "rate"]
    x: Literal["step", "seconds"]
    series: list[Series]


class Figures(Wire):
    """The metrics of a job's runs, the monitor's record, and the measurements of the supervisor.

    A note explains an empty list. `time` is where the time of the training goes, and its speed; `advice` is the monitor's.
    `remainingSeconds` is null if the end of the training can't be known.
    """

    training: list[Figure]
    training_note: str
    time: list[Figure]
    time_note: str
    advice: list[str]
    remaining_seconds: float | None
    devices: list[Figure]
    devices_note: str


class CauseView(Wire):
    """The part of a job's time with one cause. `usd` is null if the price is unknown."""

    cause: Cause
    label: str
    seconds: float
    share: float
    device_seconds: float
    usd: float | None


class AttemptGoodput(Wire):
    """The time of an attempt by cause, and its steps, which are null without a record of its training."""

    attempt: int
    began: datetime
    ended: datetime
    seconds: dict[Cause, float]
    first_step: int | None
    last_step: int | None
    lost_steps: int


class GoodputView(Wire):
    """The time and the money of a job by cause. `goodput` is null if the training time isn't split (`split`)."""

    began: datetime
    ended: datetime
    runs: bool
    wall_seconds: float
    goodput: float | None
    split: bool
    usd: float | None
    usd_lost: float | None
    usd_per_hour: float | None
    machine: str
    last_step: int | None
    lost_steps: int
    summary: str
    causes: list[CauseView]
    attempts: list[AttemptGoodput]
    notes: list[str]


def moment(seconds: float | None) -> Any:
    """Convert seconds since 1970 to a time in UTC; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


_DESCRIPTIONS = {
    400: "the request has another form than the API expects",
    401: "the token is missing or wrong",
    403: "the request comes from a page of another site, or lacks the header X-Footplate",
    404: "it doesn't exist",
    409: "its state doesn't allow this",
    413: "the request is too large",
    422: "a value is invalid",
    503: "the store can't be used now",
}


def error_responses(*more: int) -> dict[int | str, dict[str, Any]]:
    """Describe the errors of a route for the API's description: those of every route, and `more`."""
    return {
        status: {"model": ErrorView, "description": _DESCRIPTIONS[status]}
        for status in sorted({401, 403, 422, 503, *more})
    }
