"""Which of the waiting jobs begin now: a pure function of what there is, what runs and who waits.

    starts(machine, running, queue, now)  ->  names, in the order in which they begin

**Order.** By priority, then by age; a point of priority counts as a minute of waiting. So the order of two jobs never
changes, a job of priority 1000 begins before all that came in the last 16 hours, and none waits for ever: only so many
jobs stand before it.

**Passing.** The first job for which there is no room stops the row, but for `PASSING_S` since it was submitted,
smaller ones behind it may pass: they use what would lie idle. After that, nothing passes, and what becomes free is
kept for it.

**What a machine doesn't have** can't be waited for: a job that asks for 32 cores on a machine with two takes both. It
begins when all of it is free.

**A job that needs nothing of it**, because it runs elsewhere, waits for nobody here.

**The longest time to wait** (`maxWaitTime`) counts from when a job came into the queue until its first attempt runs: here,
and also where the attempt was submitted to, as long as that makes it wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PASSING_S = 600.0
MIN_WAIT_S = 1800.0  # the shortest maxWaitTime that a job may name
_POINT_S = 60.0  # of waiting, for each point of priority


@dataclass(frozen=True)
class Resources:
    """What a machine has, or what a job needs of it.

    Attributes:
        cpus: logical cores.
        gpus: accelerators.
        memory_gb: GiB of memory.
    """

    cpus: float = 0.0
    gpus: int = 0
    memory_gb: float = 0.0

    def within(self, room: Resources) -> bool:
        """Whether there is room for this."""
        return self.cpus <= room.cpus and self.gpus <= room.gpus and self.memory_gb <= room.memory_gb

    def capped(self, machine: Resources) -> Resources:
        """As much of this as a machine has."""
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
        name: the job's.
        needs: as its spec declares them.
        since: when it came into the queue, in seconds since the epoch.
        priority: from 0 to 1000.
    """

    name: str
    needs: Resources
    since: float
    priority: int = 0

    @property
    def turn(self) -> tuple[float, str]:
        """What the queue is ordered by."""
        return (self.since - self.priority * _POINT_S, self.name)


def free(machine: Resources, running: Iterable[Resources]) -> Resources:
    """What nobody has taken; less than nothing when jobs run that began on a larger machine."""
    left = machine
    for needs in running:
        left = left - needs.capped(machine)
    return left


def why_too_long(spec: Mapping[str, Any], since: float, now: float) -> str:
    """Why a job is not to wait any longer, in words; empty while it may.

    >>> why_too_long({"scheduling": {"maxWaitTime": "3600s"}}, since=1000.0, now=4601.0)
    'it has waited for 3600s, its longest time to wait'

    Args:
        spec: the keys of TrainingInput that were given.
        since: when it came into the queue, in seconds since the epoch.
        now: likewise.
    """
    longest = spec.get("scheduling", {}).get("maxWaitTime")
    if not longest or now - since <= float(longest.removesuffix("s")):
        return ""
    return f"it has waited for {longest}, its longest time to wait"


def starts(machine: Resources, running: Iterable[Resources], queue: Sequence[Waiting], now: float) -> list[Waiting]:
    """The jobs that begin now, first the one whose turn it is. See the module's docstring.

    Args:
        machine: what there is.
        running: what those that run have asked for.
        queue: who waits, in any order.
        now: seconds since the epoch.
    """
    room, begun, stopped = free(machine, running), [], False
    for job in sorted(queue, key=lambda one: one.turn):
        needs = job.needs.capped(machine)
        if job.needs == NOTHING or (not stopped and needs.within(room)):
            room = room - needs
            begun.append(job)
        elif now - job.since >= PASSING_S:
            stopped = True
    return begun
