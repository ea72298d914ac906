"""A work that saves all the time and says how many ranks it has, for launches whose machines come and go.

It imports no torch: machines that come have fork servers of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from footplate.launch import worker


def work(directory: Path) -> list[int]:
    """Save until there is a file `end`; return the world size of each attempt that has begun."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if os.environ["RANK"] == "0":
        (directory / f"attempt-{worker.attempt():02}").write_text(os.environ["WORLD_SIZE"])
    while not (directory / "end").exists():
        time.sleep(0.05)
        worker.progressed()
        worker.saved()
    return world_sizes(directory)


def world_sizes(directory: Path) -> list[int]:
    return [int(file.read_text() or 0) for file in sorted(directory.glob("attempt-*"))]


def wait_for_world_size(directory: Path, size: int) -> None:
    """Wait until the latest attempt has `size` ranks; at most two minutes."""
    until = time.monotonic() + 120
    while world_sizes(directory)[-1:] != [size]:
        assert time.monotonic() < until, world_sizes(directory)
        time.sleep(0.05)
