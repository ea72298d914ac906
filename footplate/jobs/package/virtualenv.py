"""A virtual environment with what a package needs beyond this interpreter, made once and shared by all that need the same.

Its key is the digest of the requirements and of the interpreter. It stands on the environment that Footplate runs in: what
is installed there is there too (torch is not downloaded again), and what is installed over it wins.

1  A lock on `KEY.lock` lets one process make it; others wait, and find it made. The lock ends with its process, and with
   the pip that it has started: one that outlives it writes into no environment that another makes. Who uses the environment
   shares the lock, so that nobody deletes it meanwhile.
2  Without `READY` in it, an environment was cut off while it was made: it is removed, and made anew.
3  `python -m venv`, a `.pth` file that leads to our own packages, and pip, which says what it does in the job's log.
4  `READY` is written last, when all of it is on the disk. Its time is that of the last use.

pip takes its index, its proxies and credentials from the user's own settings: `PIP_*` and pip.conf.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from footplate.core.errors import PackageError
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.package.requirements import MAIN, is_list, users_environ

READY = "footplate-ready"
_LINES_KEPT = 40
_LINES_SHOWN = 6


@dataclass(frozen=True)
class Wanted:
    """What is to be installed.

    Attributes:
        source: the directory of the requirements*.txt and constraints*.txt.
        needed: further requirements, as setup.py or pyproject.toml name them.
        distributions: wheels and source distributions.
    """

    source: Path
    needed: tuple[str, ...] = ()
    distributions: tuple[Path, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether the running interpreter is enough."""
        return not (self.needed or self.distributions or (self.source / MAIN).is_file())

    def arguments(self) -> list[str]:
        """Of `pip install`."""
        lists = ["-r", str(self.source / MAIN)] if (self.source / MAIN).is_file() else []
        return [*lists, *map(str, self.distributions), *self.needed]

    def key(self) -> str:
        """The digest of all this and of the interpreter."""
        lists = sorted(path for path in self.source.glob("*.txt") if is_list(path.name))
        contents = [
            (path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in (*lists, *self.distributions)
        ]
        said = [contents, list(self.needed), sys.version, sys.executable, our_packages()]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def environment(wanted: Wanted, home: Path, log: TextIO) -> tuple[Path, Hold]:
    """The interpreter of an environment in `home/environments` that has what is wanted; made if it isn't there.

    Returns:
        The interpreter, and what keeps it there until it is released.

    Raises:
        PackageError: pip couldn't install it.
    """
    homes = home / "environments"
    homes.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = homes / wanted.key()
    python = place / "bin" / "python"
    hold = Hold(place.with_suffix(".lock"))
    try:
        while not (place / READY).is_file():
            hold.be_alone()
            if not (place / READY).is_file():
                shutil.rmtree(place, ignore_errors=True)
                print(f"making an environment with {_listed(wanted)}", file=log, flush=True)
                _make(place, python, log, hold.file)
                _install(python, wanted, log, hold.file)
                os.sync()  # else READY might outlast the machine's sudden end, and the rest not
                (place / READY).write_text(json.dumps(wanted.arguments()))
            hold.share()
    except BaseException:
        hold.release()
        raise
    os.utime(place / READY)
    return python, hold


def _make(place: Path, python: Path, log: TextIO, lock: int) -> None:
    # Then it is there through the .pth file. Not by find_spec: setuptools takes being asked for pip as pip's running, and
    # can't be imported in this process afterwards.
    own_pip = any(Path(directory, "pip").is_dir() for directory in our_packages())
    command = [sys.executable, "-m", "venv", *(["--without-pip"] if own_pip else []), str(place)]
    code, said = _run(command, log, lock)
    if code:
        raise PackageError(f"venv ended with {code}:\n{_last(said)}")
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    lines = [f"import site; site.addsitedir({directory!r})" for directory in our_packages()]
    (Path(packages) / "_footplate_outer.pth").write_text("\n".join(lines) + "\n")


def our_packages() -> list[str]:
    """The directories of what is installed for the running interpreter."""
    here = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        here.append(site.getusersitepackages())
    return [path for path in dict.fromkeys(here) if Path(path).is_dir()]


def _install(python: Path, wanted: Wanted, log: TextIO, lock: int) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *wanted.arguments()]
    code, said = _run(command, log, lock)
    if code:
        raise PackageError(f"{_culprit(wanted, said)} can't be installed. pip said:\n{_last(said)}")


def _run(command: Sequence[str], log: TextIO, lock: int) -> tuple[int, list[str]]:
    """Run a command that keeps the lock too, its output to the log; returns how it ended, and its last lines."""
    said: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=users_environ(),
        pass_fds=(lock,), text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            said.append(line.rstrip("\n"))
    return process.returncode, list(said)


def _culprit(wanted: Wanted, said: Sequence[str]) -> str:
    """Which requirement pip's errors name; all of them when they name none."""
    errors = " ".join(line for line in said if "error" in line.lower())
    names = [line.strip() for line in _lines(wanted)]
    found = [name for name in names if _named(name, errors)]
    return found[0] if found else ", ".join(names)


def _lines(wanted: Wanted) -> list[str]:
    main = wanted.source / MAIN
    lines = main.read_text("utf-8-sig").splitlines() if main.is_file() else []
    given = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))]
    return [
        *(f"{MAIN}: {line.strip()}" for line in given),
        *wanted.needed,
        *(path.name for path in wanted.distributions),
    ]


def _named(requirement: str, errors: str) -> bool:
    name = re.match(r"[A-Za-z0-9._-]+?(?=[^A-Za-z0-9._]|-\d|$)", requirement.removeprefix(f"{MAIN}: "))
    if name is None:
        return False
    spelt = re.sub(r"[-_.]+", "[-_.]+", re.escape(name[0]).replace("\\-", "-").replace("\\.", "."))
    return re.search(rf"(?<![\w.-]){spelt}(?![\w])", errors, re.IGNORECASE) is not None


def _last(said: Sequence[str]) -> str:
    wanted = [line for line in said if line.strip()]
    return "\n".join(f"  {line}" for line in wanted[-_LINES_SHOWN:])


def _listed(wanted: Wanted) -> str:
    return ", ".join(_lines(wanted)) or MAIN
