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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PASSING_S = 600.0
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


def starts(machine: Resources, running: Iterable[Resources], queue: Sequence[Waiting], now: float) -> list[Waiting]:
    """The jobs that begin now, first the one whose turn it is. See the module's docstring.

    Args:
        machine: what there is.
        running: what those that run have asked for.
        queue: who waits, in any order.
        now: seconds since the epoch.
    """
    room, begun = free(machine, running), []
    for job in sorted(queue, key=lambda one: one.turn):
        needs = job.needs.capped(machine)
        if needs.within(room):
            room = room - needs
            begun.append(job)
        elif now - job.since >= PASSING_S:
            break
    return begun
