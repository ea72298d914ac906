"""A spec that came over HTTP → a job, by the same way as one of the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError
from footplate.jobs import backends
from footplate.jobs.backends import located, named
from footplate.jobs.package import Snapshot, stored
from footplate.jobs.package.modules import no_module, no_package
from footplate.jobs.spec.draft import Draft, draft
from footplate.jobs.spec.migration import apply
from footplate.jobs.spec.problems import Problem, SpecError
from footplate.jobs.spec.resolving import ResolvedJob, problems, resolve
from footplate.jobs.spec.yamlfile import parse
from footplate.server.dependencies import ServerContext
from footplate.server.models import Submission

CONFIG = "config"  # what messages call the text that was sent


def _drafted(given: Submission) -> Draft:
    """What was asked for.

    Raises:
        ConfigError: the config is no YAML, or not of this kind.
    """
    if isinstance(given.config, str):
        document = parse(given.config, CONFIG)
    else:
        document = replace(parse(json.dumps(given.config), CONFIG), lines={})  # lines of ours, which nobody has written
    return draft(document, {}, given.args, given.job_id)


@dataclass(frozen=True)
class Asked:
    """A job that was asked for, with nothing wrong with it.

    Attributes:
        job: the job.
        package: its program: a directory, or one that was taken; None if `packageUris`, or an image, bring it.
        place: where it runs, as the backend has it.
    """

    job: ResolvedJob
    package: Path | Snapshot | None
    place: dict[str, str]


@dataclass(frozen=True)
class Rehearsal:
    """What would happen to a job that was submitted.

    Attributes:
        problems: why it would be refused.
        job: the job; None when there are problems.
        request: what would be asked of the backend's service; None where there is none, or no program was given.
        notices: what would be said.
    """

    problems: list[Problem]
    job: ResolvedJob | None = None
    request: dict[str, Any] | None = None
    notices: tuple[str, ...] = ()


def read(given: Submission, context: ServerContext) -> Asked:
    """The job that was asked for.

    Raises:
        SpecError: with everything that is wrong with it.
        PackageError: there is no such package.
        ConfigError: the config is no YAML; there is no such backend, or it can't be reached so.
    """
    named(given.backend)
    asked, package = _drafted(given), _package(given, context)
    found = [*problems(asked), *_of_the_program(given, asked, package, context)]
    if not _has_program(given, asked):
        text = "no program: upload its package (POST /api/packages) and give the digest, or packageUris, or an image."
        found.append(Problem(("package",), text))
    if found:
        raise SpecError(found)
    job = resolve(apply(asked) if given.modernize else asked)
    return Asked(job, package, located(given.backend, given.place, job.job_dir))


def rehearse(given: Submission, context: ServerContext) -> Rehearsal:
    """What would happen to a job. Its program may be left out, which leaves open what would be asked of a service.

    Raises:
        PackageError: there is no such package.
        ConfigError: the config is no YAML; there is no such backend.
    """
    named(given.backend)
    asked, package = _drafted(given), _package(given, context)
    found = [*problems(asked), *_of_the_program(given, asked, package, context)]
    if found:
        return Rehearsal(found)
    job = resolve(apply(asked) if given.modernize else asked)
    try:
        place = located(given.backend, given.place, job.job_dir)
    except ConfigError as error:
        return Rehearsal([Problem(("place",), str(error))])
    if not _has_program(given, asked):
        return Rehearsal([], job, notices=job.notices)
    try:
        request, notices = backends.rehearse(given.backend, job, place, package)
    except ConfigError as error:
        return Rehearsal([Problem((), str(error))])
    return Rehearsal([], job, request, (*job.notices, *notices))


def _package(given: Submission, context: ServerContext) -> Path | Snapshot | None:
    if given.package_path is not None:
        return Path(given.package_path)
    return stored(given.package, context.home.root) if given.package else None


def _spec(asked: Draft) -> dict[str, Any]:
    spec = asked.values.get("trainingInput")
    return spec if isinstance(spec, dict) else {}


def _has_program(given: Submission, asked: Draft) -> bool:
    spec = _spec(asked)
    config = spec.get("masterConfig")
    image = isinstance(config, dict) and config.get("imageUri")
    return bool(given.package or given.package_path or spec.get("packageUris") or image)


def _of_the_program(
    given: Submission, asked: Draft, package: Path | Snapshot | None, context: ServerContext
) -> list[Problem]:
    """What is wrong with the program that was given, if one was."""
    spec = _spec(asked)
    brought = [name for name, there in (("package", given.package), ("packagePath", given.package_path)) if there]
    if len(brought) > 1 or (given.package and spec.get("packageUris")):
        return [Problem((brought[-1],), "what was uploaded is all of the program: leave out the others.")]
    if given.package_path is not None:
        if not context.local:
            text = "only a server that listens on its own machine alone takes a directory of it: upload the package."
            return [Problem(("packagePath",), text)]
        if not Path(given.package_path).is_absolute():
            return [Problem(("packagePath",), f"{given.package_path[:80]!r}: expected an absolute path.")]
        if text := no_package(Path(given.package_path)):
            return [Problem(("packagePath",), text)]
    module = spec.get("pythonModule")
    text = no_module(package, module) if package is not None and isinstance(module, str) else ""
    return [asked.problem(("trainingInput", "pythonModule"), text)] if text else []
