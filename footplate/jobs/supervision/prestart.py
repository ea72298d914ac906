"""A supervisor process that is started before its job is known.

Starting an interpreter and importing modules takes longer than everything else between `jobs submit` and the first line of
the user's program. So the command first starts the future supervisor, and reads the job while that process imports:

    the command                         the prestarted process
    prestarted() ─────────────────────► imports the supervisor; reads a line from its standard input
    reads, checks and stores the job
    makes a reconcile pass: the job starts
    take(), assign(NAME) ─────────────► supervises that job, as if it had been started for it
    ends without an assignment ───────► reads the end of the file, and ends

When the command assigns the job, the job is in the store already, with the process as its supervisor. If either process
dies in between, the next pass finds a job whose supervisor is gone.
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

_prestarted: subprocess.Popen[bytes] | None = None


@contextlib.contextmanager
def prestarted() -> Iterator[None]:
    """Start the process in its own session. It ends with this context, unless it was taken."""
    global _prestarted
    _prestarted = subprocess.Popen(
        # -P: don't import modules from the command's current directory.
        [sys.executable, "-P", "-m", "footplate.jobs.supervision.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(LIBRARY),
        start_new_session=True,
    )
    try:
        yield
    finally:
        if _prestarted is not None and _prestarted.stdin is not None:
            _prestarted.stdin.close()
            _prestarted = None


def take(python: str, library: str) -> subprocess.Popen[bytes] | None:
    """Take the process, once, if it runs this interpreter, and imports Footplate from this directory."""
    global _prestarted
    process, _prestarted = _prestarted, None
    fits = process is not None and (python, library) == (sys.executable, LIBRARY) and process.poll() is None
    return process if fits else None


def assign(process: subprocess.Popen[bytes], name: str) -> None:
    """Give the process its job. If it has died meanwhile, the next reconcile pass finds that."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{name}\n".encode())
        process.stdin.close()
    except BrokenPipeError:
        pass


def await_assignment() -> str:
    """Wait, in the prestarted process, for the name of its job. The process ends if there is no job for it."""
    name = sys.stdin.readline().strip()
    if not name:
        sys.exit(0)
    return name


def settle(home: Home, log: Path) -> None:
    """Set the prestarted process's environment, directory and standard streams, as in any other supervisor."""
    os.environ.update(home.variables())
    os.chdir(home.root)
    with Path(os.devnull).open("rb") as nothing, log.open("ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def environment(library: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a supervisor: that of this process, without a server's token, and without a job's variables.

    A job's program may submit another job. If the other job's supervisor had the program's `FOOTPLATE_JOB_ID`, it would be
    killed together with the program.

    Args:
        library: the directory from which it imports Footplate.
        variables: further variables.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_SUPERVISORS}
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH", "")]))
    return {**kept, **(variables or {}), "PYTHONPATH": path}
