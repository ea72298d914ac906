"""The nurseries that this process has started (`nursery.py`), and those that it keeps for its next launch.

A launch takes a nursery for itself and gives it back when all of its workers have ended. Kept nurseries wait, so that from
the second launch on, workers start in the time of a fork. One is taken again only for a launch to which it makes no
difference (`Kind`): what a worker gets of its own is its environment, whole, and its directory.

A kept nursery ends
- by itself, after `IDLE_S` without a launch;
- when there are more than `KEPT`, the oldest first;
- with this process, however that ends; and with the thread that started it, which is why only that thread takes it again.

A process that is forked from this one doesn't own its nurseries, and forgets them.
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

KEPT = 2
IDLE_S = 600.0
MARGIN_S = 30.0  # a nursery that will soon end by itself is not taken any more

_BOOTSTRAP = (
    "import json, sys; config = json.loads(sys.argv.pop()); sys.path[:] = config.pop('sys_path'); "
    "from footplate.launch.nursery import main; main(**config)"
)
_READ_BY_IMPORTS = (
    "ATEN_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "HIP_", "JAX_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_",
    "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH", "VECLIB_", "XLA_",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a nursery can't change once it has begun.

    Attributes:
        path: where modules are found.
        preload: the modules that it has imported.
        environment: the variables that libraries read when they are loaded.
        thread: the kernel's number of the thread that started it.
    """

    path: tuple[str, ...]
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    thread: int

    @classmethod
    def of(cls, path: Sequence[str], preload: Sequence[str], environment: Mapping[str, str]) -> Kind:
        """What a launch from this thread needs."""
        read = sorted((name, value) for name, value in environment.items() if name.startswith(_READ_BY_IMPORTS))
        return cls(tuple(path), tuple(preload), tuple(read), threading.get_native_id())


class Nursery:
    """A nursery, seen from the process that started it. Its connection tells of its end.

    Attributes:
        kind: what it is good for.
        process: its process.
        connection: the socket to it.
        ready: whether its imports are done.
        sound: whether it has done all that it was asked to.
    """

    def __init__(self, kind: Kind, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.kind = kind
        self.process = process
        self.connection = connection
        self.ready = False
        self.sound = True
        self.given_at = 0.0
        self._numbers = 0

    def number(self) -> int:
        """A number for a worker, which no other worker of this nursery has had."""
        self._numbers += 1
        return self._numbers

    def order(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Ask it for something."""
        with contextlib.suppress(OSError):  # it has died, of which its socket tells
            wire.send(self.connection, message, fds)

    def end(self) -> int:
        """Kill it, and so its workers, if it is still there; its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        return code

    def serves(self) -> bool:
        """Whether a kept one is alive, and will be for a while."""
        if self.process.poll() is not None or time.monotonic() > self.given_at + IDLE_S - MARGIN_S:
            return False
        return not select.select([self.connection], [], [], 0)[0]  # it has nothing to say but its end


_kept: list[Nursery] = []  # the oldest first
_lock = threading.Lock()


def start(kind: Kind, environment: Mapping[str, str], directory: str) -> Nursery:
    """A new nursery; returns at once."""
    ours, theirs = socket.socketpair()
    config = {"fd": theirs.fileno(), "parent": os.getpid(), "preload": kind.preload, "sys_path": kind.path}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(config)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=directory if Path(directory).is_dir() else None,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the supervisor, which then tells the workers
        )
    return Nursery(kind, process, ours)


def take(kind: Kind) -> Nursery | None:
    """A kept nursery of this kind, which is then the caller's; None if there is none."""
    with _lock:
        for nursery in [one for one in _kept if not one.serves()]:
            _kept.remove(nursery)
            nursery.end()
        for nursery in reversed(_kept):
            if nursery.kind == kind:
                _kept.remove(nursery)
                return nursery
    return None


def give(nursery: Nursery) -> None:
    """Keep a nursery, none of whose workers is left, for another launch."""
    nursery.given_at = time.monotonic()
    nursery.order({"do": "rest", "seconds": IDLE_S})
    with _lock:
        _kept.append(nursery)
        while len(_kept) > KEPT:
            _kept.pop(0).end()


def kept() -> list[int]:
    """The process ids of the nurseries that wait for a launch."""
    return [nursery.process.pid for nursery in _kept]


@atexit.register
def end_all() -> None:
    """End the nurseries that wait for a launch."""
    with _lock:
        while _kept:
            _kept.pop().end()


def _forget() -> None:
    """After a fork, in the child: they are the parent's."""
    global _lock
    _lock = threading.Lock()
    for nursery in _kept:
        nursery.connection.close()
        nursery.process.returncode = 0  # not this process's child: nothing to wait for
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
