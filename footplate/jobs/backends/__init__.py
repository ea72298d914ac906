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
from collections.abc import Mapping

from footplate.core.errors import ConfigError, did_you_mean
from footplate.jobs.backends.contract import Backend

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


def get_backend(name: str) -> Backend:
    """A place, by the name that `--backend` and the store have for it.

    Raises:
        ConfigError: there is none of this name.
        MissingExtra: what it needs is not installed.
    """
    if name not in NAMES:
        raise ConfigError(f'"{name}" is no backend of jobs: expected {", ".join(NAMES)}.')
    return importlib.import_module(f"footplate.jobs.backends.{name}").BACKEND


def destination(name: str, given: Mapping[str, str], job_dir: str | None) -> dict[str, str]:
    """Where exactly a job runs, as its place keeps it.

    Args:
        name: of the place.
        given: its options.
        job_dir: the job's directory, from which some of them may follow.

    Raises:
        ConfigError: there is no such place, or no such option of it; one of them lacks, or is none.
    """
    backend = get_backend(name)
    for option in given:
        if option not in OPTIONS[name]:
            raise ConfigError(f'"{option}" is no option of the backend {name}. {did_you_mean(option, OPTIONS[name])}')
    return backend.destination({**given, "job-dir": job_dir})
