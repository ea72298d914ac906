"""Plan of the faults for a training, and the checks of its journal afterwards. All functions are pure.

A *blow* is one fault of one kind. `plan` draws the blows from a seed. `read` reads a journal. `judge` compares a journal
with the journal of an undisturbed run.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "kill rank": "kill -9 of a rank",
    "kill fork server": "kill -9 of the fork server",
    "kill supervisor": "kill -9 of the user's process; the script is started again",
    "terminate rank": "SIGTERM to a rank; the script ends with 143 and is started again",
    "terminate supervisor": "SIGTERM to the user's process; likewise",
    "freeze rank": "SIGSTOP of a rank; its heartbeat stops",
    "kill in write": "kill -9 at a random byte of a checkpoint",
    "kill between writes": "kill -9 before a random file operation of the writing thread",
    "full disk": "the disk is full; the script fails, room is made, it is started again",
    "clock": "the wall clock jumps by up to 30 days either way; then kill -9 of a rank",
}
FILE_EVENTS = 12  # about the number of file operations of a save
LONGEST_PAUSE_S = 0.8


@dataclass(frozen=True)
class Blow:
    """One fault.

    Attributes:
        kind: one of `KINDS`.
        hasty: it strikes without waiting until the training has recovered from the fault before.
        pause_s: the wait before it, in seconds.
        rank: the rank that it strikes, if it strikes one: this number modulo the number of ranks.
        where: a number from 0 to 1 that chooses the byte or the file operation.
        jump_s: the shift of the clock, in seconds.
    """

    kind: str
    hasty: bool
    pause_s: float
    rank: int
    where: float
    jump_s: float


@dataclass(frozen=True)
class Line:
    """A line of a journal: time (monotonic clock), process, rank, event and value."""

    pid: int
    at: float
    rank: int
    what: str
    number: int
    value: str

    @property
    def key(self) -> tuple[int, str, int]:
        """Identity of an event. Its value must be the same in every attempt."""
        return self.rank, self.what, self.number


@dataclass(frozen=True)
class Fall:
    """A fault that has struck, and its time on the monotonic clock."""

    blow: Blow
    at: float


def plan(kills: int, seed: int) -> list[Blow]:
    """A number of faults in random order. Every kind occurs equally often."""
    chance = random.Random(seed)
    kinds = list(itertools.islice(itertools.cycle(KINDS), kills))
    chance.shuffle(kinds)
    return [
        Blow(
            kind=kind,
            hasty=chance.random() < 0.15,
            pause_s=chance.uniform(0.0, LONGEST_PAUSE_S),
            rank=chance.randrange(12),
            where=chance.random(),
            jump_s=chance.uniform(-30, 30) * 86400,
        )
        for kind in kinds
    ]


def read(directory: Path) -> list[Line]:
    """All lines of the journals of all ranks, in order of time."""
    return sorted(_lines(directory), key=lambda line: line.at)


def _lines(directory: Path) -> Iterator[Line]:
    for path in directory.glob("journal-*.log"):
        rank = int(path.stem.split("-")[1])
        for text in path.read_text().splitlines():
            pid, at, what, number, value = (*text.split(" ", 4), "")[:5]
            yield Line(int(pid), float(at), rank, what, int(number), value)


def judge(lines: Sequence[Line], untouched: Sequence[Line]) -> list[str]:
    """All differences between a run with faults and the undisturbed run. Empty if they are equal bit for bit."""
    truth = {line.key: line.value for line in untouched if line.what != "start"}
    faults = [
        f"at {line.at:.3f} rank {line.rank}, {line.what} {line.number}: {line.value}, not {truth.get(line.key)}"
        for line in lines
        if line.what != "start" and truth.get(line.key) != line.value
    ]
    missing = truth.keys() - {line.key for line in lines}
    return faults + [f"rank {rank}, {what} {number} is missing" for rank, what, number in sorted(missing)]


def aftermath(lines: Sequence[Line], falls: Sequence[Fall]) -> list[dict[str, Any]]:
    """For each fault with a restart: the number of batches trained twice, and the seconds until the next batch.

    If several faults struck before the training went on, the last one carries the cost of all of them.
    """
    batches = [line for line in lines if line.rank == 0 and line.what == "batch"]
    starts = [line.at for line in lines if line.rank == 0 and line.what == "start"]
    consequences: list[dict[str, Any]] = []
    for before, after in itertools.pairwise(batches):
        struck = [fall for fall in falls if fall.at <= after.at]
        began_again = any(before.at < start < after.at for start in starts)
        if not began_again or not struck:
            continue
        last = struck[-1]
        consequences.append({
            "kind": last.blow.kind,
            "lost_batches": before.number + 1 - after.number,
            "seconds": after.at - max(last.at, before.at),
        })  # fmt: skip
    return consequences


def overlaps(lines: Sequence[Line]) -> int:
    """Number of batches that a process trained after a later process of its rank had begun: 0 with a single writer."""
    count = 0
    for rank in {line.rank for line in lines}:
        current: dict[int, int] = {}  # process id: its position in the order of starts
        for line in (line for line in lines if line.rank == rank):
            number = current.setdefault(line.pid, len(current))
            count += number < len(current) - 1
    return count


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
