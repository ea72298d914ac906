"""`python -m footplate.jobs.supervision.supervisor [NAME]`: looks after one job, from an attempt to the end.

    lock ──► for each attempt:  PREPARING  install the package, and begin, where the job's backend says
                                RUNNING    until the master is done, or one of the others has failed
             after a failure:   what launch/policy.py decides: another attempt, after a pause, or the end
    ──► SUCCEEDED, FAILED or CANCELLED ──► sweep, so that the next job begins; once a day, clean up

A sweep starts it, or tells one that was started ahead of its job, without a name (`prestart.py`). While an attempt is under
way it asks the store, a few times a second, whether the job is to be cancelled, and sweeps every few seconds. An end that
was asked for (cancelled, its time is over) begins with SIGTERM to all processes: a trainer finishes the step, saves, and
exits; what is left after the grace is killed. A job that waits elsewhere for its first attempt to run, longer than it was
to (`maxWaitTime`), is cancelled.

SIGTERM to the supervisor itself comes when the machine goes down. It is passed on, unless the attempt outlives its
supervisor, and the job stays as it is: the next sweep finds it without a supervisor.

A database that can't be written to doesn't end a job: it runs on, and its end is written when it can be.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from footplate.core.errors import ConfigError, FootplateError
from footplate.jobs.backends import named
from footplate.jobs.backends.contract import Attempt, Task
from footplate.jobs.home import Home
from footplate.jobs.plan import Plan
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import why_too_long
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision import prestart
from footplate.jobs.supervision.cleaning import clean_daily
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.locks import Held, held
from footplate.jobs.supervision.reconcile import LIMITS, LOCK, SUPERVISOR_LOG, sweep
from footplate.launch import policy
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

TICK_S = 0.25
GRACE_S = 30.0  # between SIGTERM and SIGKILL
SWEEP_S = 5.0
LOCK_S = 5.0  # a sweep that looks whether the lock is held has it for a moment
STORE_S = 5.0  # between two tries to write the end
ADVANCED_S = 60.0  # an attempt that has run for so long is taken to have advanced the work

Asked = Literal["cancelled", "waited", "over", "told"]


@dataclass(frozen=True)
class Stopped:
    """An attempt that was ended from outside: by `jobs cancel`, by the job's longest times, by SIGTERM to us.

    Attributes:
        why: which of them.
        cause: more about it, in words.
    """

    why: Asked
    cause: str = ""


class Supervisor:
    """Looks after a job whose lock this process holds."""

    def __init__(self, home: Home, store: Store, job: Job) -> None:
        self._home = home
        self._store = store
        self._job = job
        self._plan = Plan.from_dict(job.plan)
        self._state = job.state
        self._attempt = job.attempt
        self._started = job.started
        self._swept = time.monotonic()
        self._ask_again = 0.0
        self._away_until = 0.0  # the store, as far as we know; on the monotonic clock
        self._told = False
        self._unnoted: list[Process] = []  # processes that have ended, and whose ends aren't in the store yet
        self._ran_since = float("inf")  # of the attempt that is under way, on the monotonic clock
        self._ran_at = 0.0  # the same as a time of day
        self._waits_for = job.cause if job.state == State.PREPARING else ""
        self._backend = named(job.backend)

    def run(self) -> bool:
        """Attempts, until one succeeds or no other is to follow; False if the job isn't at its end."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_told", True))
        slots = tuple(range(sum(one.count for one in self._plan.replicas)))
        state = policy.State(slots, restarts=self._job.failures, host_restarts=self._job.losses)
        while True:
            outcome = self._one_attempt()
            if outcome is None:
                self._finish(State.SUCCEEDED)
                return True
            if isinstance(outcome, Failure):
                advanced = time.monotonic() - self._ran_since > ADVANCED_S
                decision = policy.decide(LIMITS, state, outcome, advanced)
                if isinstance(decision, policy.GiveUp):
                    why = f" ({decision.why})" if decision.why else ""
                    self._finish(State.FAILED, f"{outcome}{why}")
                    return True
                state = decision.state
                cause = f"{outcome}; {decision.budget}"
                if decision.delay_s:
                    cause += f"; attempt {self._attempt + 1} begins in {decision.delay_s:.0f} s"
                outcome = self._begin_anew(cause, state) or self._pause(decision.delay_s)
            if isinstance(outcome, Stopped):
                self._stopped(outcome)
                return outcome.why != "told"

    def _one_attempt(self) -> Failure | Stopped | None:
        """None when it has succeeded."""
        self._ran_since = float("inf")
        folder = self._home.attempt(self._plan.name, self._attempt)
        task = Task(self._home, self._job, self._plan, self._attempt, folder)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            attempt = self._backend.find(task)
            if attempt is None:
                if self._state == State.CANCELLING:
                    return Stopped("cancelled")
                self._backend.prepare(task)
                if (why := self._asked()) is not None:
                    return Stopped(why)
                attempt = self._backend.begin(task)
        except FootplateError as error:
            return Failure("exception", str(error), time.monotonic(), mistake=True)
        except OSError as error:
            return Failure("host", f"its processes could not be started: {error}", time.monotonic())
        try:
            return self._look_after(attempt)
        finally:
            attempt.close()

    def _look_after(self, attempt: Attempt) -> Failure | Stopped | None:
        stopped: Stopped | None = None
        while True:
            # One that was told to end may begin, and even succeed, all the same.
            goes_on = stopped is None or attempt.running or attempt.succeeded
            cancelled = self._note_state(attempt) if goes_on else None
            if stopped is None and (why := cancelled or self._waited(attempt) or self._asked()):
                stopped = Stopped(why)
                if why == "told" and self._backend.outlives:
                    return stopped
                attempt.stop(GRACE_S)
                continue
            if attempt.over:
                break
            ended = attempt.wait(TICK_S)
            self._unnoted += ended
            if ended:
                self._note(self._note_ends)
            self._sweep_now_and_then()
        if attempt.succeeded and (stopped is None or stopped.why not in ("cancelled", "waited")):
            return None
        return replace(stopped, cause=str(attempt.failure or "")) if stopped else attempt.failure

    def _note_state(self, attempt: Attempt) -> Asked | None:
        """Write down that an attempt has begun, or what it waits for; "cancelled" if the job was, meanwhile."""
        if self._state == State.CANCELLING:
            return "cancelled"
        if attempt.running or (attempt.over and (attempt.succeeded or attempt.processes)):
            return self._note_running(attempt)
        if attempt.waits_for != self._waits_for:
            self._waits_for = attempt.waits_for
            self._note(lambda: self._store.explain(self._plan.name, State.PREPARING, self._waits_for))
        return None

    def _note_running(self, attempt: Attempt) -> Asked | None:
        """Write down its processes, then that they run. While the store is away they must be heard all the same."""
        now = time.monotonic()
        if self._ran_since > now:
            self._ran_since, self._ran_at = now, time.time()
        self._started = self._started or self._ran_at
        while self._state != State.RUNNING and (attempt.over or now >= self._away_until):
            self._note(lambda: self._store.begin_processes(self._plan.name, attempt.processes))
            moved = self._try_move(State.RUNNING, self._ran_at, started=self._started)
            if moved is not None or not attempt.over:
                return "cancelled" if moved is False else None
            time.sleep(STORE_S)
        return None

    def _waited(self, attempt: Attempt) -> Asked | None:
        """Whether its first attempt waits for longer than it was to; the job then is being cancelled."""
        if self._started is not None or attempt.running or not attempt.waits_for:
            return None
        cause = self._too_long()
        return "waited" if cause and self._move(State.CANCELLING, cause) else None

    def _too_long(self) -> str:
        """Why it is not to wait any longer; empty while it may."""
        return why_too_long(self._plan.spec, self._job.queued, time.time())

    def _asked(self) -> Asked | None:
        """Whether the attempt is to end, and why."""
        if self._told:
            return "told"
        if self._started is not None and time.time() > self._started + self._plan.max_running_time_s:
            return "over"
        if time.monotonic() < self._ask_again:
            return None
        self._ask_again = time.monotonic() + TICK_S  # not with each piece of output
        try:
            # Neither, if somebody has declared this machine lost: the job is CANCELLED, or was even deleted.
            goes_on = self._store.state(self._plan.name) in (State.PREPARING, State.RUNNING)
            return None if goes_on else "cancelled"
        except ConfigError as error:
            self._is_away(error)
            return None

    def _begin_anew(self, cause: str, state: policy.State) -> Stopped | None:
        log.warning("%s: attempt %d: %s", self._plan.name, self._attempt, cause)
        self._attempt += 1
        changes = {"attempt": self._attempt, "failures": state.restarts, "losses": state.host_restarts}
        return None if self._move(State.PREPARING, cause, **changes) else Stopped("cancelled")

    def _pause(self, delay_s: float) -> Stopped | None:
        until = time.monotonic() + delay_s
        while (left := until - time.monotonic()) > 0:
            if (why := self._asked()) is not None:
                return Stopped(why)
            time.sleep(min(left, TICK_S))
        return None

    def _stopped(self, stopped: Stopped) -> None:
        if stopped.why == "told":
            log.warning("%s: SIGTERM: the job goes on with the next sweep", self._plan.name)
            return
        causes = {"over": f"its longest time, {self._plan.max_running_time_s:g} s, is over", "waited": self._too_long()}
        cause = "; ".join(filter(None, (causes.get(stopped.why), stopped.cause)))
        self._finish(State.FAILED if stopped.why == "over" else State.CANCELLED, cause)

    def _finish(self, target: State, cause: str = "") -> None:
        """Bring the job to its end, which is CANCELLED if somebody has asked for that meanwhile."""
        if cause:
            log.warning("%s: %s: %s", self._plan.name, target, cause)
        now = time.time()
        if target == State.CANCELLED or not self._move(target, cause, ended=now, owner=None):
            self._state = State.CANCELLING
            self._move(State.CANCELLED, cause, ended=now, owner=None)

    def _move(self, target: State, cause: str = "", **changes: Any) -> bool:
        """Bring the job into another state; False if it is being cancelled. Tries until it is written."""
        now = time.time()
        while (moved := self._try_move(target, now, cause, **changes)) is None:
            time.sleep(STORE_S)
        return moved

    def _try_move(self, target: State, now: float, cause: str = "", **changes: Any) -> bool | None:
        """The same, but None if it can't be written now."""
        if self._state == State.CANCELLING and target != State.CANCELLED:
            return False
        try:
            if target != State.RUNNING:
                self._note_ends()
            moved = self._store.move(self._plan.name, self._state, target, now, cause, **changes)
        except ConfigError as error:
            self._is_away(error)
            return None
        self._state = target if moved else State.CANCELLING
        return moved

    def _is_away(self, error: ConfigError) -> None:
        log.warning("%s: %s", self._plan.name, error)
        self._away_until = self._ask_again = time.monotonic() + STORE_S

    def _note_ends(self) -> None:
        """Write down how processes have ended. While the store is away, their ends are kept until it is back."""
        if self._unnoted:
            self._store.end_processes(self._plan.name, self._unnoted)
            self._unnoted = []

    def _note(self, write: Callable[[], None]) -> None:
        """Write what is good to know, if it can be written."""
        try:
            write()
        except (ConfigError, OSError) as error:  # OSError: another's supervisor can't be started, no file can be opened
            log.warning("%s: %s", self._plan.name, error)

    def _sweep_now_and_then(self) -> None:
        if time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            self._note(lambda: sweep(self._home, self._store, patience_s=0.0))  # who sweeps now may take long


def main(name: str) -> None:
    """Look after a job, unless somebody does."""
    home, ended = Home.here(), False
    store = open_store(home, patience_s=1.0)
    with contextlib.suppress(Held), held(home.job(name) / LOCK, LOCK_S):
        job = store.find(name)
        if job.state not in SUPERVISED:
            return
        identity = Identity.of(os.getpid())
        store.own(name, identity and identity.to_dict())
        ended = Supervisor(home, store, job).run()
    if ended:
        sweep(home, store)
        clean_daily(home, store)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        job, home = prestart.awaited(), Home.here()
        prestart.settle(home, home.job(job) / SUPERVISOR_LOG)
        main(job)
