"""Worker processes that run a transform, for a transform that holds Python's lock (`Loader(transform=…, num_workers=4)`).

    the loader's threads decode the images; each thread then takes a free worker for a few rows at a time
        thread ── (rows, their numbers, epoch) ──► worker
        thread ◄── rows, or the error of a row ─── worker

The transform is sent once, with cloudpickle. So it may be a lambda, or from a notebook. The free worker takes the next
rows, so which worker gets which rows varies. The result for a row doesn't, since its generator is made from (seed,
epoch, row).

`footplate.data.pipeline.worker_process` says how workers live and die.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from footplate.data.pipeline.row_transform import Row, Transform, row_generator, takes_rng
from footplate.data.pipeline.worker_process import WorkerPool, freeze_error, revive_error, serving

_HINT = (
    "If it ran out of memory, use a smaller num_workers=, or num_workers=0 to call the function in threads of this "
    "process."
)


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
        self._pool = WorkerPool("footplate.data.pipeline.row_workers:serve", count, message, "transform=", _HINT)
        self.close = self._pool.close

    @property
    def is_alive(self) -> bool:
        """True if no worker has died."""
        return self._pool.is_alive

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
        reply = self._pool.request(_dump(([_pack(row) for row in rows], list(numbers), epoch)))
        results, failure = pickle.loads(reply)
        if failure is not None:
            at, error, text = failure
            raise RowError(at, revive_error(error, text, "transform="))
        return [_unpack(row) for row in results]


def serve(descriptor: int) -> None:
    """Run a worker: receive the transform, then rows, until the socket closes.

    Args:
        descriptor: the file descriptor of the socket.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        connection = serving(descriptor)
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
                    failure = at, freeze_error(error), traceback.format_exc()
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
