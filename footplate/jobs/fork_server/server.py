"""`python -m footplate.jobs.fork_server.server CONFIG`: the fork server of a tuning. `starting.py` becomes it.

    imports ──► listens on `fork_server.sock` in the tuning's folder
    a connection:  have the files of imported modules changed?  yes: end, and so refuse
                   fork ──► the fork makes forks for the programs, and sends its process id
                            reads the name of its job, and supervises it

The fork server itself never reads from a connection, so nobody can keep it waiting.

The user's package isn't in `sys.path` during the imports. A supervisor does without it, too. Only a program has it, in the
place that an interpreter gives it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from footplate.core.identity.module_origin import installed_directories
from footplate.core.version import LIBRARY
from footplate.jobs.fork_server.environment import Marker, reads_of
from footplate.jobs.fork_server.programs import Origin, Programs, use
from footplate.jobs.fork_server.request import SOCKET
from footplate.launch import wire

JOB_ID = "FOOTPLATE_JOB_ID"
STALE = 3
"""The exit code of a fork server whose modules have changed."""

# A supervisor of a job on this machine imports these, some of them late.
_SUPERVISOR = (
    "footplate.jobs.supervision.supervisor", "footplate.jobs.backends.local.attempt",
    "footplate.jobs.backends.local.members", "footplate.jobs.backends.local.usage", "psutil",
)  # fmt: skip

# Threads that a fork may leave behind, since their libraries provide for it. Importing pyarrow starts jemalloc's thread,
# which returns unused memory to the kernel. In a fork, jemalloc does that when memory is freed.
_LEFT_BEHIND = ("jemalloc_bg_thd",)

Role = Callable[[], None]


@dataclass(frozen=True)
class Config:
    """The settings of a fork server.

    Attributes:
        folder: the folder of the tuning's job.
        package: the digest of the trials' package.
        variables: the variables that the package adds, as `Installed.env`.
        source: the directory of the package in `sys.path`; empty if the package has none.
        locks: the locks that protect the package, and its environment.
        names: what the program imports.
        installed: directories of installed packages.
        library: the directory from which Footplate must be imported.
        programs: the number of processes of an attempt.
    """

    folder: str
    package: str
    variables: Mapping[str, str]
    source: str
    locks: Sequence[str]
    names: Sequence[str]
    installed: Sequence[str]
    library: str
    programs: int


def main(config: Config) -> None:
    """Run the fork server. In a fork, run what the fork is for."""
    marker = Marker(JOB_ID)
    base = dict(os.environ)
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if entry != config.source]
    reads = reads_of(lambda: _import(config))
    sys.path[:] = path
    if why := _why_unable(config):
        raise SystemExit(why)

    versions = _versions()
    # What exists now is never garbage. A collection in a fork then doesn't touch its pages, and so doesn't copy them.
    gc.collect()
    gc.freeze()
    _serve(config, Origin(sys.executable, base, reads), marker, versions)()


def _import(config: Config) -> None:
    for name in _SUPERVISOR:
        importlib.import_module(name)
    directories = [*config.installed, *installed_directories(), f"{LIBRARY}/footplate"]
    for name in config.names:
        if _is_installed(name.partition(".")[0], directories):
            _import_name(name)


def _is_installed(package: str, directories: Sequence[str]) -> bool:
    """Return True if a top-level package is in one of the directories. A user's own code isn't."""
    if package in sys.builtin_module_names:
        return True
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    return spec.origin == "frozen" or any(Path(place).is_relative_to(each) for place in places for each in directories)


def _import_name(name: str) -> None:
    """Import a module, or an attribute of a module. The program will show an error, if there is one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        home, _, attribute = name.rpartition(".")
        if home in sys.modules:
            with suppress(Exception):
                getattr(sys.modules[home], attribute)
    except Exception:
        traceback.print_exc()


def _why_unable(config: Config) -> str:
    """Explain why forks of this process wouldn't be like new interpreters; empty if they would."""
    if config.library != LIBRARY:
        return f"the package's environment has another Footplate, in {LIBRARY}"
    source = Path(config.source) if config.source else None
    for entry in source.iterdir() if source is not None else ():
        if entry.name.removesuffix(".py") in sys.modules:
            return f"the package has a module {entry.name.removesuffix('.py')}, and so has its supervisor"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has touched a GPU"
    # NumPy's library starts threads when it is imported, and ends them before a fork.
    fork = os.fork()
    if fork == 0:
        os._exit(0)
    os.waitpid(fork, 0)
    threads = _threads()
    return f"an import has started {threads} threads" if threads else ""


def _threads() -> int:
    """The number of threads of this process, without the main thread and those of `_LEFT_BEHIND`."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name not in _LEFT_BEHIND for name in names) - 1


def _versions() -> dict[str, tuple[int, int]]:
    """The times of change and the sizes of the files of all modules."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file: version for file in files if isinstance(file, str) and (version := _version(file))}


def _version(file: str) -> tuple[int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _serve(config: Config, origin: Origin, marker: Marker, versions: Mapping[str, tuple[int, int]]) -> Role:
    """Fork for each connection. Returns in the forks alone, with what the fork is for."""
    listener = _listen(Path(config.folder))
    # The kernel collects the exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        with connection:
            if changed := next((file for file, version in versions.items() if _version(file) != version), None):
                print(f"{changed} has changed", file=sys.stderr, flush=True)
                sys.exit(STALE)
            # Both processes would write what waits in the buffers.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            try:
                pid = os.fork()
            except OSError as error:
                # The trial begins from nothing, or waits there for room.
                print(f"no fork: {error}", file=sys.stderr, flush=True)
                continue
            if pid == 0:
                listener.close()
                return _fork_programs(config, origin, marker, connection.dup())


def _listen(folder: Path) -> socket.socket:
    """Listen on the socket. It appears when it can be connected to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    # The address of a socket is shorter than the path of a folder may be.
    path = Path(f"/proc/self/fd/{directory}/{SOCKET}")
    with suppress(FileNotFoundError):
        path.with_suffix(".new").unlink()
    listener.bind(str(path.with_suffix(".new")))
    listener.listen(64)
    path.with_suffix(".new").rename(path)
    os.close(directory)
    return listener


def _fork_programs(config: Config, origin: Origin, marker: Marker, connection: socket.socket) -> Role:
    """Make the forks of a supervisor. Returns in all of these processes."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    programs = Programs(origin)
    for _ in range(config.programs):
        program = programs.fork(marker)
        if program is not None:
            connection.close()
            return program
    return lambda: _supervise(config, programs, connection)


def _supervise(config: Config, programs: Programs, connection: socket.socket) -> None:
    """Supervise the job that the reconcile pass names. Ends without a job."""
    from footplate.jobs.backends.local import members
    from footplate.jobs.home import Home
    from footplate.jobs.package import Installed
    from footplate.jobs.package.environment_locks import Hold
    from footplate.jobs.supervision import prestart, supervisor

    received = None
    with connection, suppress(OSError):
        wire.send(connection, {"pid": os.getpid()})
        received = wire.receive(connection)
    if received is None:
        os._exit(0)
    order, _ = received
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:] = [entry for entry in sys.path if entry != config.source]
    home = Home.from_env()
    prestart.settle(home, home.job(order["name"]) / supervisor.SUPERVISOR_LOG)
    holds = tuple(Hold(Path(lock)) for lock in config.locks)
    members.use_installed(config.package, home.root, Installed(Path(sys.executable), dict(config.variables), holds))
    use(programs)
    supervisor.log_to_stderr()
    supervisor.main(order["name"])
    # The end of an interpreter would take longer than the rest: it has imported what its program has.
    logging.shutdown()
    os._exit(0)


def _read(words: Iterable[str]) -> Config:
    (text,) = words
    return Config(**json.loads(text))


if __name__ == "__main__":
    main(_read(sys.argv[1:]))
