"""The environment of a run: machine, packages, commit and command, recorded in `environment.json` when it starts.

Only `fp.Report()` records it, so it is that of the run, and not that of the machine which makes a report later.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from footplate.core.version import __version__
from footplate.hardware.machine import cpu_model, usable_cores
from footplate.tracking.file_moves import replace_text
from footplate.tracking.parameters import without_credentials

NAME = "environment.json"
GIT_TIMEOUT_S = 10.0
# Words in a command after whose equals sign, or after which, a secret follows.
_SECRETS = ("token", "password", "secret", "api_key", "api-key", "apikey")
HIDDEN = "HIDDEN"


def record_environment(directory: Path, devices: list[str]) -> None:
    """Write the environment of this process. Raises OSError if the directory can't be written to."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(directory / NAME, json.dumps(examine(devices), indent=2) + "\n")


def examine(devices: list[str]) -> dict[str, Any]:
    """Return the environment of this process as plain values. No environment variable is recorded."""
    import psutil

    packages = {distribution.name: distribution.version for distribution in distributions() if distribution.name}
    return {
        "recorded": time.time(),
        "command": command(sys.orig_argv),
        "directory": str(Path.cwd()),
        "git": _git(),
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": devices,
        "python": platform.python_version(),
        "footplate": __version__,
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def read_environment(directory: Path) -> dict[str, Any]:
    """Read the environment of a run; empty if it wasn't recorded."""
    try:
        environment = json.loads((directory / NAME).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}


def command(words: list[str]) -> str:
    """Return a command line as a shell reads it, without secrets.

    >>> command(["python", "train.py", "--api-key=abc", "--lr", "0.1"])
    'python train.py --api-key=HIDDEN --lr 0.1'
    """
    shown: list[str] = []
    hides_next = False
    for word in words:
        option, equals, _ = word.partition("=")
        is_secret = option.startswith("-") and any(secret in option.lower() for secret in _SECRETS)
        if hides_next and not word.startswith("-"):
            word = HIDDEN
        elif is_secret and equals:
            word = f"{option}={HIDDEN}"
        hides_next = is_secret and not equals
        shown.append(without_credentials(word))
    if shown:
        shown[0] = os.path.basename(shown[0])  # noqa: PTH119  a name, also when it is no path
    return shlex.join(shown)


def _git() -> dict[str, Any] | None:
    """Return the commit of the working directory, and if files of it have changed; None without git or a repository."""
    try:
        commit = _answer("rev-parse", "HEAD")
        changes = _answer("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


def _answer(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
    )
    return done.stdout.strip()
