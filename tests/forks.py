"""Python programs of tests, in forks of a process that has imported the slow packages.

    process = forks.start(["-m", "step.xla.process", words], environ)
    output, error = process.communicate()

    ended = forks.run(ROOT / "examples" / "resume.py", cwd=tmp_path)
    ended.returncode, ended.stdout, ended.stderr

A fresh interpreter needs about five seconds of processor time to import torch, and JAX or Lightning. A fork needs none.
Otherwise the program runs as in a fresh interpreter: as `__main__`, with its own arguments, environment and output, and
with the end of an interpreter (exit handlers, `sys.last_value`). Its launches fork their fork servers, too
(`template.py`). Some tests of each kind still start fresh interpreters.

The order of events:

1. The first call starts a server for its packages: this file, as a program, which imports them.
2. Each call sends one line to the server. The server forks, and answers with the fork's process id.
3. The fork runs the program, in a session of its own. When it ends, the server writes the exit status to a file.
4. The server ends when its input ends, with the process that started it. The forks end with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import template

# No package that starts threads, since forks don't have them. So MLflow isn't here. JAX is imported, but it has started no
# devices. It has read its own environment variables by then, so that a program's `JAX_…` variables have no effect.
WITH_JAX = (
    "torch._dynamo",
    "torch.distributed",
    "footplate.training.trainer",
    "footplate.checkpoint",
    "footplate.step.xla.runtime.xla_step",
    "models.small",
)
WITH_LIGHTNING = (
    "models",  # declares the operators that torchvision misses on CPU torch
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "lightning.pytorch",
    "accelerate",
    "psutil",
    "rich.table",
    "deltalake",
    "pyarrow.parquet",
    "footplate.training.trainer",
    "footplate.data.loader",
)
TESTS = Path(__file__).parent
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Process:
    """A program that runs. Its methods are those of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[Any],
        environ: Mapping[str, str],
        cwd: Path,
        one_output: bool,
        packages: tuple[str, ...],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._out, self._status = folder / "out", folder / "status"
        self._error = self._out if one_output else folder / "error"
        for file in (self._out, self._error):
            file.touch()
        request = {
            "arguments": [str(argument) for argument in arguments], "environ": {**environ}, "directory": str(cwd),
            "out": str(self._out), "error": str(self._error), "status": str(self._status),
        }  # fmt: skip
        self.returncode: int | None = None
        self._server = _server(packages)
        self.pid = self._server.fork(request)

    def poll(self) -> int | None:
        """Exit status, negative for a signal. None while the program runs."""
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end. Return the output and the errors, or the whole output and ""."""
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} took more than {timeout:g} s:\n{self._error.read_text()}")
            assert self._server.runs(), "the server of forks has ended"
            time.sleep(0.01)
        return self._out.read_text(), "" if self._error == self._out else self._error.read_text()

    @property
    def output(self) -> str:
        """The output and the errors so far."""
        return self._out.read_text() + ("" if self._error == self._out else self._error.read_text())

    def kill(self) -> None:
        """Kill the program and its session if it runs."""
        if self.poll() is None:
            _kill_session(self.pid)


@dataclass(frozen=True)
class Ended:
    """A program that has ended. A negative `returncode` is a signal."""

    returncode: int | None
    stdout: str
    stderr: str


def start(
    arguments: Sequence[Any],
    environ: Mapping[str, str],
    *,
    cwd: Path | None = None,
    one_output: bool = False,
    packages: tuple[str, ...] = WITH_JAX,
) -> Process:
    """Start `python ARGUMENTS…`.

    Args:
        arguments: a script or `-m MODULE`, and the program's own arguments.
        environ: its environment variables.
        cwd: its working directory. None for the present one.
        one_output: errors go where the output goes.
        packages: the packages that it finds imported.
    """
    return Process(arguments, environ, cwd or Path.cwd(), one_output, packages)


def run(script: Path, *arguments: Any, cwd: Path | None = None, timeout_s: float = 560.0) -> Ended:
    """Run a script in the present environment, with Lightning imported, and wait for its end.

    Raises:
        TimeoutError: it took more than `timeout_s`. It is killed, with its session.
    """
    process = start([script, *arguments], os.environ, cwd=cwd, packages=WITH_LIGHTNING)
    try:
        output, error = process.communicate(timeout_s)
    finally:
        process.kill()
    return Ended(process.returncode, output, error)


class _Server:
    """Handle of the server process."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "WORLD_SIZE", "RANK")}
        path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self._process = subprocess.Popen(
            [sys.executable, __file__, *packages], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environ, "PYTHONPATH": path, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )  # fmt: skip
        atexit.register(self._close)

    def fork(self, request: Mapping[str, Any]) -> int:
        """Start a fork. Return its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server of forks has ended"
        return int(line)

    def runs(self) -> bool:
        return self._process.poll() is None

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@functools.cache
def _server(packages: tuple[str, ...]) -> _Server:
    return _Server(packages)


def _serve(requests: TextIO, answers: TextIO) -> dict[str, Any] | None:
    """Fork for each request. Return the request in a fork, and None in the server at the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    _note_end(key.fd, *key.data)
                    continue
                line = requests.readline()
                if not line:
                    for other in selector.get_map().values():
                        if other.data is not None:
                            _kill_session(other.data[0])
                    return None
                request = json.loads(line)
                fork = os.fork()
                if fork == 0:
                    os.setsid()
                    _end_with_the_server()
                    return request
                selector.register(os.pidfd_open(fork), selectors.EVENT_READ, (fork, Path(request["status"])))
                answers.write(f"{fork}\n")
                answers.flush()


def _end_with_the_server() -> None:
    """Let the kernel kill this fork when the server ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _note_end(descriptor: int, fork: int, status: Path) -> None:
    """Write the exit status of a fork that has ended."""
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    if status.parent.exists():
        # A reader never finds half of a file.
        partial = status.with_suffix(".partial")
        partial.write_text(str(code))
        partial.rename(status)


def _become(request: Mapping[str, Any]) -> None:
    """Give this process the files, directory and environment of a program, and run it."""
    flags = os.O_WRONLY | os.O_APPEND
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, request["out"], flags), (2, request["error"], flags)):
        file = os.open(path, how)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    template.install_in_fork()

    program, *rest = request["arguments"]
    if program == "-m":
        module, *rest = rest
        sys.argv[:] = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [program, *rest]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def _main() -> None:
    # Forks have their own input and output.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for package in sys.argv[1:]:
        importlib.import_module(package)
    gc.collect()
    gc.freeze()
    request = _serve(requests, answers)
    requests.close()
    answers.close()
    if request is not None:
        _become(request)


if __name__ == "__main__":
    sys.path.remove(str(TESTS))
    _main()
