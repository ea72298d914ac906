"""A job's submission, and its dry run: one path for the command line and for the server.

    Submission ──► plan ──► PlannedJob ──► submit    the job is in the queue
                                      └──► dry_run   nothing has changed

The caller translates its own input into a `Submission`: a config, flags, the program's arguments, a package, a backend.
Everything else happens here, in this order:

1. `plan` checks the config with the flags laid over it, and the program. It collects every problem. Without a problem it
   resolves the job, and asks the backend for the destination.
2. `submit` and `dry_run` both call `_accept`: the backend checks the job, the program is put into a snapshot, and the
   backend makes its request from that. So a dry run refuses what a submission refuses, in the same words.
3. `submit` enters the job into the store, and starts it if there is room. `dry_run` returns the request.

A dry run differs in two ways: it keeps its snapshot in a temporary folder, and a backend that can't be reached is a notice.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs import backends
from footplate.jobs.package.modules import module_problem, package_problem, take_program
from footplate.jobs.package.snapshots import Snapshot
from footplate.jobs.spec.draft import Draft, draft
from footplate.jobs.spec.problems import Path as KeyPath
from footplate.jobs.spec.problems import Problem, SpecError
from footplate.jobs.spec.resolving import ResolvedJob, problems, resolve
from footplate.jobs.tuning.plan import TuningPlan
from footplate.jobs.tuning.proposals import check_algorithm

if TYPE_CHECKING:
    from footplate.jobs.spec.document import Document


@dataclass(frozen=True)
class PackageInput:
    """The caller's name for a package, and its advice if there is none. Error messages use both.

    Attributes:
        key: the key of a request that holds the package; empty on the command line.
        place: the flag that gives the package; empty in a request.
        advice: what to do if the job has no program.
    """

    key: KeyPath
    place: str
    advice: str


@dataclass(frozen=True)
class Submission:
    """A job as it was asked for.

    Attributes:
        name: the job's name.
        package_input: the caller's name for a package.
        document: the config; None if there is none.
        flags: flags of `spec.flags.KEYS`, and their values.
        args: the program's arguments.
        package: the directory of the package, or a snapshot of one; None if `packageUris` or an image bring the program.
        package_refusal: why the caller doesn't accept the package. The package is then not looked at.
        modernize: replace machines that no longer exist with their successors.
        backend: where the job runs, one of `backends.NAMES`.
        options: the backend's options, such as `address`.
        variables: the variables of `--env`.
    """

    name: str | None
    package_input: PackageInput
    document: Document | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = ()
    package: Path | Snapshot | None = None
    package_refusal: Problem | None = None
    modernize: bool = False
    backend: str = "local"
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


class DestinationError(ConfigError):
    """The backend's options are wrong, or incomplete."""


@dataclass(frozen=True)
class PlannedJob:
    """A checked job, and where it will run.

    Attributes:
        job: the resolved job.
        package: as in `Submission`.
        backend: likewise.
        destination: the backend's options, complete.
        variables: as in `Submission`.
        has_program: False if neither a package nor an image was given. Such a job can only be described.
        tuning_options: `seed`, `stop_early`, `imports`, `checkpoint` and `interval` of a tuning, which a config can't
            express.
    """

    job: ResolvedJob
    package: Path | Snapshot | None = None
    backend: str = "local"
    destination: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    has_program: bool = True
    tuning_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        request: the request that the backend would send to its service; None if it has no service.
        notices: what a submission would print.
    """

    request: dict[str, Any] | None
    notices: tuple[str, ...]


def plan(submission: Submission, program_required: bool = True) -> PlannedJob:
    """Check a submission, resolve its job, and find its destination.

    Args:
        submission: the job as it was asked for.
        program_required: raise if the job has no program.

    Raises:
        SpecError: the job or its program has problems. The error lists all of them.
        DestinationError: the backend's options are wrong, or incomplete.
        ConfigError: there is no such backend; the backend can't take variables.
    """
    backends.get_backend(submission.backend)
    if submission.variables and submission.backend not in ("local", "slurm"):
        raise ConfigError(
            f"--env is for jobs on this machine and on Slurm. On --backend {submission.backend} others could read the "
            "variable: let the program read it from a file or a secret manager."
        )

    requested = draft(submission.document, submission.flags, submission.args, submission.name)
    has_program = _has_program(submission, requested)
    faults = [*problems(requested), *_program_problems(submission, requested)]
    if program_required and not has_program:
        package_input = submission.package_input
        faults.append(Problem(package_input.key, f"no program: {package_input.advice}"))
    if faults:
        raise SpecError(faults)

    if submission.modernize:
        # Import YAML here: a job made of flags doesn't need it.
        from footplate.jobs.spec.migration import apply

        requested = apply(requested)
    job = resolve(requested)
    try:
        destination = backends.destination(submission.backend, submission.options, job.job_dir)
    except ConfigError as error:
        raise DestinationError(str(error)) from None
    return PlannedJob(job, submission.package, submission.backend, destination, submission.variables, has_program)


class Queue(Protocol):
    """The jobs of a home, as a submission uses them; `operations.Jobs` is one."""

    def reserve(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Keep a new job's name free until the job is in the store. Yields the home's folder."""
        ...

    def enter(self, planned: PlannedJob, program: Snapshot) -> Path | None:
        """Put a job into the store. Returns a leftover folder to delete, or None."""
        ...

    def reconcile(self) -> None:
        """Start the jobs that may start now."""
        ...


def submit(planned: PlannedJob, jobs: Queue) -> tuple[str, ...]:
    """Put a job with its program, as the program is now, into the queue. The job starts at once if there is room.

    Returns:
        What the snapshot contains, and what the user may not expect, one sentence each.

    Raises:
        WrongState: a job of this name exists.
        Unavailable: the backend can't be reached.
        ConfigError: the job can't run on its backend.
        MissingExtra: it tunes, and Optuna isn't installed.
        PackageError: the program can't be put into a snapshot, or lacks the module.
    """
    with _accept(planned, jobs) as accepted:
        leftover = jobs.enter(planned, accepted.program)
    if leftover is not None:
        shutil.rmtree(leftover, ignore_errors=True)
    jobs.reconcile()
    return (accepted.program.summary, *accepted.program.warnings, *accepted.notices)


def dry_run(planned: PlannedJob) -> DryRun:
    """Do all that `submit` does, but keep nothing.

    Raises:
        ConfigError: the job can't run on its backend.
        PackageError: the program can't be put into a snapshot, or lacks the module.
    """
    with _accept(planned, None) as accepted:
        return DryRun(accepted.request, accepted.notices)


@dataclass(frozen=True)
class _Accepted:
    program: Snapshot
    request: dict[str, Any] | None
    notices: tuple[str, ...]


@contextlib.contextmanager
def _accept(planned: PlannedJob, jobs: Queue | None) -> Iterator[_Accepted]:
    """Let the backend check the job, and put the program into a snapshot.

    Args:
        planned: the job.
        jobs: where the job is going to be entered; None for a dry run.
    """
    job, backend = planned.job, backends.get_backend(planned.backend)
    if job.name is None and jobs is not None:
        raise ConfigError("a job needs a name.")

    try:
        notices = backend.check(job, planned.destination)
    except Unavailable as error:
        if jobs is not None:
            raise
        notices = [str(error)]
    if "hyperparameters" in job.spec:
        check_algorithm(TuningPlan.of(job.spec["hyperparameters"], seed=0))

    # A submission holds the lock of the home until the job is in the store, else a cleanup might delete the snapshot.
    with jobs.reserve(job.name or "") if jobs is not None else _scratch() as root:
        spec = job.spec
        program = take_program(planned.package, spec.get("packageUris", ()), spec.get("pythonModule"), root)
        request = backend.request(job, planned.destination, program)
        if "hyperparameters" in spec and request is not None and jobs is None:
            notices = [*notices, "The request is that of a trial, without its number and its parameters."]
        yield _Accepted(program, request, tuple(notices))


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _has_program(submission: Submission, requested: Draft) -> bool:
    spec = _training_input(requested)
    config = spec.get("masterConfig")
    image = isinstance(config, dict) and config.get("imageUri")
    has_package = submission.package is not None or submission.package_refusal is not None
    return bool(has_package or spec.get("packageUris") or image)


def _program_problems(submission: Submission, requested: Draft) -> Iterator[Problem]:
    """Problems of the program: the package is missing or refused, or lacks the module."""
    spec, package, package_input = _training_input(requested), submission.package, submission.package_input
    if submission.package_refusal is not None:
        yield submission.package_refusal
        return
    if isinstance(package, Snapshot) and spec.get("packageUris"):
        yield Problem(package_input.key, "an uploaded package is the whole program: leave out packageUris.")
        return
    if isinstance(package, Path) and (text := package_problem(package)):
        yield Problem(package_input.key, text, package_input.place)
        return

    module = spec.get("pythonModule")
    if package is not None and isinstance(module, str) and (text := module_problem(package, module)):
        yield requested.problem(("trainingInput", "pythonModule"), text)


def _training_input(requested: Draft) -> dict[str, Any]:
    spec = requested.values.get("trainingInput")
    return spec if isinstance(spec, dict) else {}
