"""The monitor of one attempt, from its beginning until all of its processes have ended.

The worker group's events tell what each rank does. `AttemptMonitor` records it, and decides when the other ranks must be
killed:

- A rank has failed: the other ranks, which mostly fail at once because of it, have `peers_grace_s`. After a user's mistake,
  or the loss of a machine that is silent, they have no time.
- A rank has ended because it was asked to (exit code 143 or 130): the other ranks should follow within `grace_s`.
- All ranks have reported: they have `grace_s` for their exit handlers.
- The supervisor itself was asked to end: see `stop`.

A rank that gives no sign of life for `heartbeat_timeout_s` is killed, after `hang_watch.py` has collected the stacks of all
ranks that can answer. If its machine was silent, too, the machine is lost, which is a failure of the host. Otherwise the
rank is frozen. Time only counts while the supervisor itself is awake: after it was suspended, the ranks' signs of life wait
to be read, and no deadline has passed.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from footplate.launch.failure import Failure, cause_of, of_exit
from footplate.launch.hang_watch import STALL_S, Hang, HangWatch
from footplate.launch.worker_group import Alive, Attempt, Ended, Event, Report, Reported, Stacks, WorkerGroup

log = logging.getLogger(__name__)

# Longest interval between two checks by the supervisor.
TICK_S = 0.5
# Time for a rank's first sign of life, which it gives when it is forked, after the imports.
START_S = 600.0


class AwakeClock:
    """Counts the seconds during which this process was running, if it looks every `TICK_S`."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self.now = 0.0

    def look(self) -> float:
        """The time now. The time since the last look counts as one tick at most: the process slept for the rest."""
        real = self._monotonic()
        self.now += min(real - self._last, TICK_S)
        self._last = real
        return self.now


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds; see the module's docstring."""

    heartbeat_timeout_s: float = 30.0
    grace_s: float = 30.0
    peers_grace_s: float = 5.0
    stall_s: float = STALL_S


@dataclass
class Rank:
    """The state of one rank. Times are on the clock that counts time awake."""

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
    late_s: float | None = None  # its silence when it was found to be late


class AttemptMonitor:
    """Follows the ranks of an attempt. Give it events with `take`, and call `look` after each round of events.

    Args:
        group: runs the attempt, which it has begun already.
        attempt: the attempt.
        clock: counts time awake.
        timeouts: how long to wait.

    Attributes:
        stall: a new explanation of a stall, for the user. Whoever reports it sets it to None.
    """

    def __init__(self, group: WorkerGroup, attempt: Attempt, clock: AwakeClock, timeouts: Timeouts) -> None:
        now = clock.look()
        self.ranks = [Rank(rank, slot, now) for rank, slot in enumerate(attempt.slots)]
        self._group = group
        self._clock = clock
        self._timeouts = timeouts
        self._watch = HangWatch(group, timeouts.stall_s, now)
        self._kill_at = float("inf")
        self._stopping = False
        self._released = False
        self.stall: Hang | None = None

    @property
    def hang(self) -> Hang | None:
        """The explanation of the latest hang, unless a rank has made progress since; None if there is none."""
        return self._watch.hang

    @property
    def over(self) -> bool:
        """True if all processes have ended."""
        return all(rank.ended for rank in self.ranks)

    @property
    def progressed(self) -> bool:
        """True if the work has advanced."""
        return any(rank.progressed for rank in self.ranks)

    @property
    def cause(self) -> Failure | None:
        """The failure that ended the attempt; None if there is none."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        return cause_of(failures) if failures else None

    @property
    def ended_as_asked(self) -> bool:
        """True if ranks ended because they were asked to, or because others did, and none for another reason."""
        cause = self.cause
        asked = any(rank.report is None or rank.report.kind not in ("returned", "left") for rank in self.ranks)
        # A rank that still waits for others loses its connections to them.
        return asked and (cause is None or cause.code == 128 + signal.SIGTERM or cause.passing)

    @property
    def stopped(self) -> int | None:
        """The exit code of ranks that ended because they were asked to; None if there are none."""
        reports = [rank.report for rank in self.ranks if rank.report is not None]
        codes = [report.code for report in reports if report.kind == "stopped"]
        return max(codes, default=None)

    def take(self, event: Event) -> None:
        """Record an event."""
        if isinstance(event, Alive):
            rank = self.ranks[event.rank]
            rank.alive, rank.heard = True, self._clock.look()
            rank.progressed |= event.progressed
            # After a frozen rank was killed, the explanation stays: another rank may still end the step that it was in.
            if event.progressed and not any(rank.killed for rank in self.ranks):
                self._watch.progress(rank.heard)
        elif isinstance(event, Stacks):
            self._watch.take(event.rank, event.process)
        elif isinstance(event, Reported):
            self._record_report(self.ranks[event.rank], event)
        elif isinstance(event, Ended):
            self._record_end(self.ranks[event.rank], event)

    def look(self) -> None:
        """Find frozen ranks, release ranks that have all reported, kill ranks whose time has passed."""
        now = self._clock.look()
        self._look_for_hangs(now)
        if not self._released and all(rank.report is not None or rank.ended for rank in self.ranks):
            self._released = True
            self._group.release()
            self.kill_within(self._timeouts.grace_s)
        if now >= self._kill_at:
            for rank in self.ranks:
                self._kill(rank)

    def _look_for_hangs(self, now: float) -> None:
        """Kill ranks that are late, after all stacks were collected. Without such ranks, look for a stall."""
        living = [rank for rank in self.ranks if not rank.ended and not rank.killed]
        late = [rank for rank in living if now - rank.heard > self._limit_s(rank)]
        for rank in self.ranks:
            rank.late_s = (rank.late_s or now - rank.heard) if rank in late else None
        # No stacks come from a machine that is silent, so nobody waits for them.
        awaited = [rank.rank for rank in living if rank.alive and not self._silent(rank)]
        if late and self._watch.explains([rank.rank for rank in late], awaited, now):
            for rank in late:
                self._freeze(rank, now - rank.heard)
        elif not late and awaited and all(rank.report is None for rank in self.ranks) and not self._stopping:
            self.stall = self._watch.look(awaited, now) or self.stall

    def _limit_s(self, rank: Rank) -> float:
        """The longest silence of a rank."""
        return self._timeouts.heartbeat_timeout_s if rank.alive else START_S

    def _silent(self, rank: Rank) -> bool:
        """Return True if nothing comes from the rank's machine."""
        return self._group.silence_s(rank.rank) > self._timeouts.heartbeat_timeout_s / 2

    def stop(self, signum: signal.Signals) -> None:
        """Pass a signal on to all ranks.

        After SIGTERM they have `grace_s` to end; after SIGINT, `grace_s` from the end of the first rank on.
        """
        self._send_all(signum)
        if signum == signal.SIGTERM:
            self.kill_within(self._timeouts.grace_s)

    def ask_to_end(self) -> None:
        """Ask all ranks to save and end. They have `grace_s` from the end of the first rank on."""
        self._send_all(signal.SIGTERM)

    def _send_all(self, signum: signal.Signals) -> None:
        self._stopping = True
        for rank in self.ranks:
            self._group.send(rank.rank, signum)

    def kill_within(self, seconds: float) -> None:
        """Kill all remaining ranks after `seconds`, or sooner if an earlier call set an earlier time."""
        self._kill_at = min(self._kill_at, self._clock.now + seconds)

    def _record_report(self, rank: Rank, event: Reported) -> None:
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
            self.kill_within(self._timeouts.grace_s)

    def _record_end(self, rank: Rank, event: Ended) -> None:
        rank.ended = True
        if self._stopping:
            self.kill_within(self._timeouts.grace_s)
        if rank.report is not None or rank.killed:
            return
        if event.code is None:
            which = (None, None) if event.all_ranks else (rank.rank, rank.slot)
            self._fail(rank, Failure("host", event.text, event.at, *which, lost=True), event.silent)
        elif event.code in (143, 130):
            # It was asked to end, too, and did so by os._exit or from a library.
            rank.report = Report("stopped", event.at, event.code)
            self.kill_within(self._timeouts.grace_s)
        else:
            kind, text = of_exit(event.code)
            code = 128 - event.code if event.code < 0 else event.code or 1
            self._fail(rank, Failure(kind, text, event.at, rank.rank, rank.slot, code=code))

    def _freeze(self, rank: Rank, silence: float) -> None:
        kind, lost = "frozen" if rank.alive else "host", False
        late_s = rank.late_s or silence
        text = f"gave no sign of life for {late_s:.0f} s" if rank.alive else f"did not start within {late_s:.0f} s"
        if self._silent(rank):
            kind, lost = "host", True
            text += f", and nothing has come from its machine for {self._group.silence_s(rank.rank):.0f} s"
        self._fail(rank, Failure(kind, text, time.monotonic() - silence, rank.rank, rank.slot, lost=lost), silent=lost)
        self._kill(rank)

    def _fail(self, rank: Rank, failure: Failure, silent: bool = False) -> None:
        rank.failure = rank.failure or failure
        # A machine that is silent closes no connections, so the ranks that wait for it don't fail by themselves.
        self.kill_within(0.0 if failure.mistake or silent else self._timeouts.peers_grace_s)

    def _kill(self, rank: Rank) -> None:
        if not rank.ended and not rank.killed:
            if rank.report is not None and rank.report.kind == "returned":
                log.warning("rank %d has returned but not ended: killing its threads and exit handlers", rank.rank)
            rank.killed = True
            self._group.kill(rank.rank)
