"""Python programs of tests, forked from one process that has imported torch and the trainer: the template.

    process = template.Popen([sys.executable, "-m", "footplate", "run", script], stdout=subprocess.PIPE)

is `subprocess.Popen`, but forks. A fresh interpreter needs two to four seconds of processor time to import torch and the
trainer. A fork needs none.

    this process                       the template                     the program
    the first Popen starts it ──────►  imports torch and more
    each Popen sends its request ───►  forks                  ─────►    runs
                               ◄─────  the process id

The kernel makes the fork a child of this process (`CLONE_PARENT`), as a fresh interpreter would be. So this process waits
for it, and the program sees this process as its parent.

`install` makes the fork servers of this process's launches (`footplate/launch/fork_server_pool.py`) such forks. A launch
still starts a fresh interpreter

- when it preloads nothing, as launches do that are about fork servers themselves;
- when the variables that imports read (`ServerKey.environment`) are not those of the template;
- in a fresh interpreter, such as a job.

A program in a fork makes all of its fork servers from itself: before it runs, it forks a template of its own
(`install_in_fork`). The programs of `forks.py` do so, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from footplate.launch import fork_server_pool, wire
from footplate.launch.fork_server_pool import ServerKey, ServerProcess

PACKAGES = (
    "footplate.training.trainer",
    "footplate.distributed.ddp",
    "torch._dynamo",
    "footplate.launch.bootstrap",
    "footplate.launch.cluster.agent",
)
_START = "import json, sys; config = json.loads(sys.argv.pop()); sys.path[:] = config.pop('path'); "
_TEMPLATE = _START + "import template; template.run(**config)"
_FORK_SERVER = _START + "from footplate.launch.fork_server import main; main(**config)"
_CLONE_PARENT = 0x00008000  # linux/sched.h
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
# Descriptors of a request are moved above this number before they get their own numbers.
_HIGH_FD = 200

_template: Template | None = None
# The template's variables: those of this process before any test changed one.
_environment = dict(os.environ)


class Template:
    """The process that forks, as its parent sees it: the socket to it, and the variables that its imports have read."""

    def __init__(self, pid: int, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self.pid = pid
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._environment = ServerKey.of_launch((), (), environment).environment

    def fits(self, key: ServerKey) -> bool:
        """Return True if a fork of it is like the fresh fork server of a launch of this process with this key."""
        return key.environment == self._environment and os.getpid() == self._owner

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a program. Return its process id."""
        with self._lock:
            wire.send(self._connection, dict(request), fds)
            answer = wire.receive(self._connection)
        assert answer is not None, "the template has ended"
        return answer[0]["pid"]


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, …]`, with a script, `-m` or `-c`, that forks the template.

    The program finds modules where this process does. It ignores the interpreter's own variables, such as `PYTHONPATH`.
    """

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, *_: Any,
    ) -> None:  # fmt: skip
        standard = [fd if fd != -1 else number for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "arguments": [str(argument) for argument in args[1:]], "environment": dict(os.environ if env is None else env),
            "directory": str(cwd or Path.cwd()), "path": sys.path, "fds": [0, 1, 2, *pass_fds],
            "session": start_new_session,
        }  # fmt: skip
        self.pid = template().fork(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def template() -> Template:
    """The template of this process. The first call starts it."""
    global _template
    if _template is None:
        ours, theirs = socket.socketpair()
        config = {"path": sys.path, "fd": theirs.fileno()}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _TEMPLATE, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment,
            )
        _template = Template(process.pid, ours, _environment)
    return _template


def is_template(pid: int) -> bool:
    """Return True if this is the process id of the template of this process."""
    return _template is not None and _template.pid == pid


def install() -> None:
    """Fork the fork servers of this process's launches, where a fork is like a fresh one."""
    global _environment
    _environment = dict(os.environ)

    def start(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
        forks = bool(key.preload) and template().fits(key)
        return (_start_fork if forks else _start_fresh)(key, environment, directory)

    fork_server_pool.start = start


def install_in_fork() -> None:
    """Fork the fork servers of this process, which is a fork itself, from a template that is forked from it now."""
    global _template
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    _template = Template(pid, ours, os.environ)

    def start(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
        return (_start_fork if template().fits(key) else _start_fresh)(key, environment, directory)

    fork_server_pool.start = start


_start_fresh = fork_server_pool.start


def _start_fork(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
    """Start a fork server as `fork_server_pool.start` does."""
    ours, theirs = socket.socketpair()
    config = {"fd": theirs.fileno(), "parent": os.getpid(), "preload": key.preload, "path": key.path}
    with theirs:
        process = Popen(
            [sys.executable, "-c", _FORK_SERVER, json.dumps(config)], stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], cwd=directory, env=environment, start_new_session=True,
        )  # fmt: skip
    return ServerProcess(key, process, ours)


def run(fd: int) -> None:
    """Run the template. `fd` is its socket to its parent."""
    for package in PACKAGES:
        importlib.import_module(package)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=fd))


def _serve(connection: socket.socket) -> None:
    """Fork for each request, until the parent has ended. Never returns in the template; runs a program in a fork."""
    connection.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    while (received := wire.receive(connection)) is not None:
        request, fds = received
        pid = _fork_sibling()
        if pid == 0:
            connection.close()
            _become(request, fds)
            sys.exit()
        for fd in fds:
            os.close(fd)
        wire.send(connection, {"pid": pid})
    os._exit(0)


def _fork_sibling() -> int:
    """Fork this process, as a child of its parent. Return 0 in the fork."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(_SYS_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Give this fork the session, files, directory, environment and path of a program, and run it."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _place(fds, request["fds"])
    with contextlib.suppress(FileNotFoundError):
        os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.path[:] = request["path"]

    program, *arguments = request["arguments"]
    if _FORK_SERVER not in arguments:
        install_in_fork()
    if program == "-m":
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(arguments[0], vars(main))
    else:
        sys.argv[:] = [program, *arguments]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
