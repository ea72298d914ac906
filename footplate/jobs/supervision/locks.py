"""A lock that dies with its holder: `flock` on a file, which the kernel lets go of however a process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LOOK_S = 0.02


class Held(Exception):
    """Somebody else holds the lock."""


@contextlib.contextmanager
def held(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a lock; the file is made if it isn't there. Processes that are started meanwhile don't inherit it.

    Raises:
        Held: another process has it, still after so many seconds.
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
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(file)
