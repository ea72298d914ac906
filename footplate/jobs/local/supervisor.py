"""`python -m footplate.jobs.local.supervisor NAME`: looks after one job, from an attempt to the end. A sweep starts it.

    lock ──► for each attempt:  PREPARING  install the package
                                RUNNING    the gang, until the master is done, or one of it has failed
             after a failure:   what launch/policy.py decides: another attempt, after a pause, or the end
    ──► SUCCEEDED, FAILED or CANCELLED ──► sweep, so that the next job begins

While its gang runs it asks the store, a few times a second, whether the job is to be cancelled, and sweeps every few
seconds. An end that was asked for (cancelled, its time is over) begins with SIGTERM to all processes: a trainer
finishes the step, saves, and exits; what is left after the grace is killed.

SIGTERM to the supervisor itself comes when the machine goes down. It is passed on, and the job stays as it is: the
next sweep finds it without a supervisor.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from footplate.errors import ConfigError, FootplateError
from footplate.hardware.machine import usable_cores
from footplate.jobs.home import Home
from footplate.jobs.local import environment
from footplate.jobs.local.gang import GRACE_S, Gang, Member, Replica
from footplate.jobs.local.identity import Identity
from footplate.jobs.local.locks import Held, held
from footplate.jobs.local.machine import resources, share_devices
from footplate.jobs.local.sweep import LIMITS, LOCK, sweep
from footplate.jobs.package import install, stored
from footplate.jobs.plan import Plan
from footplate.jobs.record import Job, Process
from footplate.jobs.replicas import processes
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store
from footplate.launch import policy
from footplate.launch.failure import Failure
from footplate.launch.rendezvous import HOST, free_addresses

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

log = logging.getLogger(__name__)

TICK_S = 0.25
SWEEP_S = 5.0
LOCK_S = 5.0  # a sweep that looks whether the lock is held has it for a moment
STORE_S = 5.0  # between two tries to write the end
ADVANCED_S = 60.0  # an attempt that has run for so long is taken to have advanced the work

Asked = Literal["cancelled", "over", "told"]


@dataclass(frozen=True)
class Stopped:
    """An attempt that was ended from outside: by `jobs cancel`, by the job's longest time, by SIGTERM to us."""

    why: Asked


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
        self._told = False

    def run(self) -> bool:
        """Attempts, until one succeeds or no other is to follow; False if the job isn't at its end."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_told", True))
        slots = tuple(range(sum(one.count for one in self._plan.replicas)))
        state = policy.State(slots, restarts=self._job.failures, host_restarts=self._job.losses)
        while True:
            began = time.monotonic()
            outcome = self._one_attempt()
            if outcome is None:
                self._finish(State.SUCCEEDED)
                return True
            if isinstance(outcome, Failure):
                decision = policy.decide(LIMITS, state, outcome, time.monotonic() - began > ADVANCED_S)
                if isinstance(decision, policy.GiveUp):
                    why = f" ({decision.why})" if decision.why else ""
                    self._finish(State.FAILED, f"{outcome}{why}")
                    return True
                state = decision.state
                outcome = self._begin_anew(f"{outcome}; {decision.budget}", state) or self._pause(decision.delay_s)
            if isinstance(outcome, Stopped):
                self._stopped(outcome.why)
                return outcome.why != "told"

    def _one_attempt(self) -> Failure | Stopped | None:
        """None when it has succeeded."""
        folder = self._home.attempt(self._plan.name, self._attempt)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            members = self._prepare(folder)
            if (why := self._asked()) is not None:
                return Stopped(why)
            gang = Gang(members)
        except FootplateError as error:
            return Failure("exception", str(error), time.monotonic(), mistake=True)
        except OSError as error:
            return Failure("host", f"its processes could not be started: {error}", time.monotonic())
        try:
            return self._look_after(gang)
        finally:
            gang.kill()
            gang.close()

    def _prepare(self, folder: Path) -> list[Member]:
        """Install the package, and say what each process is to be."""
        plan, root = self._plan, self._home.root
        with (folder / "prepare.log").open("a") as lines:
            installed = install(stored(plan.package, root), root, lines)
        if not (folder / "prepare.log").stat().st_size:
            (folder / "prepare.log").unlink()
        before = environment.read(self._home.job(plan.name), os.environ)
        has_gpus, count = resources().gpus > 0, sum(one.count for one in plan.replicas)
        share = {"OMP_NUM_THREADS": str(max(1, int(usable_cores()) // count))} if count > 1 else {}
        common = {
            **share,
            **before,
            **installed.env,
            "PYTHONPATH": os.pathsep.join(filter(None, [installed.env.get("PYTHONPATH"), before.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "FOOTPLATE_JOB_ID": self._job.id,
            "FOOTPLATE_JOB_ATTEMPT": str(self._attempt),
        }
        *addresses, rendezvous = free_addresses(HOST, count + 1)
        # a plan has what it reads of a resolved job
        replicas = processes(cast("ResolvedJob", plan), addresses, rendezvous, self._attempt - 1, plan.job_dir)
        devices = share_devices(self._job.devices, plan.replicas)
        directory = plan.directory if Path(plan.directory).is_dir() else str(self._home.job(plan.name))
        return [
            Member(
                one.role,
                one.index,
                [str(installed.python), "-P", *plan.arguments],
                {**common, **one.env, **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))} if has_gpus else {})},
                directory,
                folder / f"{one.role}-{one.index}.log",
            )
            for one, mine in zip(replicas, devices, strict=True)
        ]

    def _look_after(self, gang: Gang) -> Failure | Stopped | None:
        now = time.time()
        self._started = self._started or now
        if not self._move(State.RUNNING, started=self._started):
            stopped: Stopped | None = Stopped("cancelled")
            gang.stop()
        else:
            stopped = None
        self._note(lambda: self._store.begin_processes(self._plan.name, [self._process(one) for one in gang.replicas]))
        while not gang.over:
            ended = gang.wait(TICK_S)
            if ended:
                self._note(
                    lambda ended=ended: self._store.end_processes(
                        self._plan.name, [self._process(one) for one in ended]
                    )
                )
            if stopped is None and (why := self._asked()) is not None:
                stopped = Stopped(why)
                gang.stop(GRACE_S)
            self._sweep_now_and_then()
        if gang.succeeded and (stopped is None or stopped.why != "cancelled"):
            return None
        return stopped or gang.failure

    def _asked(self) -> Asked | None:
        """Whether the attempt is to end, and why."""
        if self._told:
            return "told"
        if self._started is not None and time.time() > self._started + self._plan.max_running_time_s:
            return "over"
        if time.monotonic() < self._ask_again:
            return None
        try:
            return "cancelled" if self._store.state(self._plan.name) == State.CANCELLING else None
        except ConfigError as error:  # while it is away, the gang must be heard all the same
            log.warning("%s: %s", self._plan.name, error)
            self._ask_again = time.monotonic() + STORE_S
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

    def _stopped(self, why: Asked) -> None:
        if why == "told":
            log.warning("%s: SIGTERM: the job goes on with the next sweep", self._plan.name)
        elif why == "over":
            self._finish(State.FAILED, f"its longest time, {self._plan.max_running_time_s:g} s, is over")
        else:
            self._finish(State.CANCELLED)

    def _finish(self, target: State, cause: str = "") -> None:
        """Bring the job to its end, which is CANCELLED if somebody has asked for that meanwhile."""
        if cause:
            log.warning("%s: %s: %s", self._plan.name, target, cause)
        now = time.time()
        if target == State.CANCELLED or not self._move(target, cause, ended=now, owner=None):
            self._state = State.CANCELLING
            self._move(State.CANCELLED, cause, ended=now, owner=None)

    def _move(self, target: State, cause: str = "", **changes: Any) -> bool:
        """Bring the job into another state; False if somebody has moved it meanwhile. Tries until it is written."""
        now = time.time()
        while True:
            try:
                moved = self._store.move(self._plan.name, self._state, target, now, cause, **changes)
            except ConfigError as error:
                log.warning("%s: %s", self._plan.name, error)
                time.sleep(STORE_S)
                continue
            if moved:
                self._state = target
            return moved

    def _note(self, write: Callable[[], None]) -> None:
        """Write what is good to know, if it can be written."""
        try:
            write()
        except ConfigError as error:
            log.warning("%s: %s", self._plan.name, error)

    def _process(self, replica: Replica) -> Process:
        member = replica.member
        return Process(
            self._attempt, member.role, member.index, replica.process.pid, replica.mark, replica.began, replica.ended,
            replica.outcome,
        )  # fmt: skip

    def _sweep_now_and_then(self) -> None:
        if time.monotonic() - self._swept > SWEEP_S:
            self._swept = time.monotonic()
            self._note(lambda: sweep(self._home, self._store))


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


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    main(sys.argv[1])
