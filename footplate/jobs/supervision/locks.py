"""A file lock that ends with its holder: the kernel releases a `flock` however the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.02


class Held(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def held(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a lock. The file is created. Processes that are started meanwhile don't inherit the lock.

    Raises:
        Held: another process still holds the lock after `patience_s` seconds.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Held from None
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(file)
