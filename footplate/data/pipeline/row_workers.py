"""Processes that run a row function, for one that holds Python's lock (`Loader(transform=…, num_workers=4)`).

    the loader's threads decode images as ever; each then lends a worker for a few rows at a time
        thread ── (rows, their numbers, epoch) ──► worker
        thread ◄── rows, or the error of one ───── worker

The function travels once, by cloudpickle, so it may be a lambda, or from a notebook. Which worker gets which rows depends
on who is free; what comes of a row doesn't, as its generator is made from (seed, epoch, row) wherever it is used.

Workers are fresh interpreters (nothing is forked, no script imported again), each at the other end of a socket. One that
dies, killed for want of memory, say, closes its socket: its thread raises an error, as does everyone who asks afterwards. A
worker whose loader is gone reads the end of its socket, and ends too.
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
from footplate.data.pipeline import row_transform

_END_S = 5.0


class RowError(Exception):
    """What a row function raised in a worker, and for which of the rows that it was given."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


class Workers:
    """Some processes; they live until `close`, or until nobody holds this any more.

    Args:
        transform: the row function.
        seed: of the rows' generators.
        count: how many processes.
    """

    def __init__(self, transform: row_transform.Transform, seed: int, count: int) -> None:
        message = cloudpickle.dumps((transform, seed))
        found = [_Worker() for _ in range(count)]
        self._free: SimpleQueue[_Worker | None] = SimpleQueue()
        self._dead: _Worker | None = None
        self.close = weakref.finalize(self, _end, found)
        for worker in found:
            worker.connection.send_bytes(pickle.dumps(sys.path))
            worker.connection.send_bytes(message)
            self._free.put(worker)

    @property
    def is_alive(self) -> bool:
        """Whether no worker has died."""
        return self._dead is None

    def run(self, given: Sequence[row_transform.Row], numbers: Sequence[int], epoch: int) -> list[row_transform.Row]:
        """What the function makes of some rows; waits for a free worker.

        Args:
            given: the rows.
            numbers: of each in the table.
            epoch: of their generators.

        Raises:
            RowError: the function raised an error.
            DataError: a worker has died.
        """
        worker = self._free.get()
        if worker is None:
            self._free.put(None)
            raise self._death()
        try:
            worker.connection.send_bytes(_dump(([_pack(row) for row in given], list(numbers), epoch)))
            results, failure = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._dead = worker
            self._free.put(None)
            raise self._death() from None
        self._free.put(worker)
        if failure is not None:
            at, error, text = failure
            raise RowError(at, _revive(error, text))
        return [_unpack(row) for row in results]

    def _death(self) -> DataError:
        worker = self._dead
        assert worker is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_END_S)
        code = worker.process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return DataError(
            f"A worker process of transform= has died ({how}). Was it out of memory? Then use a smaller num_workers=, or "
            "num_workers=0 to call the function in threads of this process."
        )


class _Worker:
    """A process and our end of its socket."""

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
    """A worker's life: take the function, then rows, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the loader will close the socket
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        sys.path[:] = pickle.loads(connection.recv_bytes())
        transform, seed = cloudpickle.loads(connection.recv_bytes())
        with_rng = row_transform.takes_rng(transform)
        while True:
            given, numbers, epoch = pickle.loads(connection.recv_bytes())
            results: list[row_transform.Row] = []
            failure = None
            for at, (row, number) in enumerate(zip(given, numbers, strict=True)):
                try:
                    arguments = {"rng": row_transform.row_generator(seed, epoch, number)} if with_rng else {}
                    results.append(_pack(transform(_unpack(row), **arguments)))
                except Exception as error:
                    failure = at, _freeze(error), traceback.format_exc()
                    break
            connection.send_bytes(_dump((results, failure)))


class _Packed:
    """A tensor on its way: an array is pickled much faster."""

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
    """Plain pickle where it will do, cloudpickle for what was defined in a script."""
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
    """The error that a worker saw, with its traceback as a note."""
    revived: BaseException = DataError("transform= failed.") if error is None else pickle.loads(error)
    revived.add_note(f"In a worker process:\n{text.rstrip()}")
    return revived
