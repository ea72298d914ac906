"""A supervisor that is started before there is a job for it.

An interpreter's start and its imports take longer than all else between `jobs submit` and the first line of the user's
program. So the command starts the process that will be the supervisor first, and reads the job while that one imports:

    the command                         the reserve
    begun() ──────────────────────────► imports the supervisor; reads a line from its standard input
    reads, checks and stores the job
    sweeps: it is a job's turn
    take(), post(NAME) ───────────────► is the supervisor of that job, as if it had been started for it
    ends without having posted ───────► reads the end of the file, and ends

The job is in the store, and the reserve is noted as its supervisor, before the name is posted: should either process die in
between, the next sweep finds a job whose supervisor is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.version import LIBRARY

if TYPE_CHECKING:
    from footplate.jobs.home import Home


_NOT_FOR_SUPERVISORS = (
    "FOOTPLATE_TOKEN", "FOOTPLATE_JOB_ID", "FOOTPLATE_JOB_NAME", "FOOTPLATE_JOB_DIR", "FOOTPLATE_JOB_ATTEMPT",
    "FOOTPLATE_ATTEMPT",
)  # fmt: skip

_reserve: subprocess.Popen[bytes] | None = None


@contextlib.contextmanager
def begun() -> Iterator[None]:
    """Have the process, in a session of its own, until it is taken or this is over."""
    global _reserve
    _reserve = subprocess.Popen(
        # -P: the folder of the command, where it starts, holds no modules for it
        [sys.executable, "-P", "-m", "footplate.jobs.supervision.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=surroundings(LIBRARY),
        start_new_session=True,
    )
    try:
        yield
    finally:
        if _reserve is not None and _reserve.stdin is not None:
            _reserve.stdin.close()
            _reserve = None


def take(python: str, library: str) -> subprocess.Popen[bytes] | None:
    """The process, if it is there and runs this interpreter and imports Footplate from this directory; only once."""
    global _reserve
    found, _reserve = _reserve, None
    fits = found is not None and (python, library) == (sys.executable, LIBRARY) and found.poll() is None
    return found if fits else None


def post(process: subprocess.Popen[bytes], name: str) -> None:
    """Tell the process of which job it is the supervisor. One that has died meanwhile is found by the next sweep."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{name}\n".encode())
        process.stdin.close()
    except BrokenPipeError:
        pass


def awaited() -> str:
    """In the reserve: the name of its job. Ends the process if there is none for it."""
    name = sys.stdin.readline().strip()
    if not name:
        sys.exit(0)
    return name


def settle(home: Home, log: Path) -> None:
    """In the reserve, once it has a job: have the surroundings and the standard streams of one that was started for it."""
    os.environ.update(home.variables())
    os.chdir(home.root)
    with Path(os.devnull).open("rb") as nothing, log.open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def surroundings(library: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """A supervisor's environment: this process's, without a server's token, and without the variables of a job.

    A job's program may submit another job. If that one's supervisor had the program's `FOOTPLATE_JOB_ID`, it would be
    killed with the job.

    Args:
        library: the directory from which it imports Footplate.
        variables: more of them.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_SUPERVISORS}
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH", "")]))
    return {**kept, **(variables or {}), "PYTHONPATH": path}
