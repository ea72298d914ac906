"""Choose the waiting jobs that start now: a pure function of the machine, the running jobs and the queue.

    jobs_to_start(machine, running, queue, now)  ->  jobs, in the order in which they start

**Order.** By priority, then by age: one point of priority counts as one minute of waiting. So the order of two jobs never
changes, and a job of priority 1000 starts before all jobs of the last 16 hours. Every job starts eventually, since only
a limited number of jobs can be ahead of it.

**Overtaking.** The first job that doesn't fit stops the queue. But for `OVERTAKE_S` after that job was submitted, smaller
jobs may overtake it, and use what would be idle. After that no job overtakes, and free resources are kept for it.

**More than the machine has.** A job that asks for 32 cores on a machine with two gets both. It starts when all of the
machine is free.

**Nothing of this machine.** A job that runs elsewhere needs nothing here, and starts at once.

**The longest time to wait** (`maxWaitTime`) counts from the time at which a job enters the queue until its first attempt
runs. That includes the time that a remote backend makes the attempt wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OVERTAKE_S = 600.0
# The shortest maxWaitTime that a spec may have.
MIN_WAIT_S = 1800.0
# The waiting time that one point of priority is worth.
_POINT_S = 60.0


@dataclass(frozen=True)
class Resources:
    """The resources of a machine, or the part of them that a job needs.

    Attributes:
        cpus: logical cores.
        gpus: accelerators.
        memory_gb: GiB of memory.
    """

    cpus: float = 0.0
    gpus: int = 0
    memory_gb: float = 0.0

    def within(self, room: Resources) -> bool:
        """Return True if this fits into `room`."""
        return self.cpus <= room.cpus and self.gpus <= room.gpus and self.memory_gb <= room.memory_gb

    def capped(self, machine: Resources) -> Resources:
        """Limit this to what the machine has."""
        return Resources(
            min(self.cpus, machine.cpus), min(self.gpus, machine.gpus), min(self.memory_gb, machine.memory_gb)
        )

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            round(self.cpus + other.cpus, 6), self.gpus + other.gpus, round(self.memory_gb + other.memory_gb, 6)
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            round(self.cpus - other.cpus, 6), self.gpus - other.gpus, round(self.memory_gb - other.memory_gb, 6)
        )


NOTHING = Resources()


@dataclass(frozen=True)
class Waiting:
    """A job in the queue.

    Attributes:
        name: the job's name.
        needs: the resources that its spec declares.
        since: when it entered the queue, in seconds since the epoch.
        priority: from 0 to 1000.
    """

    name: str
    needs: Resources
    since: float
    priority: int = 0

    @property
    def sort_key(self) -> tuple[float, str]:
        """The key that orders the queue."""
        return (self.since - self.priority * _POINT_S, self.name)


def free(machine: Resources, running: Iterable[Resources]) -> Resources:
    """The free resources of a machine; negative if running jobs were started on a larger machine."""
    left = machine
    for needs in running:
        left = left - needs.capped(machine)
    return left


@dataclass(frozen=True)
class Place:
    """A job's place in the queue.

    Attributes:
        position: 1 for the job that is next.
        length: the number of jobs in the queue.
        waits_for: what must be free before it starts; empty if it starts now.
    """

    position: int
    length: int
    waits_for: str


def place_in_queue(
    machine: Resources, running: Iterable[Resources], queue: Sequence[Waiting], name: str
) -> Place | None:
    """Return the place of a job in the queue. None if it isn't in the queue, or needs nothing of this machine.

    Args:
        machine: the machine's resources.
        running: the needs of the running jobs.
        queue: the waiting jobs, in any order.
        name: the job's name.
    """
    ordered = sorted((job for job in queue if job.needs != NOTHING), key=lambda waiting: waiting.sort_key)
    index = next((index for index, job in enumerate(ordered) if job.name == name), None)
    if index is None:
        return None
    room, needs = free(machine, running), ordered[index].needs.capped(machine)
    lacking = [
        f"{_quantity(needed)} {unit} ({_quantity(max(0.0, left))} free)"
        for needed, left, unit in (
            (needs.cpus, room.cpus, "vCPU"),
            (needs.gpus, room.gpus, "accelerator" if needs.gpus == 1 else "accelerators"),
            (needs.memory_gb, room.memory_gb, "GB of memory"),
        )
        if needed > left
    ]
    waits_for = " and ".join(lacking) or ("the jobs before it" if index else "")
    return Place(index + 1, len(ordered), waits_for)


def _quantity(value: float) -> str:
    return f"{value:.6g}"


def why_too_long(spec: Mapping[str, Any], since: float, now: float) -> str:
    """Explain why a job has waited too long; empty while it may wait.

    >>> why_too_long({"scheduling": {"maxWaitTime": "3600s"}}, since=1000.0, now=4601.0)
    'it has waited for 3600s, its maximum waiting time'

    Args:
        spec: the keys of TrainingInput that were given.
        since: when it entered the queue, in seconds since the epoch.
        now: seconds since the epoch.
    """
    longest = spec.get("scheduling", {}).get("maxWaitTime")
    if not longest or now - since <= float(longest.removesuffix("s")):
        return ""
    return f"it has waited for {longest}, its maximum waiting time"


def jobs_to_start(
    machine: Resources, running: Iterable[Resources], queue: Sequence[Waiting], now: float
) -> list[Waiting]:
    """The jobs that start now, in their order. See the module's docstring.

    Args:
        machine: the machine's resources.
        running: the needs of the running jobs.
        queue: the waiting jobs, in any order.
        now: seconds since the epoch.
    """
    room, starting, stopped = free(machine, running), [], False
    for job in sorted(queue, key=lambda waiting: waiting.sort_key):
        needs = job.needs.capped(machine)
        if job.needs == NOTHING or (not stopped and needs.within(room)):
            room = room - needs
            starting.append(job)
        elif now - job.since >= OVERTAKE_S:
            stopped = True
    return starting
