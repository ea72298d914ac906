"""The watch over ranks that hang: it collects the stacks of all ranks, and explains them in a sentence.

There are two cases.

- *A late rank* gives no sign of life for `heartbeat_timeout_s`: it is stopped, or C code holds its GIL. It will be killed.
  Before that, all ranks are asked for their stacks. That takes `COLLECT_S` at most. A rank on a machine that is silent
  isn't waited for.
- *A stall*: all ranks live, and none has made progress for `stall_s`. They are asked twice, with `SECOND_LOOK_S` between.
  If no rank has moved, and they made progress before or wait for each other, the user gets a warning. Nothing is killed:
  the step may just be long. The next look follows after twice the time.

An explanation is valid until a rank makes progress. A failure before that is reported with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from footplate.core.stacks import analysis
from footplate.core.stacks.report import report
from footplate.core.stacks.snapshot import Process
from footplate.launch.worker_group import WorkerGroup

COLLECT_S = 4.0  # the answers arrive sooner, unless a machine is busy
STALL_S = 60.0
SECOND_LOOK_S = 5.0


@dataclass(frozen=True)
class Hang:
    """What is known of a hang.

    Attributes:
        sentence: which rank is where, and which ranks wait for it.
        text: the sentence, and the stacks of all ranks.
        stalled_s: the time without progress; None if a rank is late.
    """

    sentence: str
    text: str
    stalled_s: float | None = None


class HangWatch:
    """Asks for stacks when ranks hang. Times are on the clock that counts time awake.

    Args:
        group: asks the ranks.
        stall_s: the time without progress after which the ranks are asked.
        now: the time.

    Attributes:
        hang: the latest explanation; None if there is none, or if a rank has made progress since.
    """

    def __init__(self, group: WorkerGroup, stall_s: float, now: float) -> None:
        self.hang: Hang | None = None
        self._group = group
        self._stall_s = stall_s
        self._progress_at = now
        self._progressed = False
        self._look_at = now + stall_s
        self._asked_at: float | None = None
        self._answers_until = 0.0
        self._asked_for_late = False
        self._answers: dict[int, Process] = {}
        self._first_look: dict[int, Process] | None = None
        self._first_look_at = now

    def progress(self, now: float) -> None:
        """Record that a rank has made progress."""
        self._progress_at, self._progressed = now, True
        self._look_at = now + self._stall_s
        self._first_look = self.hang = None

    def take(self, rank: int, process: Process) -> None:
        """Record the answer of a rank."""
        self._answers[rank] = process

    def explains(self, late: Collection[int], ranks: Collection[int], now: float) -> bool:
        """Collect stacks before late ranks are killed. Return True when they are there, or their time is over.

        Args:
            late: the ranks that give no sign of life.
            ranks: those that can answer.
            now: the time.
        """
        if not self._asked_for_late:
            self._ask(now, COLLECT_S, native=True)
            self._asked_for_late = True
        if not self._is_complete(ranks, now):
            return False
        self._asked_for_late, self._asked_at = False, None
        self.hang = _explained(self._answers, late, None)
        return True

    def look(self, ranks: Collection[int], now: float) -> Hang | None:
        """Look for a stall. Return an explanation of a new one, or of one that has lasted twice as long."""
        if self._asked_for_late:
            # The late rank lives again.
            self._asked_for_late, self._asked_at = False, None
        if self._asked_at is not None:
            return self._second_look(now) if self._is_complete(ranks, now) else None
        if now >= self._look_at:
            # A rank that is only slow must not be paused, so the first look reads no native stacks.
            self._ask(now, SECOND_LOOK_S, native=self._first_look is not None)
        return None

    def _second_look(self, now: float) -> Hang | None:
        """Compare the answers with those of the first look."""
        self._asked_at = None
        before, self._first_look = self._first_look, dict(self._answers)
        between_s, self._first_look_at = now - self._first_look_at, now
        stalled_s = now - self._progress_at
        if before is None:
            self._look_at = now + min(SECOND_LOOK_S, self._stall_s)
            return None
        self._first_look = None
        self._look_at = now + stalled_s
        if not analysis.unchanged(before, self._answers, between_s) or not (self._progressed or self._wait(stalled_s)):
            return None
        self.hang = _explained(self._answers, (), stalled_s)
        return self.hang

    def _wait(self, stalled_s: float) -> bool:
        """Return True if a rank has waited for other ranks, for most of the time."""
        places = [analysis.where(process) for process in self._answers.values()]
        return any(place.in_setup or (place.waits_for and (place.since_s or 0.0) > stalled_s / 2) for place in places)

    def _ask(self, now: float, limit_s: float, native: bool) -> None:
        self._asked_at, self._answers_until, self._answers = now, now + limit_s, {}
        # The other half is for a busy machine, where it takes long to start py-spy and to send the answers.
        self._group.ask_stacks(limit_s / 2, native)

    def _is_complete(self, ranks: Collection[int], now: float) -> bool:
        return self._answers.keys() >= set(ranks) or now >= self._answers_until


def _explained(answers: Mapping[int, Process], late: Collection[int], stalled_s: float | None) -> Hang | None:
    answers = dict(sorted(answers.items()))
    sentence = analysis.explain(answers, late)
    return Hang(sentence, report(sentence, answers), stalled_s) if sentence else None
