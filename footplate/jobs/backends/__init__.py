"""The backends of jobs: the places where a job's processes run. Each is a folder with the same few files.

    contract.py   the interface: `Backend`, and the `Attempt` that it begins
    local/        this machine
    ray/          a Ray cluster
    slurm/        a Slurm cluster
    vertex/       Vertex AI
    each          __init__.py   the Backend
                  attempt.py    a running attempt at a job

The supervisor (`jobs/supervision/`) runs on the machine that submitted the job, wherever the job runs. It knows no details
of a backend: it begins an attempt, follows it, and stops it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from footplate.core.errors import ConfigError, did_you_mean
from footplate.jobs.backends.contract import Backend

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "local": {},
    "ray": {"address": "the address of the cluster's dashboard: http://HOST:8265"},
    "slurm": {
        "partition": "the partition; by default SBATCH_PARTITION's, or the cluster's default",
        "account": "the account that is charged; by default SBATCH_ACCOUNT's, or your default account",
        "qos": "the quality of service; by default SBATCH_QOS's, or the cluster's default",
        "time": "the time limit of one start, such as 12:00:00; before it the job saves, and Slurm requeues it; by default "
        "the partition's",
        "sbatch-args": 'further options of sbatch, which override Footplate\'s: "--constraint=a100 --mem=0"',
    },
    "vertex": {
        "project": "the Google Cloud project; by default that of GOOGLE_CLOUD_PROJECT, or gcloud's",
        "staging-bucket": "gs://…, the bucket for packages; by default the bucket of --job-dir",
    },
}
"""The backends, and the options that determine a job's destination there."""

NAMES = tuple(OPTIONS)


def get_backend(name: str) -> Backend:
    """Return a backend by its name in `--backend` and in the store.

    Raises:
        ConfigError: there is no backend of this name.
        MissingExtra: the backend's package isn't installed.
    """
    if name not in NAMES:
        raise ConfigError(f'"{name}" is not a backend of jobs: expected {", ".join(NAMES)}.')
    return importlib.import_module(f"footplate.jobs.backends.{name}").BACKEND


def destination(name: str, options: Mapping[str, str], job_dir: str | None) -> dict[str, str]:
    """Complete the options of a backend: the destination that is kept with a job.

    Args:
        name: the backend's name.
        options: its options.
        job_dir: the job's directory, which gives the default of some options.

    Raises:
        ConfigError: there is no such backend or option; an option is missing, or has a wrong value.
    """
    backend = get_backend(name)
    for option in options:
        if option not in OPTIONS[name]:
            raise ConfigError(
                f'"{option}" is not an option of the backend {name}. {did_you_mean(option, OPTIONS[name])}'
            )
    return backend.destination({**options, "job-dir": job_dir})
