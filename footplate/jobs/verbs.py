"""What can be done with jobs, whoever asks: the command line, a server, a program.

    jobs = Jobs.here()
    jobs.submit(resolved, package_path=Path("trainer"))
    jobs.wait("flowers_1")

Each sweeps (`local/sweep.py`), so that what it changes has its effect at once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.errors import ConfigError
from footplate.jobs.home import Home
from footplate.jobs.local import environment, machine
from footplate.jobs.local.follow import Follower, Line
from footplate.jobs.local.sweep import sweep
from footplate.jobs.plan import Plan
from footplate.jobs.record import Job
from footplate.jobs.states import FINAL, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

LOOK_S = 0.2
SWEEP_S = 5.0


@dataclass(frozen=True)
class Jobs:
    """The jobs of a home."""

    home: Home
    store: Store

    @classmethod
    def here(cls) -> Jobs:
        """Those that `FOOTPLATE_HOME` and `FOOTPLATE_STORE` name.

        Raises:
            ConfigError: folder or store can't be used.
        """
        home = Home.here()
        return cls(home, open_store(home))

    def submit(self, resolved: ResolvedJob, package_path: Path | None) -> tuple[str, ...]:
        """Take a job's package as it is now, and put the job into the queue. It begins at once if there is room.

        Args:
            resolved: the job; it has a name.
            package_path: the directory of its package; None if `packageUris` bring it.

        Returns:
            What the user may not have expected, each in a sentence.

        Raises:
            ConfigError: there is a job of its name already, or what it wants can't be had on this machine.
            PackageError: its package can't be taken.
        """
        from footplate.jobs.package import snapshot

        name = resolved.name
        if name is None:
            raise ConfigError("a job needs a name.")
        if not resolved.command:
            raise ConfigError(
                f"{name}: the spec names a container image and no module. On this machine jobs run as Python packages: "
                "give --package-path and --module-name."
            )
        self._refuse_known(name)
        taken = snapshot(package_path, resolved.spec.get("packageUris", ()), self.home.root)
        needs, now = machine.needs(resolved), time.time()
        folder = self.home.job(name)
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        environment.write(folder, os.environ)
        self.store.add(
            Job(
                name,
                State.QUEUED,
                created=now,
                queued=now,
                host=machine.host(),
                needs=needs,
                priority=int(resolved.spec.get("scheduling", {}).get("priority") or 0),
                plan=Plan.of(resolved, taken.digest, Path.cwd()).to_dict(),
                spec=resolved.to_dict(),
                labels=dict(resolved.labels),
            )
        )
        self.sweep()
        return (*taken.warnings, *machine.shortages(needs, machine.resources()), *_of_images(resolved))

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

    def cancel(self, name: str) -> State:
        """End a job: at once if it waits, else after its processes have had the time to save. Returns its state.

        Raises:
            ConfigError: there is no such job, or it has ended by itself.
        """
        while True:
            job = self.store.find(name)
            if job.state in (State.CANCELLING, State.CANCELLED):
                break
            if job.state in FINAL:
                raise ConfigError(f"{name} has ended already: {job.state}.")
            target, now = State.CANCELLING, time.time()
            changes = {}
            if job.state == State.QUEUED:
                target, changes = State.CANCELLED, {"ended": now}
            if self.store.move(name, job.state, target, now, "cancelled by the user", **changes):
                break
        return self.find(name).state

    def resubmit(self, name: str) -> State:
        """Put a job that failed or was cancelled into the queue again, with the same package. Returns its state.

        Its attempts go on being counted, so its program continues from its newest checkpoint.

        Raises:
            ConfigError: there is no such job, or it hasn't ended, or it has succeeded.
        """
        job, now = self.store.find(name), time.time()
        if job.state == State.SUCCEEDED:
            raise ConfigError(f"{name} has succeeded: there is nothing to repeat. Submit it under another name.")
        if job.state not in FINAL or not self.store.move(
            name, job.state, State.QUEUED, now, "resubmitted",
            queued=now, started=None, ended=None, failures=0, losses=0, owner=None,
        ):  # fmt: skip
            raise ConfigError(f"{name} is {job.state}: wait for its end, or cancel it: footplate jobs cancel {name}")
        return self.find(name).state

    def delete(self, name: str) -> None:
        """Forget a job that has ended, with its logs; what it has written to its job directory stays.

        Raises:
            ConfigError: there is no such job, or it hasn't ended.
        """
        self.store.find(name)
        state = self.store.delete(name)
        if state is not None:
            raise ConfigError(f"{name} is {state}. Cancel it first: footplate jobs cancel {name}")
        shutil.rmtree(self.home.job(name), ignore_errors=True)

    def wait(self, name: str) -> Job:
        """Wait for a job's end.

        Raises:
            UnknownJob: there is none of this name, or it was deleted meanwhile.
        """
        for _ in self.follow(name, lines=False):
            pass
        return self.store.find(name)

    def follow(self, name: str, lines: bool = True) -> Iterator[Line | State]:
        """What a job's processes write, from the beginning, and its states as it comes into them; until its end.

        Args:
            name: the job's.
            lines: whether lines are wanted, or only states.

        Raises:
            UnknownJob: there is none of this name.
            ConfigError: its logs are on another machine.
        """
        job = self.find(name)
        if lines and job.host != machine.host():
            raise ConfigError(f"{name} runs on {job.host}, and its logs are there: ask there.")
        follower, swept, known = Follower(self.home, name), time.monotonic(), None
        while True:
            state = self.store.state(name)
            if lines:
                yield from follower.lines(last=state in FINAL or state is None)
            if state is not None and state != known:
                known = state
                yield state
            if state in FINAL or state is None:
                return
            time.sleep(LOOK_S)
            if time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                self.sweep()

    def _refuse_known(self, name: str) -> None:
        if self.store.state(name) is not None:
            raise ConfigError(
                f"there is a job {name} already. Choose another name, or delete it: footplate jobs delete {name}"
            )


def _of_images(resolved: ResolvedJob) -> list[str]:
    if any(one.image_uri for one in resolved.replicas):
        return ["On this machine the package runs as it is, without the container image that the spec names."]
    return []
