"""What goes over the wire. Names are in camelCase there, times in UTC; `/api/openapi.json` is made of these."""

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
    """Base of all."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")


class ProblemView(Wire):
    """One thing that is wrong: the key, where it was written, and what is wrong with it."""

    key: str
    place: str
    problem: str


class Error(Wire):
    """What went wrong: `message` says what was given, what was expected and what to do."""

    code: Code
    message: str
    problems: list[ProblemView] = []


class ErrorView(Wire):
    """Every answer that isn't a success."""

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
    """Jobs, the newest first; `more` says whether there are others that were not asked for."""

    jobs: list[JobRow]
    more: bool


class Holds(Wire):
    """What a job holds of the machine while it runs."""

    cpus: float
    gpus: int
    memory_gb: float


class TransitionView(Wire):
    """One step in a job's life; `source` is null for the first."""

    time: datetime
    source: State | None
    target: State
    attempt: int
    cause: str


class ProcessView(Wire):
    """One process of an attempt; `outcome` is empty while it runs."""

    attempt: int
    role: str
    index: int
    pid: int
    began: datetime
    ended: datetime | None
    outcome: str


class JobView(JobRow):
    """All that is known of a job: `submitted` as it was written, `resolved` as it was understood."""

    queue_time: datetime
    failures: int
    losses: int
    holds: Holds
    devices: list[int]
    job_dir: str | None
    transitions: list[TransitionView]
    processes: list[ProcessView]
    submitted: dict[str, Any]
    resolved: dict[str, Any]


class Submission(Wire):
    """A job: `config`, with the rest laid over it as on the command line.

    Its program is an uploaded package, or a directory of the server's machine, or `packageUris`.
    """

    job_id: str | None = Field(None, max_length=200, examples=["flowers_1"])
    config: dict[str, Any] | str = Field(
        {},
        description="config.yaml: its text, or the same as JSON: {trainingInput: …}",
        examples=[{"trainingInput": {}}],
    )
    args: list[str] = Field([], description="the program's arguments; they replace those of the config")
    modernize: bool = Field(False, description="take today's machines for those that are gone")

    package: str | None = Field(None, description="the digest that POST /api/packages gave", pattern="^[0-9a-f]{64}$")
    package_path: str | None = Field(
        None, description="the directory of a package; only where the server listens on its own machine alone"
    )
    backend: str = Field("local", max_length=40, description="where it runs")
    place: dict[str, str] = Field({}, description="where exactly: the backend's own options, as on the command line")


class Submitted(Wire):
    """A job that is in the queue, what was taken of its package, and what its owner may not have expected."""

    job: JobView
    notices: list[str]


class Checked(Wire):
    """What is wrong with a job, and what it comes to: null if something is wrong.

    `request` is what would be asked of the backend's service; null where there is none, or no program was given.
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
    """A package that was taken."""

    digest: str
    files: list[FileView]
    warnings: list[str]


class Series(Wire):
    """A curve: null where a value is no number."""

    name: str
    x: list[float]
    y: list[float | None]


class Figure(Wire):
    """Curves that belong together; `x` says what is counted along: steps, or seconds since the job began to run."""

    title: str
    unit: Literal["", "cores", "bytes", "share"]
    x: Literal["step", "seconds"]
    series: list[Series]


class Figures(Wire):
    """What a job's runs have recorded, and what its supervisor has measured; a note says why there is nothing."""

    training: list[Figure]
    training_note: str
    devices: list[Figure]
    devices_note: str


def moment(seconds: float | None) -> Any:
    """Seconds since the epoch as a moment; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
