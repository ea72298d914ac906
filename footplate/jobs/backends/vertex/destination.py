"""The destination of a job on Vertex AI: a project, and a bucket for its package. The region is part of the spec.

If no flag names them, gcloud's settings do:

    project          --project, GOOGLE_CLOUD_PROJECT, CLOUDSDK_CORE_PROJECT, `gcloud config set project`
    staging bucket   --staging-bucket; otherwise the bucket of --job-dir, as with `gcloud ai-platform`
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from pathlib import Path

from footplate.core.errors import ConfigError

_PROJECT = re.compile(r"([a-z0-9.-]+\.[a-z]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|[0-9]{6,}")
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^/\0]+)*/?")


def project(option: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Find the project's id.

    Raises:
        ConfigError: nothing names a project, or the name is wrong.
    """
    sources = {
        "--project": option,
        "GOOGLE_CLOUD_PROJECT": environ.get("GOOGLE_CLOUD_PROJECT"),
        "CLOUDSDK_CORE_PROJECT": environ.get("CLOUDSDK_CORE_PROJECT"),
        "gcloud's configuration": _configured(environ),
    }
    source, identifier = next(((name, value) for name, value in sources.items() if value), ("", None))
    if identifier is None:
        raise ConfigError(
            "Vertex AI runs jobs in a project: give --project, or set GOOGLE_CLOUD_PROJECT, or: "
            "gcloud config set project PROJECT"
        )
    if not _PROJECT.fullmatch(identifier):
        raise ConfigError(f"{source} {identifier!r}: expected a project's id, such as my-project-123, or its number.")
    return identifier


def staging(option: str | None, job_dir: str | None) -> str:
    """Find the bucket for packages: `gs://bucket/path`, without a slash at its end.

    Raises:
        ConfigError: nothing names a bucket, or the name is wrong.
    """
    # gcloud also accepts a bucket without gs://.
    bucket = option if option is None or "://" in option else f"gs://{option}"
    if bucket is None and job_dir and job_dir.startswith("gs://"):
        bucket = "gs://" + job_dir.removeprefix("gs://").partition("/")[0]
    if bucket is None:
        raise ConfigError("Vertex AI installs packages from a bucket: give --staging-bucket gs://BUCKET.")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"--staging-bucket {bucket}: expected gs://BUCKET, or gs://BUCKET/PATH.")
    return bucket.rstrip("/")


def _configured(environ: Mapping[str, str]) -> str | None:
    """The project of gcloud's active configuration."""
    folder = Path(environ.get("CLOUDSDK_CONFIG") or Path(environ.get("HOME", "~")).expanduser() / ".config" / "gcloud")
    try:
        active = environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text().strip()
        if not re.fullmatch(r"[a-z][-a-z0-9]*", active):
            return None
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(folder / "configurations" / f"config_{active}")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return None
    return parser.get("core", "project", fallback=None)
