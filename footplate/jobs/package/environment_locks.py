"""What keeps an unpacked package, or an environment, from being deleted while it is used: a lock on a file beside it.

Who uses it holds the lock shared; who makes or deletes it holds it alone. The kernel lets go of it when its holder
dies, however that happens. The file stays: were it deleted too, two could hold "the" lock on different files.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Hold:
    """A lock, shared from the beginning on.

    Args:
        path: the file, which is made if it isn't there.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.share()

    def share(self) -> None:
        """Let others share it; waits for one who has it alone. Another may have had it alone just before."""
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def be_alone(self) -> None:
        """Have it alone; waits for all others."""
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let go of it."""
        os.close(self.file)
