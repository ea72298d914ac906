"""Faults inside a rank, at moments that no signal from outside could hit.

`chaos.py` writes an order to `DIR/order.json`. Rank 0 carries it out after its next batch:

    {"do": "kill", "byte": 4711}     SIGKILL to itself after 4711 bytes of a checkpoint
    {"do": "full", "byte": 4711}     "no space left on device" after 4711 bytes of a checkpoint
    {"do": "kill", "event": 3}       SIGKILL just before the third file operation of the writing thread: making the
                                     directory, opening a file, renaming, deleting an old checkpoint, …

`DIR/clock` moves the wall clock by a number of seconds, for all code in the run that calls `time.time`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import footplate as fp

ORDER, TAKEN, CLOCK = "order.json", "order.taken", "clock"
_EVENTS = {"os.mkdir", "open", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


class Saboteur(fp.Callback):
    """Carries out the orders in a directory.

    Args:
        directory: the directory of the order file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        move_clock(self._directory)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # A process is only used for the next attempt if nothing of the call is left in it.
        time.time = getattr(time.time, "true_time", time.time)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        order = self._directory / ORDER
        if trainer.global_rank != 0 or not order.exists():
            return
        wanted = json.loads(order.read_text())
        if "event" in wanted:
            _kill_before(wanted["event"])
        else:
            _end_writing_after(wanted["byte"], _die if wanted["do"] == "kill" else _find_no_space)
        order.rename(order.with_name(TAKEN))


def move_clock(directory: Path) -> None:
    """Shift `time.time` by the number in `DIR/clock`, which may change at any time."""
    true_time = getattr(time.time, "true_time", time.time)

    def moved() -> float:
        with contextlib.suppress(OSError, ValueError):
            return true_time() + float((directory / CLOCK).read_text())
        return true_time()

    moved.true_time = true_time  # type: ignore[attr-defined]
    time.time = moved


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _find_no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _kill_before(event: int) -> None:
    left = event

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if name in _EVENTS and threading.current_thread().name.startswith("footplate-checkpoint"):
            left -= 1
            if left == 0:
                _die()

    sys.addaudithook(watch)


def _end_writing_after(count: int, act: Callable[[], None]) -> None:
    """Allow a number of bytes to be written to temporary files of checkpoints, then call `act` instead of writing."""
    left = count
    plainly = pathlib.Path.open

    class Limited:
        """A file that accepts no more bytes than the limit leaves."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            nonlocal left
            data = memoryview(data)
            if left < len(data):
                self._file.write(data[:left])
                left = 0
                self._file.flush()
                act()
            left -= len(data)
            return self._file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Limited:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

    def limited(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = plainly(path, *args, **kwargs)
        return Limited(file) if path.parent.name.startswith(".tmp-") else file

    pathlib.Path.open = limited  # type: ignore[assignment]
