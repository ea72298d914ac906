"""The fork servers that this process has started (`fork_server.py`), and the pool of those that it keeps.

A launch takes a fork server, and returns it when all of its workers have ended. Fork servers in the pool wait, so that
from the second launch on, workers start in the time of a fork. A launch only takes one that fits (`ServerKey`). A worker
gets its whole environment and its directory from its own launch.

A fork server in the pool ends

- after `IDLE_S` without a launch;
- when there are more than `MAX_POOLED`, the oldest first;
- with this process, in whichever way that ends;
- with the thread that started it, which is why only that thread takes it again.

A process that is forked from this one doesn't own these fork servers, and forgets them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.launch import wire

MAX_POOLED = 2
IDLE_S = 600.0
# A fork server that would end within this time takes no new launch.
MARGIN_S = 30.0

_BOOTSTRAP = (
    "import json, sys; config = json.loads(sys.argv.pop()); sys.path[:] = config.pop('sys_path'); "
    "from footplate.launch.fork_server import main; main(**config)"
)
_READ_BY_IMPORTS = (
    "ATEN_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "HIP_", "JAX_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_",
    "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH", "VECLIB_", "XLA_",
)  # fmt: skip


@dataclass(frozen=True)
class ServerKey:
    """The settings that a fork server can't change once it runs.

    Attributes:
        path: where it finds modules.
        preload: the modules that it has imported.
        environment: the variables that libraries read when they are loaded.
        thread: the kernel's number of the thread that started it.
    """

    path: tuple[str, ...]
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    thread: int

    @classmethod
    def of_launch(cls, path: Sequence[str], preload: Sequence[str], environment: Mapping[str, str]) -> ServerKey:
        """The key that a launch from this thread needs."""
        read = sorted((name, value) for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS))
        return cls(tuple(path), tuple(preload), tuple(read), threading.get_native_id())


class ServerProcess:
    """A fork server, as the process that started it sees it. The end of its connection is its end.

    Attributes:
        key: its fixed settings.
        process: its process.
        connection: the socket to it.
        ready: whether its imports are done.
        sound: whether it has fulfilled all requests.
    """

    def __init__(self, key: ServerKey, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.key = key
        self.process = process
        self.connection = connection
        self.ready = False
        self.sound = True
        self.pooled_at = 0.0
        self._numbers = 0

    def next_number(self) -> int:
        """A number for a worker, which no other worker of this fork server has had."""
        self._numbers += 1
        return self._numbers

    def request(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a request."""
        # If the fork server has died, the next read from its connection shows it.
        with contextlib.suppress(OSError):
            wire.send(self.connection, message, fds)

    def end(self) -> int:
        """Kill it, and so its workers, if it still runs; return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        return code

    def is_usable(self) -> bool:
        """Return True if it is alive and idle, and will be for a while."""
        if self.process.poll() is not None or time.monotonic() > self.pooled_at + IDLE_S - MARGIN_S:
            return False
        # An idle fork server sends nothing: if there is something to read, it is its end.
        return not select.select([self.connection], [], [], 0)[0]


# The fork servers that are ready, the oldest first.
_pool: list[ServerProcess] = []
_lock = threading.Lock()


def start(key: ServerKey, environment: Mapping[str, str], directory: str) -> ServerProcess:
    """Start a fork server. Doesn't wait for its imports."""
    ours, theirs = socket.socketpair()
    config = {"fd": theirs.fileno(), "parent": os.getpid(), "preload": key.preload, "sys_path": key.path}
    with theirs:
        # In a session of its own: Ctrl-C is for the supervisor, which then tells the workers.
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(config)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=directory if Path(directory).is_dir() else None,
            env=dict(environment),
            start_new_session=True,
        )
    return ServerProcess(key, process, ours)


def take(key: ServerKey) -> ServerProcess | None:
    """Take a fork server with this key out of the pool; return None if there is none."""
    with _lock:
        for server in [server for server in _pool if not server.is_usable()]:
            _pool.remove(server)
            server.end()
        for server in reversed(_pool):
            if server.key == key:
                _pool.remove(server)
                return server
    return None


def put_back(server: ServerProcess) -> None:
    """Keep a fork server, all of whose workers have ended, for another launch."""
    server.pooled_at = time.monotonic()
    server.request({"do": "idle", "seconds": IDLE_S})
    with _lock:
        _pool.append(server)
        while len(_pool) > MAX_POOLED:
            _pool.pop(0).end()


@atexit.register
def end_all() -> None:
    """End the fork servers in the pool."""
    with _lock:
        while _pool:
            _pool.pop().end()


def _forget() -> None:
    """Empty the pool in a forked child: its fork servers belong to the parent."""
    global _lock
    _lock = threading.Lock()
    for server in _pool:
        server.connection.close()
        # It isn't a child of this process, so there is nothing to wait for.
        server.process.returncode = 0
    _pool.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
