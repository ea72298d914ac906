"""Operations on jobs, for the command line, a server, or a program.

    jobs = Jobs.from_env()
    jobs.submit(resolved, Path("trainer"))
    jobs.wait("flowers_1")

Each operation ends with a reconcile pass (`supervision/reconcile.py`), so a change takes effect at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs import process_env
from footplate.jobs.backends import get_backend
from footplate.jobs.backends.local import machine
from footplate.jobs.execution import Execution
from footplate.jobs.home import PACKAGE, Home
from footplate.jobs.record import Job
from footplate.jobs.scheduling import NOTHING, Place, place_in_queue
from footplate.jobs.states import FINAL, SUPERVISED, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store, WrongState
from footplate.jobs.supervision.locks import Held, held
from footplate.jobs.supervision.reconcile import LOCK, is_ours, reconcile
from footplate.jobs.tuning.submission import keep_start, tuning_plan

if TYPE_CHECKING:
    from footplate.jobs.package import Snapshot
    from footplate.jobs.spec.resolving import ResolvedJob
    from footplate.jobs.submission import PlannedJob
    from footplate.jobs.supervision.cleaning import Waste
    from footplate.jobs.supervision.follow import Follower, Line
    from footplate.jobs.tuning.results import Tuning

POLL_S = 0.2
RECONCILE_S = 5.0
# The supervisor of a job that has just ended may still hold its lock for this long.
LOCK_S = 5.0


@dataclass(frozen=True)
class Jobs:
    """The jobs of a home.

    Examples:
        >>> from footplate.jobs.operations import Jobs
        >>> jobs = Jobs.from_env()
        >>> print(jobs.find("rates").state)
        SUCCEEDED
    """

    home: Home
    store: Store

    @classmethod
    def from_env(cls) -> Jobs:
        """The jobs of the home and the store that `FOOTPLATE_HOME` and `FOOTPLATE_STORE` name.

        Raises:
            ConfigError: the folder or the store can't be used.
        """
        home = Home.from_env()
        return cls(home, open_store(home))

    def _repr_html_(self) -> str:
        from footplate.jobs.job_html import NEWEST, list_html

        return list_html(self.store.list(limit=NEWEST), self.store.count())

    def submit(
        self,
        resolved: ResolvedJob,
        package: Path | Snapshot | None,
        backend: str = "local",
        destination: Mapping[str, str] = MappingProxyType({}),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, ...]:
        """Put a job, with its package as it is now, into the queue. The job starts at once if there is room.

        Args:
            resolved: the job; it has a name.
            package: the directory of its package, or a snapshot; None if `packageUris` or images bring the program.
            backend: where it runs, one of `backends.NAMES`.
            destination: the backend's options, as its `destination` returns them.
            variables: the variables of `--env`. They are not written into the store.

        Returns:
            What the snapshot contains, and what the user may not expect, one sentence each.

        Raises:
            WrongState: a job of this name exists.
            ConfigError: the job can't run on this backend.
            PackageError: its package can't be put into a snapshot.
        """
        from footplate.jobs.submission import PlannedJob, submit

        return submit(PlannedJob(resolved, package, backend, destination, variables), self)

    @contextlib.contextmanager
    def reserve(self, name: str) -> Iterator[Path]:
        """Keep a new job's name free, and the home unchanged, until the job is in the store. Yields the home's folder.

        Raises:
            WrongState: a job of this name exists.
            Unavailable: another process has held the lock for too long.
        """
        with self.home.exclusive():
            if self.store.state(name) is not None:
                raise WrongState(
                    f"there is a job {name} already. Choose another name, or delete it: footplate jobs delete {name}"
                )
            yield self.home.root

    def enter(self, planned: PlannedJob, program: Snapshot) -> Path | None:
        """Write a job into the store, and its files into its folder. The caller holds its name with `reserve`.

        Args:
            planned: the job; it has a name.
            program: the snapshot of its program, in this home.

        Returns:
            The files of an older job of this name, in the trash; None if there are none. Delete them.

        Raises:
            WrongState: a job of this name in another store uses the folder; a job has the name of a trial.
            ConfigError: the tuning that this one continues can't be continued.
        """
        resolved, now = planned.job, time.time()
        name, plan = resolved.name, tuning_plan(resolved, self.store, planned.tuning_options, planned.backend)
        assert name is not None
        execution = Execution.of(resolved, program.digest, Path.cwd(), planned.destination)
        plan = None if plan is None else keep_start(plan, execution.job_dir)
        job = Job(
            name,
            State.QUEUED,
            created=now,
            queued=now,
            host=machine.host(),
            backend=planned.backend,
            # A tuning needs nothing itself. Its trials are in the queue.
            needs=get_backend(planned.backend).needs(resolved) if plan is None else NOTHING,
            priority=int(resolved.spec.get("scheduling", {}).get("priority") or 0),
            plan=replace(execution, tuning=None if plan is None else plan.to_dict()).to_dict(),
            spec=resolved.to_dict(),
            labels=dict(resolved.labels),
        )

        folder, leftover = self.home.job(name), self._trash_leftover(name)
        folder.mkdir(parents=True, mode=0o700)
        (folder / job.id).touch()
        (folder / PACKAGE).write_text(program.digest)
        process_env.write(folder, os.environ, planned.variables)
        self.store.add(job)
        return leftover

    def reconcile(self) -> None:
        """Start the jobs that can start, and give each job without a supervisor a new one."""
        reconcile(self.home, self.store)

    def find(self, name: str) -> Job:
        """Return a job, after a reconcile pass.

        Raises:
            UnknownJob: there is no job of this name.
        """
        self.reconcile()
        return self.store.find(name)

    def tuning(self, name: str) -> Tuning:
        """Return the trials of a tuning, after a reconcile pass. A notebook shows them as a table.

        Raises:
            UnknownJob: there is no job of this name.
            ConfigError: the job isn't a tuning.
        """
        from footplate.jobs.tuning.results import tuning_of

        tuning = tuning_of(self.store, self.find(name))
        if tuning is None:
            raise ConfigError(f"{name} has no trials: it was submitted without hyperparameters. Use find({name!r}).")
        return tuning

    def cancel(self, name: str, machine_lost: bool = False) -> State:
        """End a job. A queued job ends at once; a running job's processes first get time to save. Returns its state.

        Args:
            name: the job's name.
            machine_lost: the job's machine won't come back, or has another name now: don't wait for its supervisor.

        Raises:
            UnknownJob: there is no job of this name.
            WrongState: the job has ended already, or it runs on this machine, which isn't lost.
        """
        while True:
            job = self.store.find(name)
            if machine_lost and job.host == machine.host() and is_ours(self.home, job):
                raise WrongState(
                    f"{name} is a job of this machine, so its machine isn't lost. Leave out --machine-lost."
                )
            if job.state == State.CANCELLING and machine_lost:
                # Nobody else will confirm the end, so the job is moved on from here.
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
        if machine_lost:
            # The supervisor that would cancel the trials is lost, too.
            for trial in self.store.trials.of(name):
                if self.store.state(trial.job) not in (None, *FINAL):
                    self.cancel(trial.job, machine_lost=True)
        return self.find(name).state

    def resubmit(self, name: str) -> State:
        """Put a failed or cancelled job into the queue again, with the same package. Returns its state.

        The count of its attempts goes on, so its program continues from the newest checkpoint.

        Raises:
            UnknownJob: there is no job of this name.
            WrongState: the job hasn't ended, or it has succeeded.
        """
        job, now = self.store.find(name), time.time()
        # This machine may have another name than when the job was submitted.
        moved = {"host": machine.host()} if is_ours(self.home, job) else {}
        if job.state == State.SUCCEEDED:
            raise WrongState(f"{name} has succeeded: there is nothing to repeat. Submit it under another name.")
        if job.state not in FINAL or not self.store.move(
            name, job.state, State.QUEUED, now, "resubmitted",
            queued=now, started=None, ended=None, failures=0, losses=0, owner=None, **moved,
        ):  # fmt: skip
            raise WrongState(f"{name} is {job.state}: wait until it ends, or cancel it: footplate jobs cancel {name}")
        return self.find(name).state

    def delete(self, name: str) -> None:
        """Delete a job that has ended, its logs, and its trials if it is a tuning. The files in its job directory stay.

        Raises:
            UnknownJob: there is no job of this name.
            WrongState: the job, or a trial of it, hasn't ended.
        """
        from footplate.jobs.supervision.cleaning import put_into_trash

        if self.store.find(name).state in FINAL:
            # The trials first: if this is interrupted, the tuning still knows them.
            for trial in self.store.trials.of(name):
                job = self.store.get(trial.job)
                if job is not None and (job.plan.get("trial") or {}).get("tuning") == name:
                    self.delete(trial.job)
        # Without the lock, a new job of this name might use the folder by now.
        with self.home.exclusive():
            state = self.store.delete(name)
            if state is not None:
                raise WrongState(f"{name} is {state}. Cancel it first: footplate jobs cancel {name}")
            trash = put_into_trash(self.home, self.home.job(name))
        shutil.rmtree(trash, ignore_errors=True)

    def clean(self, unused_s: float, dry_run: bool = False) -> list[Waste]:
        """Delete packages and environments that no job needs and that have been unused for some time. Returns them.

        Args:
            unused_s: the time, in seconds.
            dry_run: delete nothing.
        """
        from footplate.jobs.supervision.cleaning import clean

        return clean(self.home, self.store, unused_s, dry_run)

    def wait(self, name: str) -> Job:
        """Wait until a job ends, and return it.

        Raises:
            UnknownJob: there is no job of this name, or it was deleted meanwhile.
        """
        for _ in self.follow(name, lines=False):
            pass
        return self.store.find(name)

    def follow(self, name: str, lines: bool = True, tail: int | None = None) -> Iterator[Line | State]:
        """Yield the output of a job's processes from its beginning, and the job's states as they change, until it ends.

        Args:
            name: the job's name.
            lines: yield output; if False, only states.
            tail: of the output so far, yield only this many lines at the end.

        Raises:
            UnknownJob: there is no job of this name.
            Unavailable: the logs are on another machine.
        """
        job = self.find(name)
        follower = self.output(job) if lines else None
        if follower is not None and tail is not None:
            follower.skip_to_tail(tail)

        last_state, reconciled = None, time.monotonic()
        while True:
            # The state is read before the output: after a final state there is no more output.
            state = self.store.state(name)
            if follower is not None:
                new_lines = follower.lines(last=state in FINAL or state is None)
                yield from new_lines if tail is None else deque(new_lines, maxlen=tail)
                tail = None
            if state is not None and state != last_state:
                last_state = state
                yield state
            if state in FINAL or state is None:
                return

            time.sleep(POLL_S)
            if time.monotonic() - reconciled > RECONCILE_S:
                reconciled = time.monotonic()
                self.reconcile()

    def place(self, job: Job) -> Place | None:
        """The place of a job in the queue of this machine. None if it isn't in that queue."""
        if job.state != State.QUEUED or job.host != machine.host():
            return None
        running = [running.needs for running in self.store.of_host(job.host, SUPERVISED)]
        return place_in_queue(machine.resources(), running, self.store.waiting(job.host), job.name)

    def output(self, job: Job) -> Follower:
        """A reader of the output of a job's processes.

        Raises:
            Unavailable: the output is on another machine.
        """
        from footplate.jobs.supervision.follow import Follower

        if job.host != machine.host():
            raise Unavailable(f"{job.name} runs on {job.host}, and its logs are on that machine: ask there.")
        return Follower(self.home, job.name)

    def _trash_leftover(self, name: str) -> Path | None:
        """Move the files of an older job of this name to the trash. That job was deleted on another machine.

        Returns:
            Their folder in the trash; None if there are none.
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
