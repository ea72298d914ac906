"""The variables that a job's processes get: those named here, and no others.

They are those of the shell that submitted the job, written down when it was (`environment.json`, readable by this
user alone), so that an attempt after a reboot has the same. What looks like a secret, by its name or as a URL with a
user, who may be a token, is not written down: the cloud's credentials, and such URLs, come from whoever starts the
supervisor; the others not at all. What must last beyond a reboot belongs into a file: `GOOGLE_APPLICATION_CREDENTIALS`
names one, and `~/.aws` is one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from footplate.errors import ConfigError

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


def lasting(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a job gets, and may be written down.

    >>> lasting({"PATH": "/bin", "OMP_NUM_THREADS": "2", "AWS_SECRET_ACCESS_KEY": "…", "FOOTPLATE_TOKEN": "…"})
    {'PATH': '/bin', 'OMP_NUM_THREADS': '2'}
    """
    return {name: value for name, value in environ.items() if _is_known(name) and not _USER.search(value)}


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The cloud's credentials in an environment, and the URLs with a user.

    >>> credentials({"HF_TOKEN": "…", "https_proxy": "http://me:mine@proxy:3128", "GITHUB_TOKEN": "…"})
    {'HF_TOKEN': '…', 'https_proxy': 'http://me:mine@proxy:3128'}
    """
    return {
        name: value
        for name, value in environ.items()
        if name in CREDENTIALS or (_is_known(name) and _USER.search(value))
    }


def write(folder: Path, environ: Mapping[str, str]) -> None:
    """Keep what lasts of an environment with a job; on the disk when this returns."""
    with os.fdopen(os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(lasting(environ), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What a job's processes get: what was kept, and the credentials in the supervisor's environment.

    Raises:
        ConfigError: what was kept isn't there any more, or is damaged.
    """
    try:
        kept = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / _FILE} can't be read: {error}. Delete the job, and submit it again.") from None
    return {**kept, **credentials(environ)}


def _is_known(name: str) -> bool:
    return (name in NAMES or name.startswith(PREFIXES)) and not SECRET.search(name)
