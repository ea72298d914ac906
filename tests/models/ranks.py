"""Several ranks for a test: real processes, forked, with torchrun's variables set.

results = run(train, 2)                      # [return value of rank 0, return value of rank 1]
with start(train, 2) as ranks: ranks.kill(1, signal.SIGTERM); ranks.exit_codes()
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

# Once for all ranks: each would import them, for its trainer, optimizer and sharded weights, in three seconds.
import torch._dynamo
import torch.distributed.checkpoint.state_dict  # noqa: F401
from ports import free_port

import footplate.distributed.ddp
import footplate.distributed.fsdp
import footplate.distributed.model_parallel
import footplate.training.trainer  # noqa: F401

FORK = multiprocessing.get_context("fork")


class Ranks:
    """Processes that run one function, each as a rank."""

    def __init__(self, function: Callable[..., Any], world: int, *args: Any, **environ: str) -> None:
        port = free_port()
        self._pipes = [FORK.Pipe(duplex=False) for _ in range(world)]
        self.processes = [
            FORK.Process(target=_rank, args=(function, rank, world, port, self._pipes[rank][1], args, environ))
            for rank in range(world)
        ]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        for _, sending in self._pipes:
            sending.close()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid or 0, number)

    def exit_codes(self, timeout_s: float = 120.0) -> list[int | None]:
        """Exit codes of the ranks; None for a rank that still runs at the time limit."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def results(self, timeout_s: float = 120.0) -> list[Any]:
        """Return values of the ranks."""
        end = time.monotonic() + timeout_s
        values = []
        for rank, (receiving, _) in enumerate(self._pipes):
            assert receiving.poll(max(0.0, end - time.monotonic())), f"rank {rank} gave nothing in {timeout_s} s"
            try:
                ok, value = pickle.loads(receiving.recv_bytes())
            except EOFError:
                ok, value = False, f"ended without a result; exit statuses of all ranks: {self.exit_codes(5.0)}"
            assert ok, f"rank {rank}:\n{value}"
            values.append(value)
        return values


def start(function: Callable[..., Any], world: int, *args: Any, **environ: str) -> Ranks:
    """Ranks as a context; `function(*args)` runs in each."""
    return Ranks(function, world, *args, **environ)


def run(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0, **environ: str) -> list[Any]:
    """Return values of `function(*args)` on each rank."""
    with start(function, world, *args, **environ) as ranks:
        return ranks.results(timeout_s)


def _rank(
    function: Callable[..., Any], rank: int, world: int, port: int, sending: Any, args: Any, environ: Any
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environ,
    )  # fmt: skip

    # A collection in a rank leaves out what the test process made before. Else it would copy all pages of that memory.
    gc.freeze()
    try:
        sending.send_bytes(pickle.dumps((True, function(*args))))
    except SystemExit:
        raise
    except BaseException:
        sending.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.exit(1)
