"""How busy a job keeps this machine: sampled by its supervisor, kept beside the logs.

    attempt-1/usage.csv
        time,cpus,memory_bytes,gpu0_busy,gpu0_memory_bytes
        1795324030.2,1.93,412876800,0.87,9126805504

`cpus` is how many cores the job's processes, with all that they have started, kept busy since the row before;
`memory_bytes` is what they have in memory, where what two of them share counts twice. A GPU's figures are those of the
whole device, which is the job's own; without NVML the columns are missing.

The first row comes after `FIRST_S`. Later they come more rarely, `SHARE` of the time that the attempt has run, so that
a week is some thousand rows. A figure that can't be had is an empty cell: nothing here may end a job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.hardware import nvml

if TYPE_CHECKING:
    import psutil

NAME = "usage.csv"
FIRST_S = 1.0
SHARE = 1 / 400


class Meter:
    """Writes the file of one attempt.

    Args:
        path: the file; rows are added to one that is there.
        gpus: the accelerators that are the job's own, by number.
    """

    def __init__(self, path: Path, gpus: Sequence[int] = ()) -> None:
        self._path = path
        self._gpus = gpus
        self._began = time.monotonic()
        self._looked = self._began
        self._due = self._began + FIRST_S
        self._spent: dict[tuple[int, float], float] = {}  # CPU seconds of (process id, its start)

    def look(self, pids: Sequence[int]) -> None:
        """Write a row about processes and what they have started, if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + max(FIRST_S, (now - self._began) * SHARE)
        with contextlib.suppress(OSError):  # a full disk: the next row is written when there is room
            head = "" if self._path.exists() else f"{','.join(self._columns())}\n"
            row = ",".join(self._row(pids, now - self._looked))
            with self._path.open("a") as file:
                file.write(f"{head}{row}\n")
        self._looked = now

    def _columns(self) -> list[str]:
        gpus = [f"gpu{gpu}_{what}" for gpu in self._gpus for what in ("busy", "memory_bytes")]
        return ["time", "cpus", "memory_bytes", *gpus]

    def _row(self, pids: Sequence[int], since_s: float) -> list[str]:
        before, self._spent, memory = self._spent, {}, 0
        for process in _families(pids):
            times, resident, began = _read(process)
            self._spent[process.pid, began] = times
            memory += resident
        spent = sum(seconds - before.get(process, 0.0) for process, seconds in self._spent.items())
        row = [f"{time.time():.1f}", f"{spent / since_s:.2f}", str(memory)]
        for gpu in self._gpus:
            try:
                busy, used = nvml.use(gpu)
                row += [f"{busy:.2f}", str(used)]
            except nvml.NvmlError:
                row += ["", ""]
        return row


def _families(pids: Sequence[int]) -> Iterator[psutil.Process]:
    """Processes, and all that they have started."""
    import psutil

    for pid in pids:
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(pid)
            yield leader
            yield from leader.children(recursive=True)


def _read(process: psutil.Process) -> tuple[float, int, float]:
    """CPU seconds, bytes in memory, the time of its start; nothing of one that has ended."""
    import psutil

    with contextlib.suppress(psutil.Error), process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss, process.create_time()
    return 0.0, 0, 0.0
