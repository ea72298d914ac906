"""`python -m footplate.jobs.supervision.supervisor [NAME]`: supervise one job until it ends.

    lock ──► for each attempt:  PREPARING  install the package, and begin, on the job's backend
                                RUNNING    until the master is done, or another process has failed
             after a failure:   launch/policy.py decides: another attempt, after a pause, or the end
    ──► SUCCEEDED, FAILED or CANCELLED ──► a reconcile pass, so that the next job starts; once a day, clean up

A reconcile pass starts the supervisor, or assigns the job to a prestarted process (`prestart.py`), or to a fork of a
tuning's fork server (`jobs/fork_server/`). During an attempt, the supervisor asks the store several times a second if the
job is to be cancelled, and makes a pass every few seconds. To end an attempt (the job is cancelled, or its time is over),
it sends SIGTERM to all processes: a trainer finishes its step, saves, and exits. The supervisor kills what is left after
the grace period. It also cancels a job whose first attempt waits on a remote backend for longer than `maxWaitTime`.

The supervisor itself gets SIGTERM when the machine shuts down. It passes the signal on, unless the attempt outlives its
supervisor, and leaves the job's state as it is. The next pass finds the job without a supervisor.

A database that can't be written to doesn't end a job. The job runs on, and its end is written as soon as possible.
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
from footplate.jobs.backends.contract import Attempt, Requeued, Task
from footplate.jobs.execution import Execution
from footplate.jobs.home import Home
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import why_too_long
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision import prestart
from footplate.jobs.supervision.cleaning import clean_daily
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.locks import Held, held
from footplate.jobs.supervision.reconcile import LIMITS, LOCK, SUPERVISOR_LOG, reconcile
from footplate.jobs.tuning import backend_of
from footplate.launch import policy
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

TICK_S = 0.25
# A trial that is to be paused holds its part of the machine until its supervisor knows.
TRIAL_TICK_S = 0.05
# Between SIGTERM and SIGKILL.
GRACE_S = 30.0
RECONCILE_S = 5.0
# A reconcile pass that tests the lock holds it for a moment.
LOCK_S = 5.0
# Between two tries to write the end.
STORE_S = 5.0
# An attempt that ran for this long counts as progress.
ADVANCED_S = 60.0

Asked = Literal["cancelled", "waited", "over", "told"]


@dataclass(frozen=True)
class Stopped:
    """The end of an attempt by `jobs cancel`, by one of the job's time limits, or by SIGTERM to the supervisor.

    Attributes:
        why: the reason.
        cause: more about it, in words.
    """

    why: Asked
    cause: str = ""


class Supervisor:
    """Supervises a job. This process holds the job's lock."""

    def __init__(self, home: Home, store: Store, job: Job) -> None:
        self._home = home
        self._store = store
        self._job = job
        self._execution = Execution.from_dict(job.plan)
        self._tick_s = TICK_S if self._execution.trial is None else TRIAL_TICK_S
        self._state = job.state
        self._attempt = job.attempt
        self._started = job.started
        self._reconciled = time.monotonic()
        self._ask_again = 0.0
        # Until then, on the monotonic clock, the store counts as unreachable.
        self._away_until = 0.0
        self._told = False
        # Processes that have ended, and whose ends aren't in the store yet.
        self._unnoted: list[Process] = []
        # The start of the current attempt, on the monotonic clock, and as a time of day.
        self._ran_since = float("inf")
        self._ran_at = 0.0
        self._waits_for = job.cause if job.state == State.PREPARING else ""
        self._backend = backend_of(job, store)

    def run(self) -> bool:
        """Make attempts until one succeeds, or no other may follow. Returns False if the job hasn't ended."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_told", True))
        slots = tuple(range(sum(role.count for role in self._execution.replicas)))
        state = policy.State(slots, restarts=self._job.failures, host_restarts=self._job.losses)
        while True:
            outcome = self._one_attempt()
            if outcome is None:
                self._finish(State.SUCCEEDED)
                return True
            if isinstance(outcome, Requeued):
                # The next attempt exists already. If the job is being cancelled meanwhile, that attempt has to be stopped.
                self._next_attempt(str(outcome), state)
                continue
            # The launcher's policy decides: another attempt, after a pause, or the end.
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
                outcome = self._next_attempt(cause, state) or self._pause(decision.delay_s)
            if isinstance(outcome, Stopped):
                self._stopped(outcome)
                return outcome.why != "told"

    def _one_attempt(self) -> Failure | Stopped | None:
        """Make one attempt. Returns None if it succeeds."""
        self._ran_since = float("inf")
        folder = self._home.attempt(self._execution.name, self._attempt)
        task = Task(self._home, self._job, self._execution, self._attempt, folder)
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
            return self._supervise(attempt)
        finally:
            attempt.close()

    def _supervise(self, attempt: Attempt) -> Failure | Stopped | None:
        stopped: Stopped | None = None
        while True:
            # A stopped attempt may still begin, and even succeed.
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
            ended = attempt.wait(self._tick_s)
            self._unnoted += ended
            if ended:
                self._note(self._note_ends)
            self._reconcile_now_and_then()
        # An attempt that succeeds although its time is over has done its work. A cancelled job stays cancelled.
        if attempt.succeeded and (stopped is None or stopped.why not in ("cancelled", "waited")):
            return None
        return replace(stopped, cause=str(attempt.failure or "")) if stopped else attempt.failure

    def _note_state(self, attempt: Attempt) -> Asked | None:
        """Write down that an attempt has begun, or what it waits for. Returns "cancelled" if the job was cancelled."""
        if self._state == State.CANCELLING:
            return "cancelled"
        if attempt.running or (attempt.over and (attempt.succeeded or attempt.processes)):
            return self._note_running(attempt)
        if attempt.waits_for != self._waits_for:
            self._waits_for = attempt.waits_for
            self._note(lambda: self._store.explain(self._execution.name, State.PREPARING, self._waits_for))
        return None

    def _note_running(self, attempt: Attempt) -> Asked | None:
        """Write down the processes, then RUNNING. While the store is unreachable, go on hearing them."""
        now = time.monotonic()
        if self._ran_since > now:
            self._ran_since, self._ran_at = now, time.time()
        self._started = self._started or self._ran_at
        while self._state != State.RUNNING and (attempt.over or now >= self._away_until):
            self._note(lambda: self._store.begin_processes(self._execution.name, attempt.processes))
            moved = self._try_move(State.RUNNING, self._ran_at, started=self._started)
            if moved is not None or not attempt.over:
                return "cancelled" if moved is False else None
            time.sleep(STORE_S)
        return None

    def _waited(self, attempt: Attempt) -> Asked | None:
        """Cancel the job if its first attempt waits for too long. Returns the reason to stop the attempt."""
        if self._started is not None or attempt.running or not attempt.waits_for:
            return None
        cause = self._too_long()
        return "waited" if cause and self._move(State.CANCELLING, cause) else None

    def _too_long(self) -> str:
        """Explain why the job has waited too long; empty while it may wait."""
        return why_too_long(self._execution.spec, self._job.queued, time.time())

    def _asked(self) -> Asked | None:
        """The reason to end the attempt, if there is one."""
        if self._told:
            return "told"
        if self._started is not None and time.time() > self._started + self._execution.max_running_time_s:
            return "over"
        if time.monotonic() < self._ask_again:
            return None
        # Once a tick is enough: output may arrive more often.
        self._ask_again = time.monotonic() + self._tick_s
        try:
            # If somebody declared this machine lost, the job is CANCELLED, or even deleted.
            goes_on = self._store.state(self._execution.name) in (State.PREPARING, State.RUNNING)
            return None if goes_on else "cancelled"
        except ConfigError as error:
            self._is_away(error)
            return None

    def _next_attempt(self, cause: str, state: policy.State) -> Stopped | None:
        log.warning("%s: attempt %d: %s", self._execution.name, self._attempt, cause)
        self._attempt += 1
        changes = {"attempt": self._attempt, "failures": state.restarts, "losses": state.host_restarts}
        return None if self._move(State.PREPARING, cause, **changes) else Stopped("cancelled")

    def _pause(self, delay_s: float) -> Stopped | None:
        until = time.monotonic() + delay_s
        while (left := until - time.monotonic()) > 0:
            if (why := self._asked()) is not None:
                return Stopped(why)
            time.sleep(min(left, self._tick_s))
        return None

    def _stopped(self, stopped: Stopped) -> None:
        if stopped.why == "told":
            log.warning("%s: SIGTERM: the job continues with the next reconcile pass", self._execution.name)
            return
        causes = {
            "over": f"its maximum running time of {self._execution.max_running_time_s:g} s is over",
            "waited": self._too_long(),
        }
        cause = "; ".join(filter(None, (causes.get(stopped.why), stopped.cause)))
        self._finish(State.FAILED if stopped.why == "over" else State.CANCELLED, cause)

    def _finish(self, target: State, cause: str = "") -> None:
        """Move the job to its final state. That is CANCELLED if the job was cancelled meanwhile."""
        if cause:
            log.warning("%s: %s: %s", self._execution.name, target, cause)
        now = time.time()
        if target == State.CANCELLED or not self._move(target, cause, ended=now, owner=None):
            self._state = State.CANCELLING
            self._move(State.CANCELLED, cause, ended=now, owner=None)

    def _move(self, target: State, cause: str = "", **changes: Any) -> bool:
        """Move the job to another state, and retry until that is written. Returns False if the job is being cancelled."""
        now = time.time()
        while (moved := self._try_move(target, now, cause, **changes)) is None:
            time.sleep(STORE_S)
        return moved

    def _try_move(self, target: State, now: float, cause: str = "", **changes: Any) -> bool | None:
        """Move to a state as `_move` does, but return None if the state can't be written now."""
        if self._state == State.CANCELLING and target != State.CANCELLED:
            return False
        try:
            if target != State.RUNNING:
                self._note_ends()
            moved = self._store.move(self._execution.name, self._state, target, now, cause, **changes)
        except ConfigError as error:
            self._is_away(error)
            return None
        self._state = target if moved else State.CANCELLING
        return moved

    def _is_away(self, error: ConfigError) -> None:
        log.warning("%s: %s", self._execution.name, error)
        self._away_until = self._ask_again = time.monotonic() + STORE_S

    def _note_ends(self) -> None:
        """Write down the ends of processes. While the store is unreachable, they are kept."""
        if self._unnoted:
            self._store.end_processes(self._execution.name, self._unnoted)
            self._unnoted = []

    def _note(self, write: Callable[[], None]) -> None:
        """Write something that isn't essential. A failure is only logged."""
        try:
            write()
        except (ConfigError, OSError) as error:
            # An OSError comes from a reconcile pass: another job's supervisor can't be started, or no file can be opened.
            log.warning("%s: %s", self._execution.name, error)

    def _reconcile_now_and_then(self) -> None:
        if time.monotonic() - self._reconciled > RECONCILE_S:
            self._reconciled = time.monotonic()
            # No patience: if another process makes a pass now, this one isn't needed.
            self._note(lambda: reconcile(self._home, self._store, patience_s=0.0))


def main(name: str) -> None:
    """Supervise a job, unless it has a supervisor."""
    home, ended = Home.from_env(), False
    store = open_store(home, patience_s=1.0)
    with contextlib.suppress(Held), held(home.job(name) / LOCK, LOCK_S):
        job = store.find(name)
        if job.state not in SUPERVISED:
            return
        identity = Identity.of(os.getpid())
        store.own(name, identity and identity.to_dict())
        ended = Supervisor(home, store, job).run()
    if ended:
        reconcile(home, store)
        clean_daily(home, store)


def log_to_stderr() -> None:
    """Let the messages of this process go to its log."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)


if __name__ == "__main__":
    log_to_stderr()
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        job, home = prestart.await_assignment(), Home.from_env()
        prestart.settle(home, home.job(job) / SUPERVISOR_LOG)
        main(job)
