"""Python programs of tests, forked from a process that has imported the slow packages: the template.

    process = template.Popen([sys.executable, "-m", "footplate", "run", script], stdout=subprocess.PIPE)
    done = template.run(ROOT / "examples" / "images.py", cwd=tmp_path)

are `subprocess.Popen` and `subprocess.run`, but fork. A fresh interpreter needs two to five seconds of processor time to
import torch and the trainer, JAX or Lightning. A fork needs none.

    this process                       the template                     the program
    the first Popen starts it ──────►  imports torch and more
    each Popen sends its request ───►  forks                  ─────►    runs
                               ◄─────  the process id

The kernel makes the fork a child of this process (`CLONE_PARENT`), as a fresh interpreter would be. So this process waits
for it, and the program sees this process as its parent. Otherwise, too, it runs as in a fresh interpreter: as `__main__`,
with its own arguments, environment and output, and with the end of an interpreter. Each set of packages has a template of
its own. Some tests of each kind still start fresh interpreters.

`install` makes the fork servers of this process's launches (`footplate/launch/fork_server_pool.py`) such forks, and the
agents that it starts as a machine of a launch (`footplate/launch/cluster/member.py`). `install_for_uploaders` does so for
the uploaders of its loggers (`footplate/tracking/uploader.py`), which have a template of their own.
A launch still starts a fresh interpreter

- when it preloads nothing, as launches do that are about fork servers themselves;
- when the test has changed a variable that imports read (`ServerKey.environment`);
- in a fresh interpreter, such as a job.

Libraries set such variables, too, when they are imported. So that a launch doesn't depend on the tests before it, each test
begins with the variables of the beginning (`restore_variables`), and `SET_BY_IMPORTS` don't count.

A program in a fork makes all of its fork servers from itself: before it runs, it forks a template of its own
(`install_in_fork`). So does each process of xdist, for its programs with JAX and Lightning, which it has imported.
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
from typing import IO, Any

from footplate.launch import fork_server_pool, wire
from footplate.launch.cluster import member
from footplate.launch.fork_server_pool import ServerKey, ServerProcess
from footplate.tracking import uploader

PACKAGES = (
    "footplate.training.trainer",
    "footplate.distributed.ddp",
    "footplate.distributed.fsdp",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "footplate.launch.bootstrap",
    "footplate.launch.cluster.agent",
)
# No package that starts threads, since forks don't have them: so MLflow isn't here. JAX has started no devices yet. It has
# read its own variables, so that a program's `JAX_…` variables have no effect.
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
# What the tests import first, for the processes of xdist.
OF_THE_SUITE = (
    *WITH_LIGHTNING,
    *WITH_JAX,
    "bitsandbytes",
    "jax.numpy",
    "matplotlib.figure",
    "pandas",
    "peft",
    "timm",
    "transformers.trainer_utils",
    "wandb",
)
# Of the uploaders. W&B and Trackio read their variables when they are imported. `gradio_client` is what Trackio imports.
TRACKERS = ("footplate.tracking.mlflow_client", "gradio_client")
# Lightning, torch's compiler and Accelerate set these when they are imported, and no fork server reads them.
SET_BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_NVML_BASED_CUDA_CHECK")
_START = "import json, sys; config = json.loads(sys.argv.pop()); sys.path[:] = config.pop('path'); "
_TEMPLATE = _START + "import template; template.main(**config)"
_FORK_SERVER = _START + "from footplate.launch.fork_server import main; main(**config)"
_CLONE_PARENT = 0x00008000  # linux/sched.h
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
# Descriptors of a request are moved above this number before they get their own numbers.
_HIGH_FD = 200

# The templates of this process, by the packages that they have imported.
_templates: dict[tuple[str, ...], Template] = {}
# The templates' variables: those of this process before any test changed one.
_environment = dict(os.environ)


class Template:
    """The process that forks, as its parent sees it: the socket to it, and the variables that its imports have read."""

    def __init__(self, pid: int, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self.pid = pid
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._variables = read_by_imports(environment)

    def fits(self, key: ServerKey) -> bool:
        """Return True if a fork of it is like the fresh fork server of a launch of this process with this key."""
        return read_by_imports(dict(key.environment)) == self._variables and os.getpid() == self._owner

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

    Args:
        arguments: the command.
        packages: those of the template.
        launches: whether the program may start fork servers, which are forks, then.
        settings: those of `subprocess.Popen`.
    """

    def __init__(
        self, arguments: Sequence[Any], *, packages: tuple[str, ...] = PACKAGES, launches: bool = True, **settings: Any
    ) -> None:
        self._packages = packages
        self._launches = launches
        super().__init__(arguments, **settings)

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
            "session": start_new_session, "launches": self._launches, "tests": self._packages == OF_THE_SUITE,
        }  # fmt: skip
        self.pid = template(self._packages).fork(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(
    script: Path,
    *arguments: Any,
    cwd: Path | None = None,
    packages: tuple[str, ...] = WITH_LIGHTNING,
    timeout_s: float = 560.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, in the present environment. Return its exit status, its output and its errors.

    Raises:
        TimeoutExpired: it took more than `timeout_s`. It is killed, with its session.
    """
    process = Popen(
        [sys.executable, script, *arguments], packages=packages, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def template(packages: tuple[str, ...] = PACKAGES) -> Template:
    """The template of this process with these packages. The first call starts it."""
    if packages not in _templates:
        ours, theirs = socket.socketpair()
        config = {"path": sys.path, "fd": theirs.fileno(), "packages": packages}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _TEMPLATE, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment,
            )
        _templates[packages] = Template(process.pid, ours, _environment)
    return _templates[packages]


def is_template(pid: int) -> bool:
    """Return True if this is the process id of a template of this process."""
    return any(one.pid == pid for one in _templates.values())


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported, without those that libraries set."""
    read = ServerKey.of_launch((), (), environment).environment
    return {name: value for name, value in read if name not in SET_BY_IMPORTS}


def restore_variables() -> None:
    """Give this process the variables of the beginning that imports read."""
    for name in read_by_imports(os.environ).keys() - _environment.keys():
        del os.environ[name]
    os.environ.update(read_by_imports(_environment))


def install() -> None:
    """Fork the agents of this process, and the fork servers of its launches where a fork is like a fresh one."""
    global _environment
    _environment = dict(os.environ)

    def start(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
        forks = bool(key.preload) and template().fits(key)
        return (_start_fork if forks else _start_fresh)(key, environment, directory)

    fork_server_pool.start = start
    member.start_agent = _fork_agent


def install_for_xdist() -> None:
    """Fork the processes in which xdist runs tests. Each would import for ten seconds otherwise."""
    from execnet import gateway_io

    def start(io: Any, arguments: Sequence[str], execmodel: Any) -> None:
        io.popen = process = Popen(
            arguments, packages=OF_THE_SUITE, launches=False, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        gateway_io.Popen2IO.__init__(io, process.stdin, process.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster.__init__ = start


def install_for_uploaders() -> None:
    """Fork the uploaders of this process's loggers."""

    def start(environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return Popen(
            [sys.executable, "-c", uploader.BOOTSTRAP], packages=TRACKERS, launches=False, stdin=subprocess.PIPE,
            stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip

    uploader.start = start


def install_in_fork() -> None:
    """Fork the fork servers and agents of this process, which is a fork itself, from a template that is forked now."""
    _templates.clear()
    _templates[PACKAGES] = _forked_template()

    def start(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
        return (_start_fork if template().fits(key) else _start_fresh)(key, environment, directory)

    fork_server_pool.start = start
    member.start_agent = _fork_agent


def _forked_template() -> Template:
    """Fork this process as a template."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    return Template(pid, ours, os.environ)


_start_fresh = fork_server_pool.start


def _start_fork(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
    """Start a fork server as `fork_server_pool.start` does."""
    ours, theirs = socket.socketpair()
    config = {"fd": theirs.fileno(), "parent": os.getpid(), "preload": key.preload, "path": key.path}
    with theirs:
        process = Popen(
            [sys.executable, "-c", _FORK_SERVER, json.dumps(config)], launches=False, stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], cwd=directory, env=environment, start_new_session=True,
        )  # fmt: skip
    return ServerProcess(key, process, ours)


def _fork_agent(reason_fd: int) -> subprocess.Popen[bytes]:
    """Start an agent of a machine as `member.start_agent` does."""
    return Popen(
        [sys.executable, "-c", member.AGENT, str(reason_fd), str(os.getpid())], stdin=subprocess.PIPE,
        start_new_session=True, pass_fds=[reason_fd],
    )  # fmt: skip


def main(fd: int, packages: Sequence[str]) -> None:
    """Run a template. `fd` is its socket to its parent."""
    for package in packages:
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
    if program == "-u":
        program, *arguments = arguments
    if request["launches"]:
        install_in_fork()
    if request["tests"]:
        _templates.clear()
        _templates.update(dict.fromkeys((WITH_JAX, WITH_LIGHTNING), _forked_template()))
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
