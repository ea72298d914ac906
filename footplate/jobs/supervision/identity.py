"""Which process is meant: its number, when it began, and since which start of the machine.

A number alone is given to another process sooner or later, and after a reboot at once.
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
        pid: its number.
        began: when it began, in the system's own units.
        boot: by what this start of the machine is known.
    """

    pid: int
    began: float
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this number now; None if there is none, or only its exit code waits to be fetched."""
        began = _began(pid)
        return None if began is None else cls(pid, began, boot())

    @classmethod
    def from_dict(cls, found: dict[str, Any] | None) -> Identity | None:
        """From what `to_dict` made of it."""
        return cls(**found) if found else None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"pid": self.pid, "began": self.began, "boot": self.boot}

    def alive(self) -> bool:
        """Whether it still runs."""
        return self == Identity.of(self.pid)


def boot() -> str:
    """What changes with each start of the machine."""
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    import psutil

    return str(int(psutil.boot_time()))


def end_groups(leaders: Sequence[Identity], patience_s: float = 5.0) -> None:
    """Kill what is left of the process groups that these processes led, and wait until they themselves are gone.

    The kernel gives the number of a process to no other one while its group has members. So if another has it now,
    nothing is left of the group, and it must not be touched.
    """
    ours = [one for one in leaders if one.boot == boot() and Identity.of(one.pid) in (None, one)]
    for one in ours:
        kill_group(one.pid)
    deadline = time.monotonic() + patience_s
    while any(one.alive() for one in ours) and time.monotonic() < deadline:
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
