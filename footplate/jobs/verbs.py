"""What can be done with jobs, whoever asks: the command line, a server, a program.

    jobs = Jobs.from_env()
    jobs.submit(resolved, Path("trainer"))
    jobs.wait("flowers_1")

Each sweeps (`supervision/reconcile.py`), so that what it changes has its effect at once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs import environment
from footplate.jobs.backends import named
from footplate.jobs.backends.local import machine
from footplate.jobs.home import PACKAGE, Home
from footplate.jobs.plan import Plan
from footplate.jobs.record import Job
from footplate.jobs.states import FINAL, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store, WrongState
from footplate.jobs.supervision.locks import Held, held
from footplate.jobs.supervision.reconcile import LOCK, is_ours, sweep

if TYPE_CHECKING:
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob
    from footplate.jobs.supervision.cleaning import Waste
    from footplate.jobs.supervision.follow import Follower, Line

LOOK_S = 0.2
SWEEP_S = 5.0
LOCK_S = 5.0  # that the supervisor of a job that has just ended may still need
NOWHERE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Jobs:
    """The jobs of a home."""

    home: Home
    store: Store

    @classmethod
    def from_env(cls) -> Jobs:
        """Those that `FOOTPLATE_HOME` and `FOOTPLATE_STORE` name.

        Raises:
            ConfigError: folder or store can't be used.
        """
        home = Home.here()
        return cls(home, open_store(home))

    def submit(
        self,
        resolved: ResolvedJob,
        package: Path | Snapshot | None,
        backend: str = "local",
        place: Mapping[str, str] = NOWHERE,
        variables: Mapping[str, str] = NOWHERE,
    ) -> tuple[str, ...]:
        """Take a job's package as it is now, and put the job into the queue. It begins at once if there is room.

        Args:
            resolved: the job; it has a name.
            package: the directory of its package, or one that was taken; None if `packageUris`, or images, bring it.
            backend: where it runs, one of `backends.NAMES`.
            place: where exactly, as the backend's `place` has it.
            variables: what `--env` gives its processes. The store does not get them.

        Returns:
            What was taken, and what the user may not have expected, each in a sentence.

        Raises:
            WrongState: there is a job of its name already.
            ConfigError: it can't run there.
            PackageError: its package can't be taken.
        """
        from footplate.jobs.package.modules import take_program

        name, there = resolved.name, named(backend)
        if name is None:
            raise ConfigError("a job needs a name.")
        notices = there.check(resolved, place)
        with self.home.alone():
            self._refuse_known(name)
            spec = resolved.spec
            taken = take_program(package, spec.get("packageUris", ()), spec.get("pythonModule"), self.home.root)
            now = time.time()
            job = Job(
                name,
                State.QUEUED,
                created=now,
                queued=now,
                host=machine.host(),
                backend=backend,
                needs=there.needs(resolved),
                priority=int(resolved.spec.get("scheduling", {}).get("priority") or 0),
                plan=Plan.of(resolved, taken.digest, Path.cwd(), place).to_dict(),
                spec=resolved.to_dict(),
                labels=dict(resolved.labels),
            )
            folder, left = self.home.job(name), self._put_away(name)
            folder.mkdir(parents=True, mode=0o700)
            (folder / job.id).touch()
            (folder / PACKAGE).write_text(taken.digest)
            environment.write(folder, os.environ, variables)
            self.store.add(job)
        if left is not None:
            shutil.rmtree(left, ignore_errors=True)
        self.sweep()
        return (taken.summary, *taken.warnings, *notices)

    def sweep(self) -> None:
        """Start what is due, and take care of what was lost."""
        sweep(self.home, self.store)

    def find(self, name: str) -> Job:
        """A job, after a sweep.

        Raises:
            UnknownJob: there is none of this name.
        """
        self.sweep()
        return self.store.find(name)

    def cancel(self, name: str, machine_lost: bool = False) -> State:
        """End a job: at once if it waits, else after its processes have had the time to save. Returns its state.

        Args:
            name: the job's.
            machine_lost: its machine won't come back, or has another name now: don't wait for its supervisor.

        Raises:
            UnknownJob: there is none of this name.
            WrongState: it has ended by itself; or it runs on this machine, which isn't lost.
        """
        while True:
            job = self.store.find(name)
            if machine_lost and job.host == machine.host() and is_ours(self.home, job):
                raise WrongState(
                    f"{name} is a job of this machine, so its machine isn't lost. Leave out --machine-lost."
                )
            if job.state == State.CANCELLING and machine_lost:
                now = time.time()
                cause = f"cancelled by the user, as its machine {job.host} is lost"
                self.store.move(name, State.CANCELLING, State.CANCELLED, now, cause, ended=now, owner=None)
                continue
            if job.state in (State.CANCELLING, State.CANCELLED):
                break
            if job.state in FINAL:
                raise WrongState(f"{name} has ended already: {job.state}.")
            target, now = State.CANCELLING, time.time()
            changes = {}
            if job.state == State.QUEUED:
                target, changes = State.CANCELLED, {"ended": now}
            if self.store.move(name, job.state, target, now, "cancelled by the user", **changes) and not machine_lost:
                break
        return self.find(name).state

    def resubmit(self, name: str) -> State:
        """Put a job that failed or was cancelled into the queue again, with the same package. Returns its state.

        Its attempts go on being counted, so its program continues from its newest checkpoint.

        Raises:
            UnknownJob: there is none of this name.
            WrongState: it hasn't ended, or it has succeeded.
        """
        job, now = self.store.find(name), time.time()
        moved = {"host": machine.host()} if is_ours(self.home, job) else {}  # this machine may have another name now
        if job.state == State.SUCCEEDED:
            raise WrongState(f"{name} has succeeded: there is nothing to repeat. Submit it under another name.")
        if job.state not in FINAL or not self.store.move(
            name, job.state, State.QUEUED, now, "resubmitted",
            queued=now, started=None, ended=None, failures=0, losses=0, owner=None, **moved,
        ):  # fmt: skip
            raise WrongState(f"{name} is {job.state}: wait for its end, or cancel it: footplate jobs cancel {name}")
        return self.find(name).state

    def delete(self, name: str) -> None:
        """Forget a job that has ended, with its logs; what it has written to its job directory stays.

        Raises:
            UnknownJob: there is none of this name.
            WrongState: it hasn't ended.
        """
        from footplate.jobs.supervision.cleaning import put_into_trash

        self.store.find(name)
        with self.home.alone():  # else its folder might be another's already, of the same name
            state = self.store.delete(name)
            if state is not None:
                raise WrongState(f"{name} is {state}. Cancel it first: footplate jobs cancel {name}")
            gone = put_into_trash(self.home, self.home.job(name))
        shutil.rmtree(gone, ignore_errors=True)

    def clean(self, unused_s: float, dry_run: bool = False) -> list[Waste]:
        """Delete the packages and environments that no job needs, and nobody has used for so long; returns them.

        Args:
            unused_s: how long, in seconds.
            dry_run: only say which.
        """
        from footplate.jobs.supervision.cleaning import clean

        return clean(self.home, self.store, unused_s, dry_run)

    def wait(self, name: str) -> Job:
        """Wait for a job's end.

        Raises:
            UnknownJob: there is none of this name, or it was deleted meanwhile.
        """
        for _ in self.follow(name, lines=False):
            pass
        return self.store.find(name)

    def follow(self, name: str, lines: bool = True, tail: int | None = None) -> Iterator[Line | State]:
        """What a job's processes write, from the beginning, and its states as it comes into them; until its end.

        Args:
            name: the job's.
            lines: whether lines are wanted, or only states.
            tail: of what has been written so far, only this many lines at the end.

        Raises:
            UnknownJob: there is none of this name.
            Unavailable: its logs are on another machine.
        """
        job = self.find(name)
        follower, swept, known = self.output(job) if lines else None, time.monotonic(), None
        if follower is not None and tail is not None:
            follower.skip_to_tail(tail)
        while True:
            state = self.store.state(name)
            if follower is not None:
                found = follower.lines(last=state in FINAL or state is None)
                yield from found if tail is None else deque(found, maxlen=tail)
                tail = None
            if state is not None and state != known:
                known = state
                yield state
            if state in FINAL or state is None:
                return
            time.sleep(LOOK_S)
            if time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                self.sweep()

    def output(self, job: Job) -> Follower:
        """What reads all that a job's processes write.

        Raises:
            Unavailable: it is on another machine.
        """
        from footplate.jobs.supervision.follow import Follower

        if job.host != machine.host():
            raise Unavailable(f"{job.name} runs on {job.host}, and its logs are there: ask there.")
        return Follower(self.home, job.name)

    def _put_away(self, name: str) -> Path | None:
        """What a job of this name has left that was deleted on another machine: nobody must take it for the new job's.

        Returns:
            Where it is now; None when there is nothing.
        """
        from footplate.jobs.supervision.cleaning import put_into_trash

        folder = self.home.job(name)
        if not folder.is_dir():
            return None
        try:
            with held(folder / LOCK, LOCK_S):
                return put_into_trash(self.home, folder)
        except Held:
            raise WrongState(
                f"{folder} is in use: a job {name} of another store runs there. Choose another name."
            ) from None

    def _refuse_known(self, name: str) -> None:
        if self.store.state(name) is not None:
            raise WrongState(
                f"there is a job {name} already. Choose another name, or delete it: footplate jobs delete {name}"
            )
