"""The use of this machine by a job: the supervisor samples it, and keeps it next to the logs.

    attempt-1/usage.csv
        time,cpus,memory_bytes,gpu0_busy,gpu0_memory_bytes
        1795324030.2,1.93,412876800,0.87,9126805504

`cpus` is the number of cores that the job's processes and their children kept busy since the row before. `memory_bytes` is
their resident memory; memory that two of them share counts twice. A GPU's figures are those of the whole device, which
belongs to the job. Without NVML, these columns are missing.

The first row comes after `FIRST_S`. Then the interval grows: it is `SHARE` of the attempt's running time, so a week has
some thousand rows. A value that can't be determined is an empty cell: an error here never ends a job.
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
    """Writes the file of an attempt.

    Args:
        path: the file. Rows are appended to an existing one.
        gpus: the numbers of the job's accelerators.
    """

    def __init__(self, path: Path, gpus: Sequence[int] = ()) -> None:
        self._path = path
        self._gpus = gpus
        self._began = time.monotonic()
        self._sampled = self._began
        self._due = self._began + FIRST_S
        # CPU seconds of each process, by its id and start time.
        self._spent: dict[tuple[int, float], float] = {}

    def sample(self, pids: Sequence[int]) -> None:
        """Write a row about processes and their children, if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + max(FIRST_S, (now - self._began) * SHARE)
        # The disk may be full for a while.
        with contextlib.suppress(OSError):
            head = "" if self._path.exists() else f"{','.join(self._columns())}\n"
            row = ",".join(self._row(pids, now - self._sampled))
            with self._path.open("a") as file:
                file.write(f"{head}{row}\n")
        self._sampled = now

    def _columns(self) -> list[str]:
        gpus = [f"gpu{gpu}_{quantity}" for gpu in self._gpus for quantity in ("busy", "memory_bytes")]
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
    """Processes, and all of their descendants."""
    import psutil

    for pid in pids:
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(pid)
            yield leader
            yield from leader.children(recursive=True)


def _read(process: psutil.Process) -> tuple[float, int, float]:
    """CPU seconds, resident bytes, and start time; zeros for a process that has ended."""
    import psutil

    with contextlib.suppress(psutil.Error), process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss, process.create_time()
    return 0.0, 0, 0.0
