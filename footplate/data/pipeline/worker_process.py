"""Worker processes: new interpreters at the other ends of sockets. Nothing is forked, no script is imported again.

    pool = WorkerPool("footplate.data.pipeline.row_workers:serve", 4, message, "transform=", hint)
    reply = pool.request(…)                # the next free worker takes it

Each process calls the function of that name with the descriptor of its socket, gets the first message, and then answers one
request after another. When a worker dies, for example because memory ran out, its socket closes. The thread that waits for
it raises an error, and so does every later request. When the pool is gone, a worker reads the end of its socket and exits.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue

import cloudpickle

from footplate.core.errors import DataError

_END_S = 5.0


class WorkerPool:
    """Worker processes. They live until `close`, or until this object is deleted.

    Args:
        serve: `"module:function"` that each process calls with the descriptor of its socket.
        count: how many processes.
        message: the first message that each gets.
        owner: what they work for, for messages.
        hint: what the user may change if a process dies, for messages.
        environ: environment variables of the processes, beside those of this one.
    """

    def __init__(
        self,
        serve: str,
        count: int,
        message: bytes,
        owner: str,
        hint: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        workers = [_Worker(serve, environ or {}) for _ in range(count)]
        self._owner, self._hint = owner, hint
        self._free: SimpleQueue[_Worker | None] = SimpleQueue()
        self._dead: _Worker | None = None
        self.close = weakref.finalize(self, _end, workers, self._free)
        for worker in workers:
            worker.connection.send_bytes(pickle.dumps(sys.path))
            worker.connection.send_bytes(message)
            self._free.put(worker)

    @property
    def is_alive(self) -> bool:
        """True if no worker has died."""
        return self._dead is None

    def request(self, message: bytes) -> bytes:
        """Send a message to the next free worker, and return its reply.

        Raises:
            DataError: a worker has died.
        """
        worker = self._free.get()
        if worker is None:
            # A worker has died. The mark stays in the queue, so that every thread gets the error.
            self._free.put(None)
            raise self._death_error()

        try:
            worker.connection.send_bytes(message)
            reply = worker.connection.recv_bytes()
        except (EOFError, OSError):
            self._dead = worker
            self._free.put(None)
            raise self._death_error() from None
        self._free.put(worker)
        return reply

    def _death_error(self) -> DataError:
        worker = self._dead
        if worker is None:
            return DataError(f"The worker processes of {self._owner} have ended.")
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_END_S)
        code = worker.process.returncode
        ending = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return DataError(f"A worker process of {self._owner} has died ({ending}). {self._hint}")


class _Worker:
    """A process, and this process's end of its socket."""

    def __init__(self, serve: str, environ: Mapping[str, str]) -> None:
        module, _, function = serve.partition(":")
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import {function}; {function}({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **path, **environ},
                stdin=subprocess.DEVNULL,
            )
        self._socket, self.connection = ours, Connection(os.dup(ours.fileno()))

    def hang_up(self) -> None:
        """Let both ends read the end of the socket. `close` wouldn't wake a thread that reads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wait for the process, and close this end. A process that doesn't exit is killed."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._socket.close()
        self.connection.close()


def _end(workers: list[_Worker], free: SimpleQueue[_Worker | None]) -> None:
    for worker in workers:
        worker.hang_up()
    # Threads that wait for a worker get an error.
    free.put(None)
    for worker in workers:
        worker.close()


def serving(descriptor: int) -> Connection:
    """Return a worker's end of its socket. The worker finds modules where the process that started it does.

    Args:
        descriptor: the file descriptor of the socket.
    """
    # Ctrl-C goes to the whole process group. The process that started this one then closes the socket, which ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    sys.path[:] = pickle.loads(connection.recv_bytes())
    return connection


def freeze_error(error: Exception) -> bytes | None:
    """Return an error in bytes; None if it can't be sent."""
    try:
        frozen = cloudpickle.dumps(error)
        pickle.loads(frozen)
    except Exception:
        return None
    return frozen


def revive_error(frozen: bytes | None, text: str, owner: str) -> BaseException:
    """Return the error that a worker caught, with its traceback as a note.

    Args:
        frozen: the error.
        text: its traceback.
        owner: what the worker worked for.
    """
    unknown = DataError(f"{owner} failed. The note below shows the error.")
    revived: BaseException = unknown if frozen is None else pickle.loads(frozen)
    revived.add_note(f"In a worker process:\n{text.rstrip()}")
    return revived
