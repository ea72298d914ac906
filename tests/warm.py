"""Python scripts, run in forks of a process that has imported the slow packages.

    ended = warm.run(ROOT / "examples" / "resume.py", cwd=tmp_path)
    ended.returncode, ended.stdout, ended.stderr

A fresh interpreter needs six seconds of processor time to import torch and Lightning. A fork needs none. Otherwise a script
runs as it does in a fresh interpreter: as `__main__`, with its own arguments, directory and environment.

The order of events:

1. The first call of `run` starts the server: this file, as a program. The server imports `PACKAGES`.
2. Each call sends one line to the server. The server forks, and waits for the fork.
3. The fork runs the script in a session of its own, and ends as an interpreter ends. The server sends the exit status.
4. The server ends when its input ends, with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# MLflow isn't among them: it starts threads, and a process with threads can't be forked safely. JAX reads its environment
# when it is imported, which the scripts set.
PACKAGES = (
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


@dataclass(frozen=True)
class Ended:
    """A script that has ended. A negative `returncode` is a signal."""

    returncode: int
    stdout: str
    stderr: str


def run(script: Path, *arguments: Any, cwd: Path | None = None, timeout_s: float = 560.0) -> Ended:
    """Run a script in the present environment.

    Args:
        script: the file.
        arguments: its command line.
        cwd: its working directory; the present one by default.
        timeout_s: the time after which the script and its session are killed.

    Raises:
        TimeoutError: the script took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        out, error = Path(name) / "out", Path(name) / "error"
        request = {
            "command": [str(script), *map(str, arguments)], "cwd": str(cwd or Path.cwd()), "environment": {**os.environ},
            "out": str(out), "error": str(error),
        }  # fmt: skip
        status = _server().answer(request, timeout_s)
        return Ended(status, out.read_text(), error.read_text())


class _Server:
    """Handle of the server process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        atexit.register(self.close)

    def answer(self, request: Mapping[str, Any], timeout_s: float) -> int:
        """Let the server run a script. Return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        fork = self._read()

        late = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (late.set(), _kill_session(fork)))
        timer.start()
        try:
            status = self._read()
        except BaseException:  # a test's time limit, or Ctrl-C: the next script needs another server
            _kill_session(fork)
            _servers.remove(self)
            self.close()
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"{request['command']} took more than {timeout_s:g} s")
        return status

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)

    def _read(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server of warm scripts has ended"
        return int(line)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


def _serve(requests: TextIO, answers: TextIO) -> dict[str, Any] | None:
    """Fork for each request. Return the request in a fork, and None in the server at the end."""
    for line in requests:
        request = json.loads(line)
        fork = os.fork()
        if fork == 0:
            os.setsid()
            return request
        answers.write(f"{fork}\n")
        answers.flush()
        _, status = os.waitpid(fork, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()
    return None


def _become(request: Mapping[str, Any], inherited: Sequence[TextIO]) -> None:
    """Give this process the files, directory, environment and arguments of a script."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, request["out"], flags), (2, request["error"], flags)):
        file = os.open(path, how, 0o600)
        os.dup2(file, number)
        os.close(file)
    for stream in inherited:
        stream.close()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def _main() -> None:
    # The scripts' own input and output are other files.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for package in PACKAGES:
        importlib.import_module(package)
    gc.collect()
    gc.freeze()
    request = _serve(requests, answers)
    if request is not None:
        _become(request, (requests, answers))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
