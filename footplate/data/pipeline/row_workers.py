"""Worker processes that run a transform, for a transform that holds Python's lock (`Loader(transform=…, num_workers=4)`).

    the loader's threads decode the images; each thread then takes a free worker for a few rows at a time
        thread ── (rows, their numbers, epoch) ──► worker
        thread ◄── rows, or the error of a row ─── worker

The transform is sent once, with cloudpickle. So it may be a lambda, or from a notebook. The free worker takes the next
rows, so which worker gets which rows varies. The result for a row doesn't, since its generator is made from (seed,
epoch, row).

A worker is a new interpreter at the other end of a socket: nothing is forked, no script is imported again. When a
worker dies, for example because memory ran out, its socket closes. The thread that waits for it raises an error, and so
does every later call. When the loader is gone, the worker reads the end of its socket and exits.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import cloudpickle
import numpy as np
import torch

from footplate.core.errors import DataError
from footplate.data.pipeline.row_transform import Row, Transform, row_generator, takes_rng

_END_S = 5.0


class RowError(Exception):
    """An error that a transform raised in a worker.

    Attributes:
        at: the index of the row among the rows that the worker got.
        error: the error.
    """

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


class RowWorkers:
    """Worker processes. They live until `close`, or until this object is deleted.

    Args:
        transform: the user's function of a row.
        seed: seed of the rows' generators.
        count: how many processes.
    """

    def __init__(self, transform: Transform, seed: int, count: int) -> None:
        message = cloudpickle.dumps((transform, seed))
        workers = [_Worker() for _ in range(count)]
        self._free: SimpleQueue[_Worker | None] = SimpleQueue()
        self._dead: _Worker | None = None
        self.close = weakref.finalize(self, _end, workers)
        for worker in workers:
            worker.connection.send_bytes(pickle.dumps(sys.path))
            worker.connection.send_bytes(message)
            self._free.put(worker)

    @property
    def is_alive(self) -> bool:
        """True if no worker has died."""
        return self._dead is None

    def run(self, rows: Sequence[Row], numbers: Sequence[int], epoch: int) -> list[Row]:
        """Transform some rows in the next free worker.

        Args:
            rows: the rows.
            numbers: the number of each row in the table.
            epoch: the epoch of their generators.

        Raises:
            RowError: the transform raised an error.
            DataError: a worker has died.
        """
        worker = self._free.get()
        if worker is None:
            # A worker has died. The mark stays in the queue, so that every thread gets the error.
            self._free.put(None)
            raise self._death_error()

        try:
            worker.connection.send_bytes(_dump(([_pack(row) for row in rows], list(numbers), epoch)))
            results, failure = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._dead = worker
            self._free.put(None)
            raise self._death_error() from None

        self._free.put(worker)
        if failure is not None:
            at, error, text = failure
            raise RowError(at, _revive(error, text))
        return [_unpack(row) for row in results]

    def _death_error(self) -> DataError:
        worker = self._dead
        assert worker is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_END_S)
        code = worker.process.returncode
        ending = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return DataError(
            f"A worker process of transform= has died ({ending}). If it ran out of memory, use a smaller num_workers=, or "
            "num_workers=0 to call the function in threads of this process."
        )


class _Worker:
    """A process, and this process's end of its socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from footplate.data.pipeline.row_workers import serve; serve({theirs.fileno()})",
                ],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def serve(descriptor: int) -> None:
    """Run a worker: receive the transform, then rows, until the socket closes.

    Args:
        descriptor: the file descriptor of the socket.
    """
    # Ctrl-C goes to the whole process group. The loader then closes the socket, which ends this worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        sys.path[:] = pickle.loads(connection.recv_bytes())
        transform, seed = cloudpickle.loads(connection.recv_bytes())
        with_rng = takes_rng(transform)
        while True:
            rows, numbers, epoch = pickle.loads(connection.recv_bytes())
            results: list[Row] = []
            failure = None
            for at, (row, number) in enumerate(zip(rows, numbers, strict=True)):
                try:
                    arguments = {"rng": row_generator(seed, epoch, number)} if with_rng else {}
                    results.append(_pack(transform(_unpack(row), **arguments)))
                except Exception as error:
                    failure = at, _freeze(error), traceback.format_exc()
                    break
            connection.send_bytes(_dump((results, failure)))


class _Packed:
    """A tensor that is sent as an array, which is pickled much faster."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def _pack(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {
        name: _Packed(value.detach().numpy())
        if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16 and value.device.type == "cpu"
        else value
        for name, value in row.items()
    }


def _unpack(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {name: torch.from_numpy(value.array) if isinstance(value, _Packed) else value for name, value in row.items()}


def _dump(message: Any) -> bytes:
    """Pickle a message; with cloudpickle if it has classes or functions that were defined in a script."""
    try:
        return pickle.dumps(message, 5)
    except (pickle.PicklingError, AttributeError, TypeError):
        return cloudpickle.dumps(message, 5)


def _freeze(error: Exception) -> bytes | None:
    try:
        frozen = cloudpickle.dumps(error)
        pickle.loads(frozen)
    except Exception:
        return None
    return frozen


def _revive(error: bytes | None, text: str) -> BaseException:
    """Return the error that a worker caught, with its traceback as a note."""
    unknown = DataError("transform= failed. The note below shows the error.")
    revived: BaseException = unknown if error is None else pickle.loads(error)
    revived.add_note(f"In a worker process:\n{text.rstrip()}")
    return revived
