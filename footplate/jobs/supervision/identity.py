"""The identity of a process: its process id, its start time, and the boot of the machine.

A process id alone isn't enough: the kernel reuses it sooner or later, and after a reboot at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.launch.process_lifetime import kill_group


@dataclass(frozen=True)
class Identity:
    """A process.

    Attributes:
        pid: its process id.
        began: its start time, in the kernel's units.
        boot: an id of the machine's boot.
    """

    pid: int
    began: float
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this id now; None if there is none, or only its exit code is left."""
        began = _began(pid)
        return None if began is None else cls(pid, began, boot())

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> Identity | None:
        """Undo `to_dict`."""
        return cls(**values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """Return the identity as plain values."""
        return {"pid": self.pid, "began": self.began, "boot": self.boot}

    def alive(self) -> bool:
        """Return True if the process still runs."""
        return self == Identity.of(self.pid)


def boot() -> str:
    """An id that changes with each boot of the machine."""
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    import psutil

    return str(int(psutil.boot_time()))


def end_groups(leaders: Sequence[Identity], patience_s: float = 5.0) -> None:
    """Kill the remaining members of process groups, and wait until the groups' leaders are gone.

    The kernel doesn't reuse a process id while its group has members. So if another process has the leader's id now, the
    group is empty, and must not be touched.
    """
    ours = [leader for leader in leaders if leader.boot == boot() and Identity.of(leader.pid) in (None, leader)]
    for leader in ours:
        kill_group(leader.pid)
    deadline = time.monotonic() + patience_s
    while any(leader.alive() for leader in ours) and time.monotonic() < deadline:
        time.sleep(0.01)


def _began(pid: int) -> float | None:
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else float(fields[19])
    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    return None
