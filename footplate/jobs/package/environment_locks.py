"""A lock that protects an unpacked package, or an environment, from deletion while it is used.

A user holds the lock shared; a process that creates or deletes the directory holds it exclusively. The kernel releases it
when its holder dies. The lock's file is next to the directory, and stays: if it were deleted, too, two processes could lock
two different files.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Hold:
    """A lock, shared at first.

    Args:
        path: the file, which is created.

    Attributes:
        path: the same.
        file: its descriptor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.share()

    def share(self) -> None:
        """Share the lock; waits for an exclusive holder. Another process may have held it exclusively just before."""
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def make_exclusive(self) -> None:
        """Hold the lock exclusively; waits for all other holders."""
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock."""
        os.close(self.file)
