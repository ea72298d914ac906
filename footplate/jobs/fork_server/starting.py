"""`python -m footplate.jobs.fork_server.starting NAME`: start the fork server of a tuning, as the tuning's supervisor does.

    the tuning's supervisor     this process
    starts it          ─────►   installs the package, which may take minutes
                                reads what the program imports
                                becomes the fork server (`server.py`), in the interpreter and with the variables of a trial
    waits for the socket
    ends it with the tuning

The process dies with the supervisor. If it ends, the supervisor starts it again, a few times. The tuning never needs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from footplate.core.identity.module_origin import package_directories
from footplate.jobs.execution import Execution
from footplate.jobs.fork_server.environment import placeholder
from footplate.jobs.fork_server.imports import imported_names
from footplate.jobs.fork_server.request import SOCKET
from footplate.jobs.fork_server.server import JOB_ID, Config
from footplate.jobs.home import Home
from footplate.jobs.supervision import prestart
from footplate.launch.process_lifetime import die_with

LOG = "fork_server.log"
# A large package may be installed first. After this time, trials don't wait for the fork server.
START_S = 120.0
_MOST_STARTS = 5


class TuningForkServer:
    """The fork server of a tuning, kept by the tuning's supervisor.

    Args:
        home: the home of the jobs.
        execution: what the tuning runs.
    """

    def __init__(self, home: Home, execution: Execution) -> None:
        self._home = home
        self._execution = execution
        self._folder = home.job(execution.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        # On the monotonic clock.
        self._started_at = 0.0
        self._was_ready = False
        self.problem = ""

    def is_starting(self) -> bool:
        """Start it, if it isn't there. Returns True while a trial should wait for it."""
        if self._process is not None and self._process.poll() is None:
            self._was_ready = self._was_ready or (self._folder / SOCKET).exists()
            return not self._was_ready and time.monotonic() < self._started_at + START_S
        # One that never got ready would fail again.
        if self._starts and (not self._was_ready or self._starts >= _MOST_STARTS):
            self.problem = self.problem or _last_line(self._folder / LOG)
            return False
        self._start()
        return True

    def close(self) -> None:
        """End it. The trials go on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._remove_socket()

    def _start(self) -> None:
        self._remove_socket()
        self._starts += 1
        self._started_at, self._was_ready = time.monotonic(), False
        supervisor = os.getpid()
        with (self._folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, self._execution.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._home.root,
                env=prestart.environment(self._execution.library, self._home.variables()),
                start_new_session=True,
                preexec_fn=lambda: die_with(supervisor),
            )

    def _remove_socket(self) -> None:
        with suppress(OSError):
            (self._folder / SOCKET).unlink()


def is_supported() -> bool:
    """Return True on Linux, where the kernel tells what a fork server must know."""
    return sys.platform == "linux"


def main(name: str) -> None:
    """Install the package of a tuning, and become its fork server."""
    from footplate.jobs.backends.local.members import base_environment, directory_of, installed
    from footplate.jobs.store import open_store

    home = Home.from_env()
    store = open_store(home)
    job = store.find(name)
    store.close()
    execution = Execution.from_dict(job.plan)
    folder = home.attempt(name, job.attempt)
    folder.mkdir(mode=0o700, exist_ok=True)
    package = installed(execution.package, home.root, folder)
    source = next((entry for entry in package.env["PYTHONPATH"].split(os.pathsep) if entry != execution.library), "")
    _, module, *_ = execution.arguments
    config = Config(
        folder=str(home.job(name)),
        package=execution.package,
        variables=package.env,
        source=source,
        locks=[str(hold.path) for hold in package.holds],
        names=imported_names([module, *job.plan["tuning"].get("imports", ())], Path(source or os.devnull)),
        installed=package_directories(),
        library=execution.library,
        programs=sum(role.count for role in execution.replicas),
    )
    base = base_environment(home, name, execution, package)
    os.chdir(directory_of(home, execution))
    command = [str(package.python), "-P", "-m", Config.__module__, json.dumps(asdict(config))]
    os.execve(command[0], command, {**base, JOB_ID: placeholder()})


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


if __name__ == "__main__":
    main(sys.argv[1])
