"""Lock that keeps a run's directory to one writer.

The writer locks the directory's `.lock` with `flock`. The kernel releases the lock when its holder dies. A forked child,
such as a loader's worker, closes its copy of the file at once, so that it doesn't keep the lock after its parent.

On a shared disk, the lock of a process on a lost machine may stay for a long time, since the file server waits for the
client. Then a later attempt of the same launch or job takes over: it locks a new file, and renames it to `.lock`. If the
earlier attempt is still alive, it notices before it writes its next checkpoint, and ends (`check`). Any other process is
refused. The file names the holder, its launch, and its attempt.

A holder that is not an attempt removes the file at the end, while it still holds the lock. A process that waited for that
file sees that it is no longer the directory's lock, and takes the next one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:
    # Windows has no fcntl.
    fcntl = None

from footplate.core.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

NAME = ".lock"
# An earlier attempt that is being ended may take a moment to exit.
PATIENCE_S = 5.0


@contextlib.contextmanager
def only_writer(directory: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold a directory as its only writer, for a `with` block. Make the directory if needed.

    Args:
        directory: the run's.
        patience_s: how long to wait for another holder.

    Raises:
        ConfigError: the directory can't be written to, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = _locked(directory, patience_s)
    except OSError as error:
        raise ConfigError(
            f'default_root_dir="{directory}" can\'t be written to: {error.strerror}. Choose another directory.'
        ) from None
    with _closed_in_children(file, directory):
        try:
            yield
        finally:
            # A later attempt may be taking over.
            if not _attempts():
                with contextlib.suppress(OSError):
                    (directory / NAME).unlink()


def check(directory: Path) -> None:
    """Check that this process still holds a directory, if it has locked it.

    Raises:
        CheckpointError: a later attempt has taken over.
    """
    for file, held in _held.items():
        if held == directory and not _is_current(file, directory):
            raise CheckpointError(
                f'default_root_dir="{directory}": a later attempt trains in it now, so this attempt writes nothing more.'
            )


def is_held(directory: Path) -> bool | None:
    """Return True if a process holds a directory, False if a process has left its lock behind, None without a lock."""
    try:
        file = os.open(directory / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        if fcntl is None:
            return None
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(file)
    return False


def _locked(directory: Path, patience_s: float) -> int:
    """Lock the directory. Return the descriptor of its lock."""
    deadline = time.monotonic() + patience_s
    while True:
        file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        with _closed_unless_kept(file) as keep:
            if _flock(file, directory) and _is_current(file, directory):
                _write_holder(file)
                return keep()
            holder = _holder(file)
        if time.monotonic() > deadline:
            if _follows(holder):
                log.warning("%s: this attempt takes over from %s, which is lost", directory, _described(holder))
                return _take_over(directory)
            raise ConfigError(
                f'default_root_dir="{directory}" is in use: {_described(holder)} trains in it. '
                "Wait for it or end it, or choose another directory."
            )
        time.sleep(0.05)


@contextlib.contextmanager
def _closed_unless_kept(file: int) -> Iterator[Callable[[], int]]:
    """Close a descriptor at the end of a block, unless the yielded function was called. It returns the descriptor."""
    kept: list[int] = []

    def keep() -> int:
        kept.append(file)
        return file

    try:
        yield keep
    finally:
        if not kept:
            os.close(file)


def _flock(file: int, directory: Path) -> bool:
    """Lock a file. Return False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        log.warning(
            "%s: this file system has no locks (%s). A second process could write there too.",
            directory, error.strerror,
        )  # fmt: skip
    return True


def _take_over(directory: Path) -> int:
    """Replace a lock that another process holds by a new, locked file."""
    new = directory / f"{NAME}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        with _closed_unless_kept(file) as keep:
            _flock(file, directory)
            _write_holder(file)
            new.rename(directory / NAME)
            return keep()
    finally:
        new.unlink(missing_ok=True)


def _is_current(file: int, directory: Path) -> bool:
    """Return True if the directory's lock is this open file, and was not replaced."""
    try:
        return os.path.samestat(os.fstat(file), (directory / NAME).stat())
    except FileNotFoundError:
        return False


def _attempts() -> dict[str, int]:
    """Return the launch and the job of this process, with the number of the attempt."""
    attempts = {}
    for kind, attempt in (("LAUNCH", "ATTEMPT"), ("JOB_ID", "JOB_ATTEMPT")):
        name = os.environ.get(f"FOOTPLATE_{kind}")
        if name:
            attempts[f"{kind} {name}"] = int(os.environ.get(f"FOOTPLATE_{attempt}") or 0)
    return attempts


def _follows(holder: dict[str, Any]) -> bool:
    """Return True if this process is a later attempt of the holder's launch or job."""
    theirs = holder.get("attempts")
    theirs = theirs if isinstance(theirs, dict) else {}
    return any(attempt > theirs[name] for name, attempt in _attempts().items() if isinstance(theirs.get(name), int))


def _write_holder(file: int) -> None:
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "attempts": _attempts(),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def _holder(file: int) -> dict[str, Any]:
    """Return what a lock file contains about its holder."""
    try:
        holder = json.loads(os.pread(file, 1000, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _described(holder: dict[str, Any]) -> str:
    if not {"pid", "host", "since"} <= holder.keys():
        return "another process"
    return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"


# The file descriptors of the locks that this process holds, with their directories.
_held: dict[int, Path] = {}


def _close_all() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


@contextlib.contextmanager
def _closed_in_children(file: int, directory: Path) -> Iterator[None]:
    _held[file] = directory
    try:
        yield
    finally:
        if file in _held:
            del _held[file]
            os.close(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
