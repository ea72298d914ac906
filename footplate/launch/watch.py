"""One attempt, watched from its beginning until all of its processes have ended.

What each rank does is told by the crew's events; `Watch` keeps it, and says when the rest must be killed:

- a rank has failed: the others, which mostly fail of it at once, get `peers_grace_s`; after a user's mistake, no time;
- a rank has ended because it was asked to (exit code 143 or 130): the others should follow within `grace_s`;
- all have reported: they get `grace_s` for their exit handlers;
- the supervisor was told to end: see `stop`.

A rank that gives no sign of life for `heartbeat_timeout_s` is killed. If its machine was silent meanwhile, too, the machine
is lost, which is a failure of the host; otherwise the rank is frozen. Time is counted while the supervisor itself is awake:
after it has been suspended, the ranks' signs of life are waiting to be read, and no deadline has passed.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from footplate.launch.crew import Alive, Attempt, Crew, Ended, Event, Report, Reported
from footplate.launch.failure import Failure, cause_of, of_exit

log = logging.getLogger(__name__)

TICK_S = 0.5  # the supervisor looks at least this often
START_S = 600.0  # for the first sign of life, which is the birth of a rank: it follows the imports


class AwakeClock:
    """Seconds during which this process was running, as seen by one who looks every `TICK_S`."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self.now = 0.0

    def look(self) -> float:
        """The time now; what has passed since the last look counts as one tick at most: the rest was spent asleep."""
        real = self._monotonic()
        self.now += min(real - self._last, TICK_S)
        self._last = real
        return self.now


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds; see the module's docstring."""

    heartbeat_timeout_s: float = 30.0
    grace_s: float = 30.0
    peers_grace_s: float = 5.0


@dataclass
class Rank:
    """What is known of one rank. Times are of the clock that counts time awake."""

    rank: int
    slot: int
    heard: float
    alive: bool = False
    progressed: bool = False
    report: Report | None = None
    load: Callable[[], Any] | None = None
    ended: bool = False
    killed: bool = False
    failure: Failure | None = None


class Watch:
    """The ranks of an attempt. Feed it with `take`, call `look` after each round of events.

    Args:
        crew: what carries the attempt, already begun.
        attempt: which.
        clock: counts time awake.
        patience: how long to wait for what.
    """

    def __init__(self, crew: Crew, attempt: Attempt, clock: AwakeClock, patience: Patience) -> None:
        now = clock.look()
        self.ranks = [Rank(rank, slot, now) for rank, slot in enumerate(attempt.slots)]
        self._crew = crew
        self._clock = clock
        self._patience = patience
        self._kill_at = float("inf")
        self._stopping = False
        self._released = False

    @property
    def over(self) -> bool:
        """Whether all processes have ended."""
        return all(rank.ended for rank in self.ranks)

    @property
    def progressed(self) -> bool:
        """Whether the work has advanced."""
        return any(rank.progressed for rank in self.ranks)

    @property
    def cause(self) -> Failure | None:
        """The failure that ended the attempt; None if there is none."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        return cause_of(failures) if failures else None

    @property
    def stopped(self) -> int | None:
        """The exit code of ranks that ended because they were asked to; None if there are none."""
        codes = [one.report.code for one in self.ranks if one.report is not None and one.report.kind == "stopped"]
        return max(codes, default=None)

    def take(self, event: Event) -> None:
        """Note what has happened."""
        if isinstance(event, Alive):
            rank = self.ranks[event.rank]
            rank.alive, rank.heard = True, self._clock.look()
            rank.progressed |= event.progressed
        elif isinstance(event, Reported):
            self._take_report(self.ranks[event.rank], event)
        elif isinstance(event, Ended):
            self._take_end(self.ranks[event.rank], event)

    def look(self) -> None:
        """Find frozen ranks, release those that have reported, kill those whose time is up."""
        now = self._clock.look()
        for rank in self.ranks:
            silence, limit = now - rank.heard, self._patience.heartbeat_timeout_s if rank.alive else START_S
            if silence > limit and not rank.ended and not rank.killed:
                self._freeze(rank, silence)
        if not self._released and all(rank.report is not None or rank.ended for rank in self.ranks):
            self._released = True
            self._crew.release()
            self.kill_within(self._patience.grace_s)
        if now >= self._kill_at:
            for rank in self.ranks:
                self._kill(rank)

    def stop(self, signum: signal.Signals) -> None:
        """Pass a signal on. After SIGTERM all have `grace_s`; after SIGINT, `grace_s` from when the first has ended."""
        self._stopping = True
        for rank in self.ranks:
            self._crew.send(rank.rank, signum)
        if signum == signal.SIGTERM:
            self.kill_within(self._patience.grace_s)

    def kill_within(self, seconds: float) -> None:
        """All that is left is killed after so many seconds, or sooner if that was already settled."""
        self._kill_at = min(self._kill_at, self._clock.now + seconds)

    def _take_report(self, rank: Rank, event: Reported) -> None:
        report = event.report
        rank.report, rank.load = report, event.load
        if report.kind == "raised":
            self._fail(rank, Failure(
                "exception", report.text, report.at, rank.rank, rank.slot, report.traceback, report.mistake,
                report.passing,
            ))  # fmt: skip
        elif report.kind == "exit":
            text = of_exit(report.code)[1]
            self._fail(rank, Failure("exit", text, report.at, rank.rank, rank.slot, code=report.code))
        elif report.kind == "stopped":
            self.kill_within(self._patience.grace_s)

    def _take_end(self, rank: Rank, event: Ended) -> None:
        rank.ended = True
        if self._stopping:
            self.kill_within(self._patience.grace_s)
        if rank.report is not None or rank.killed:
            return
        if event.code is None:
            place = (None, None) if event.whole else (rank.rank, rank.slot)
            self._fail(rank, Failure("host", event.text, event.at, *place, lost=True))
        elif event.code in (143, 130):  # by os._exit, or from a library: asked to, as well
            rank.report = Report("stopped", event.at, event.code)
            self.kill_within(self._patience.grace_s)
        else:
            kind, text = of_exit(event.code)
            code = 128 - event.code if event.code < 0 else event.code or 1
            self._fail(rank, Failure(kind, text, event.at, rank.rank, rank.slot, code=code))

    def _freeze(self, rank: Rank, silence: float) -> None:
        kind, lost = "frozen" if rank.alive else "host", False
        text = f"gave no sign of life for {silence:.0f} s" if rank.alive else f"was not there after {silence:.0f} s"
        machine_silence = self._crew.silence_s(rank.rank)
        if machine_silence > self._patience.heartbeat_timeout_s / 2:
            kind, lost = "host", True
            text += f", and nothing has come from its machine for {machine_silence:.0f} s"
        self._fail(rank, Failure(kind, text, time.monotonic() - silence, rank.rank, rank.slot, lost=lost))
        self._kill(rank)

    def _fail(self, rank: Rank, failure: Failure) -> None:
        rank.failure = rank.failure or failure
        self.kill_within(0.0 if failure.mistake else self._patience.peers_grace_s)

    def _kill(self, rank: Rank) -> None:
        if not rank.ended and not rank.killed:
            if rank.report is not None and rank.report.kind == "returned":
                log.warning("rank %d had returned but did not end: its threads or exit handlers are killed", rank.rank)
            rank.killed = True
            self._crew.kill(rank.rank)
