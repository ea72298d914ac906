"""One writer in a run's directory.

The directory's `.lock` is locked with `flock`: the kernel lets go of it when its holder dies, however that happens, so a
lock can't be left over. What is written in it only says who holds it. A forked child (a loader's worker) closes its copy
of the file at once, so that it doesn't hold the lock in its parent's place.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from footplate.errors import ConfigError

log = logging.getLogger(__name__)

NAME = ".lock"
PATIENCE_S = 5.0  # an earlier attempt that is being ended may take a moment to go


@contextlib.contextmanager
def only_writer(directory: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold a directory as its only writer; makes it if it isn't there.

    Args:
        directory: the run's.
        patience_s: how long to wait for another holder to go.

    Raises:
        ConfigError: the directory can't be written to, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f'default_root_dir="{directory}" can\'t be written to: {error.strerror}. Choose another directory.'
        ) from None
    with _closed_in_children(file):
        _lock(file, directory, patience_s)
        _write_holder(file, directory)
        yield


def _lock(file: int, directory: Path, patience_s: float) -> None:
    if fcntl is None:
        return
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                log.warning(
                    "%s: this file system has no locks (%s), so nothing keeps a second process from writing there.",
                    directory, error.strerror,
                )  # fmt: skip
                return
        if time.monotonic() > deadline:
            raise ConfigError(
                f'default_root_dir="{directory}" is in use: {_holder(file)} trains in it. '
                "Wait for it or end it, or choose another directory."
            )
        time.sleep(0.05)


def _write_holder(file: int, directory: Path) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now().isoformat(" ", "seconds")}
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
    except OSError as error:
        raise ConfigError(
            f'default_root_dir="{directory}" can\'t be written to: {error.strerror}. Choose another directory.'
        ) from None


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


_held: set[int] = set()


def _close_all() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


@contextlib.contextmanager
def _closed_in_children(file: int) -> Iterator[None]:
    _held.add(file)
    try:
        yield
    finally:
        if file in _held:
            _held.remove(file)
            os.close(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
