"""The data of requests and answers, as `/api/openapi.json` describes it. JSON names are in camelCase, times in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

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


class JobView(JobRow):
    """A job with all details. `submitted` is its spec as written, `resolved` is the spec with all values filled in."""

    queue_time: datetime
    failures: int
    losses: int
    holds: Holds
    devices: list[int]
    job_dir: str | None
    transitions: list[TransitionView]
    processes: list[ProcessView]
    hangs: list[HangView]
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
    """A curve. A value that isn't a finite number is null."""

    name: str
    x: list[float]
    y: list[float | None]


class Figure(Wire):
    """Curves in one chart. `x` is their axis: steps, or seconds since the job began to run."""

    title: str
    unit: Literal["", "cores", "bytes", "share"]
    x: Literal["step", "seconds"]
    series: list[Series]


class Figures(Wire):
    """The metrics of a job's runs, and the measurements of its supervisor. A note explains an empty list."""

    training: list[Figure]
    training_note: str
    devices: list[Figure]
    devices_note: str


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
