"""A virtual environment with a package's requirements, created once and shared by all packages with the same requirements.

Its key is the digest of the requirements and of the interpreter. It extends the environment in which Footplate runs: it
includes what is installed there (torch is not downloaded again), and its own packages override those.

1  A lock on `KEY.lock` lets one process create it; other processes wait for that. The lock belongs to the process and to
    the
   pip that it started, so an orphaned pip never writes into an environment that another process creates. A user of the
   environment shares the lock, so that nobody deletes it meanwhile.
2  An environment without the file `READY` is incomplete: it is removed and created again.
3  `python -m venv` creates it, a `.pth` file leads to our own packages, and pip installs the rest. Its output goes to the
   job's log.
4  `READY` is written last, when everything is on disk. Its time is that of the last use.

pip takes its index, proxies and credentials from the user's own settings: `PIP_*` and pip.conf.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from footplate.core.errors import PackageError
from footplate.core.identity.module_origin import package_directories
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.package.requirements import MAIN, is_list, users_environ

READY = "footplate-ready"
_LINES_KEPT = 40
_LINES_SHOWN = 6


@dataclass(frozen=True)
class Wanted:
    """Requirements to install.

    Attributes:
        source: the directory of the requirements*.txt and constraints*.txt.
        needed: further requirements, from setup.py or pyproject.toml.
        distributions: wheels and source distributions.
    """

    source: Path
    needed: tuple[str, ...] = ()
    distributions: tuple[Path, ...] = ()

    @property
    def nothing(self) -> bool:
        """Return True if the running interpreter is enough."""
        return not (self.needed or self.distributions or (self.source / MAIN).is_file())

    def arguments(self) -> list[str]:
        """The arguments of `pip install`."""
        lists = ["-r", str(self.source / MAIN)] if (self.source / MAIN).is_file() else []
        return [*lists, *map(str, self.distributions), *self.needed]

    def key(self) -> str:
        """The digest of these requirements and of the interpreter."""
        lists = sorted(path for path in self.source.glob("*.txt") if is_list(path.name))
        contents = [
            (path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in (*lists, *self.distributions)
        ]
        parts = [contents, list(self.needed), sys.version, sys.executable, package_directories()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def environment(wanted: Wanted, home: Path, log: TextIO) -> tuple[Path, Hold]:
    """Return the interpreter of an environment in `home/environments` with these requirements, and create it if needed.

    Returns:
        The interpreter, and the lock that protects the environment until it is released.

    Raises:
        PackageError: pip can't install the requirements.
    """
    homes = home / "environments"
    homes.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = homes / wanted.key()
    python = directory / "bin" / "python"
    hold = Hold(directory.with_suffix(".lock"))
    try:
        while not (directory / READY).is_file():
            hold.make_exclusive()
            # Another process may have created it while this one waited.
            if not (directory / READY).is_file():
                shutil.rmtree(directory, ignore_errors=True)
                print(f"creating an environment with {_listed(wanted)}", file=log, flush=True)
                _create(directory, python, log, hold.file)
                _install(python, wanted, log, hold.file)
                # Without this, READY might survive a power failure that the other files don't.
                os.sync()
                (directory / READY).write_text(json.dumps(wanted.arguments()))
            hold.share()
    except BaseException:
        hold.release()
        raise
    os.utime(directory / READY)
    return python, hold


def _create(directory: Path, python: Path, log: TextIO, lock: int) -> None:
    # If our own packages include pip, the .pth file makes it available. Don't use find_spec: setuptools takes a search for
    # pip as a sign that pip runs, and then can't be imported in this process.
    own_pip = any(Path(packages, "pip").is_dir() for packages in package_directories())
    command = [sys.executable, "-m", "venv", *(["--without-pip"] if own_pip else []), str(directory)]
    code, output = _run(command, log, lock)
    if code:
        raise PackageError(f"venv ended with {code}:\n{_last(output)}")
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    lines = [f"import site; site.addsitedir({directory!r})" for directory in package_directories()]
    (Path(packages) / "_footplate_outer.pth").write_text("\n".join(lines) + "\n")


def _install(python: Path, wanted: Wanted, log: TextIO, lock: int) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *wanted.arguments()]
    code, output = _run(command, log, lock)
    if code:
        raise PackageError(f"{_culprit(wanted, output)} can't be installed. pip said:\n{_last(output)}")


def _run(command: Sequence[str], log: TextIO, lock: int) -> tuple[int, list[str]]:
    """Run a command that also holds the lock, and copy its output to the log. Returns its exit code and last lines."""
    output: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=users_environ(),
        pass_fds=(lock,), text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            output.append(line.rstrip("\n"))
    return process.returncode, list(output)


def _culprit(wanted: Wanted, output: Sequence[str]) -> str:
    """The requirement that pip's errors name; all requirements if they name none."""
    errors = " ".join(line for line in output if "error" in line.lower())
    names = [line.strip() for line in _lines(wanted)]
    culprits = [name for name in names if _named(name, errors)]
    return culprits[0] if culprits else ", ".join(names)


def _lines(wanted: Wanted) -> list[str]:
    main = wanted.source / MAIN
    lines = main.read_text("utf-8-sig").splitlines() if main.is_file() else []
    listed = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))]
    return [
        *(f"{MAIN}: {line.strip()}" for line in listed),
        *wanted.needed,
        *(path.name for path in wanted.distributions),
    ]


def _named(requirement: str, errors: str) -> bool:
    name = re.match(r"[A-Za-z0-9._-]+?(?=[^A-Za-z0-9._]|-\d|$)", requirement.removeprefix(f"{MAIN}: "))
    if name is None:
        return False
    spelt = re.sub(r"[-_.]+", "[-_.]+", re.escape(name[0]).replace("\\-", "-").replace("\\.", "."))
    return re.search(rf"(?<![\w.-]){spelt}(?![\w])", errors, re.IGNORECASE) is not None


def _last(output: Sequence[str]) -> str:
    lines = [line for line in output if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-_LINES_SHOWN:])


def _listed(wanted: Wanted) -> str:
    return ", ".join(_lines(wanted)) or MAIN
