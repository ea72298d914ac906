"""Where jobs run: a folder for each place, with the same few files.

    contract.py   what a place must be able to do: `Backend`, and the `Attempt` that it begins
    local/        this machine
    ray/          a Ray cluster
    vertex/       Vertex AI
    each          __init__.py   the Backend
                  attempt.py    one attempt at a job, under way there

A job's supervisor (`jobs/supervision/`) is on the machine that submitted it, wherever it runs. It knows nothing of places:
it asks one to begin an attempt, hears it, and stops it.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError, Unavailable, did_you_mean
from footplate.jobs.backends.contract import Backend

if TYPE_CHECKING:
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "local": {},
    "ray": {"address": "of the cluster's dashboard: http://HOST:8265"},
    "vertex": {
        "project": "of Google Cloud; by default that of GOOGLE_CLOUD_PROJECT, or gcloud's",
        "staging-bucket": "gs://…, where packages are put; by default the bucket of --job-dir",
    },
}
"""The places, and the options that say where exactly a job runs there."""

NAMES = tuple(OPTIONS)


def named(name: str) -> Backend:
    """A place, by the name that `--backend` and the store have for it.

    Raises:
        ConfigError: there is none of this name.
        MissingExtra: what it needs is not installed.
    """
    if name not in NAMES:
        raise ConfigError(f'"{name}" is no backend of jobs: expected {", ".join(NAMES)}.')
    return importlib.import_module(f"footplate.jobs.backends.{name}").BACKEND


def located(name: str, given: Mapping[str, str], job_dir: str | None) -> dict[str, str]:
    """Where exactly a job runs, as its place keeps it.

    Args:
        name: of the place.
        given: its options.
        job_dir: the job's directory, from which some of them may follow.

    Raises:
        ConfigError: there is no such place, or no such option of it; one of them lacks, or is none.
    """
    backend = named(name)
    for option in given:
        if option not in OPTIONS[name]:
            raise ConfigError(f'"{option}" is no option of the backend {name}. {did_you_mean(option, OPTIONS[name])}')
    return backend.place({**given, "job-dir": job_dir})


def rehearse(
    name: str, resolved: ResolvedJob, place: Mapping[str, str], package: Path | Snapshot | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """What submitting a job would ask of a service, None where there is none, and what it would say.

    Nothing is submitted. The service may not be there, and then that is said.

    Raises:
        ConfigError: the job can't run there as it is.
        PackageError: its package can't be taken.
    """
    from footplate.jobs.package.modules import take_program

    backend = named(name)
    try:
        notices = backend.check(resolved, place)
    except Unavailable as error:
        notices = [str(error)]
    with tempfile.TemporaryDirectory() as scratch:
        spec = resolved.spec
        program = take_program(package, spec.get("packageUris", ()), spec.get("pythonModule"), Path(scratch))
        return backend.request(resolved, place, program), notices
