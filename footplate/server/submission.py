"""A request's body as a `Submission` of `footplate.jobs.submission`, and a dry run's answer.

A server that other machines can reach accepts uploaded packages only, no directory of its own machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError
from footplate.jobs.package import stored
from footplate.jobs.spec.problems import Problem, SpecError
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.submission import DestinationError, PackageInput, Submission, dry_run, plan
from footplate.server import models
from footplate.server.dependencies import ServerContext

# The name of the config in messages.
CONFIG = "config"
_ADVICE = "upload its package (POST /api/packages) and give the digest, or packageUris, or an image."


@dataclass(frozen=True)
class CheckedJob:
    """The result of a check.

    Attributes:
        problems: why the job would be refused.
        job: the resolved job; None if there are problems.
        request: the request that the backend would send to its service; None without a service or a program.
        notices: what a submission would answer.
    """

    problems: list[Problem]
    job: ResolvedJob | None = None
    request: dict[str, Any] | None = None
    notices: tuple[str, ...] = ()


def translate(body: models.Submission, context: ServerContext) -> Submission:
    """Translate a request's body.

    Raises:
        PackageError: there is no such uploaded package.
        ConfigError: the config isn't YAML, or isn't a mapping.
    """
    if isinstance(body.config, str):
        document = parse(body.config, CONFIG)
    else:
        # The client wrote JSON, which has no lines that a message could name.
        document = replace(parse(json.dumps(body.config), CONFIG), lines={})

    refusal = _refusal(body, context)
    package = None
    if body.package_path is not None and refusal is None:
        package = Path(body.package_path)
    elif body.package:
        package = stored(body.package, context.home.root)
    key = ("packagePath",) if body.package_path is not None else ("package",)
    return Submission(
        name=body.job_id,
        package_input=PackageInput(key, "", _ADVICE),
        document=document,
        args=body.args,
        package=package,
        package_refusal=refusal,
        modernize=body.modernize,
        backend=body.backend,
        options=body.place,
    )


def check(body: models.Submission, context: ServerContext) -> CheckedJob:
    """Check a job without submitting it. It may lack a program; then the service's request stays open.

    Raises:
        PackageError: there is no such uploaded package; the package can't be put into a snapshot.
        ConfigError: the config isn't YAML; there is no such backend.
    """
    submission = translate(body, context)
    try:
        planned = plan(submission, program_required=False)
    except SpecError as error:
        return CheckedJob(error.problems)
    except DestinationError as error:
        return CheckedJob([Problem(("place",), str(error))])
    job = planned.job
    if not planned.has_program:
        return CheckedJob([], job, notices=job.notices)
    try:
        result = dry_run(planned)
    except ConfigError as error:
        return CheckedJob([Problem((), str(error))])
    return CheckedJob([], job, result.request, (*job.notices, *result.notices))


def _refusal(body: models.Submission, context: ServerContext) -> Problem | None:
    """The reason why this server doesn't accept the package that the request names."""
    if body.package_path is None:
        return None
    key = ("packagePath",)
    if body.package:
        return Problem(key, "an uploaded package is the whole program: give package or packagePath, not both.")
    if not context.local:
        return Problem(
            key, "only a server that listens on its own machine alone takes a directory: upload the package."
        )
    if not Path(body.package_path).is_absolute():
        return Problem(key, f"{body.package_path[:80]!r}: expected an absolute path.")
    return None
