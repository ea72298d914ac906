"""The environment variables of a job's processes: those in the lists below, and no others.

Most come from the shell that submitted the job. They are kept in `environment.json`, readable by this user alone, so that
an attempt after a reboot gets the same.

A variable that looks like a secret is not kept: by its name, or because its value is a URL with a user, which may be a
token. Cloud credentials and such URLs come from the environment of the command that starts the supervisor; other secrets
are not passed on. Put a credential that must survive a reboot into a file, such as `~/.aws`, or the file that
`GOOGLE_APPLICATION_CREDENTIALS` names.

The variables of `--env` are kept in a file of their own, `given.json`, readable by this user alone, whatever their names.
They override the others. They are nowhere else, in particular not in the store, which other people may read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from footplate.core.errors import ConfigError

NAMES = {
    "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
    "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "FOOTPLATE_SEED",
}  # fmt: skip
PREFIXES = (
    "LC_", "XDG_", "AWS_", "CLOUDSDK_", "GOOGLE_CLOUD_", "CUDA_", "CUDNN_", "GLOO_", "HF_", "JAX_", "KMP_", "MKL_",
    "MLFLOW_", "NCCL_", "NUMEXPR_", "NVIDIA_", "OMP_", "OPENBLAS_", "PIP_", "PYTHON", "PYTORCH_", "TORCH", "TPU_",
    "UV_", "XLA_",
)  # fmt: skip
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "CLOUDSDK_AUTH_ACCESS_TOKEN",
    "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
)  # fmt: skip

SECRET = re.compile(r"TOKEN|SECRET|PASSW|_KEY|APIKEY|PRIVATE", re.IGNORECASE)
_USER = re.compile(r"://\S*@")
_FILE = "environment.json"
_GIVEN = "given.json"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = (
    "TF_CONFIG", "CLUSTER_SPEC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "CLOUD_ML_TRIAL_ID",
    "CLOUD_ML_HP_METRIC_FILE",
)  # fmt: skip


def from_option(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `--env`. Error messages contain no values.

    >>> from_option(["LEVEL=debug", "HF_TOKEN"], {"HF_TOKEN": "hf_1"})
    {'LEVEL': 'debug', 'HF_TOKEN': 'hf_1'}

    Args:
        words: NAME=VALUE, or NAME for its value in `environ`.
        environ: the environment of the submitting shell.

    Raises:
        ConfigError: a name can't be used, or is given twice, or has no value.
    """
    variables: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError("--env: expected NAME=VALUE or NAME, with a name of letters, digits and underscores.")
        if (
            name in _OURS
            or name.startswith(("FOOTPLATE_JOB_", "FOOTPLATE_TRIAL_"))
            or name in ("FOOTPLATE_ATTEMPT", "FOOTPLATE_TOKEN")
        ):
            raise ConfigError(f"--env {name}: Footplate sets this variable for each process. Leave it out.")
        if name in variables:
            raise ConfigError(f"--env {name}: given twice. Keep one.")
        if not sign and name not in environ:
            raise ConfigError(f"--env {name}: the variable isn't set here. Set it, or give {name}=VALUE.")
        variables[name] = value if sign else environ[name]
    return variables


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a job gets and that may be kept on disk.

    >>> lasting({"PATH": "/bin", "OMP_NUM_THREADS": "2", "AWS_SECRET_ACCESS_KEY": "…", "FOOTPLATE_TOKEN": "…"})
    {'PATH': '/bin', 'OMP_NUM_THREADS': '2'}
    """
    return {name: value for name, value in environ.items() if _is_known(name) and not _USER.search(value)}


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The cloud credentials in an environment, and the URLs with a user.

    >>> credentials({"HF_TOKEN": "…", "https_proxy": "http://me:mine@proxy:3128", "GITHUB_TOKEN": "…"})
    {'HF_TOKEN': '…', 'https_proxy': 'http://me:mine@proxy:3128'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name in CREDENTIALS or (_is_known(name) and _USER.search(value))
    }


def write(folder: Path, environ: Mapping[str, str], extra: Mapping[str, str] | None = None) -> None:
    """Keep a job's part of an environment, and the variables of `--env`. They are on disk when this returns."""
    _write(folder / _FILE, lasting(environ))
    if extra:
        _write(folder / _GIVEN, extra)


def copy(source: Path, folder: Path) -> None:
    """Give a job the variables of another one.

    Args:
        source: the folder of the other job.
        folder: the folder of the job.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    for name in (_FILE, _GIVEN):
        if name == _FILE or (source / name).exists():
            _write(folder / name, _read(source / name))


def _write(path: Path, variables: Mapping[str, str]) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(dict(variables), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job's processes: those on disk, the credentials in the supervisor's environment, and `--env`.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    kept = _read(folder / _FILE)
    extra = _read(folder / _GIVEN) if (folder / _GIVEN).exists() else {}
    return {**kept, **credentials(environ), **extra}


def _read(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Delete the job, and submit it again.") from None


def _is_known(name: str) -> bool:
    return (name in NAMES or name.startswith(PREFIXES)) and not SECRET.search(name)
