"""A thread that talks to Slurm, so that the supervisor never waits for a busy controller.

    submit, unless Slurm has the job ──► ask for its state every few seconds ──► it has ended, or is unknown

**Exactly one job runs the attempt.** Before sbatch, the record says that the job is going to be submitted. If the
supervisor dies before it has recorded the id, the next one asks Slurm for a job of this name, and submits one only if there
is none. Slurm may still get a late request of the first sbatch. Then there are two jobs: the first one that starts claims
the attempt (`attempt_files.claim`), the other one ends itself, and this thread cancels it.

While Slurm can't be reached, the thread concludes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from footplate.core.errors import FootplateError
from footplate.jobs.backends.slurm import attempt_files
from footplate.jobs.backends.slurm.client import Away, Client, JobInfo, Refused

log = logging.getLogger(__name__)

# Between two questions for the job's state: after it has changed, and the longest pause.
SOON_S = 0.5
ASK_S = 5.0
# The longest pause while the job is being ended.
END_S = 1.0
LONGEST_PAUSE_S = 30.0
# After the grace period, the entry point has this time to kill the replicas and to write its events.
MORE_S = 10.0


@dataclass(frozen=True)
class Seen:
    """The latest news from Slurm.

    Attributes:
        job: the job; None if Slurm doesn't know it.
        at: when it was asked, on the monotonic clock.
    """

    job: JobInfo | None
    at: float


class Watcher:
    """The thread.

    Attributes:
        seen: the latest news; None before the first.
        trouble: why Slurm can't be asked now; empty if it can.
        refused: why the job can't run; empty if it can.
        cancelled: the job was to be ended before it was submitted.

    Args:
        client: Slurm's commands.
        key: the name of the Slurm job.
        folder: the folder of its first attempt, with its record.
        submit: submits the job, and returns its id.
    """

    def __init__(self, client: Client, key: str, folder: Path, submit: Callable[[], int]) -> None:
        self.seen: Seen | None = None
        self.trouble = ""
        self.refused = ""
        self.cancelled = False
        self._client = client
        self._key = key
        self._folder = folder
        self._submit = submit
        record = attempt_files.Record.read(folder)
        # Without a record, no supervisor has ever asked Slurm for the job.
        self._may_exist = record is not None
        self._record = record
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._stop_at = float("inf")
        self._kill_at = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"slurm-{key}", daemon=True)

    def start(self, first: int) -> None:
        """Begin. `first` is the number of the job's first attempt."""
        if self._record is None:
            self._record = attempt_files.Record(first)
            self._record.write(self._folder)
        self._thread.start()

    @property
    def job_id(self) -> int | None:
        """The job's id, if it is known."""
        return self._record.job if self._record is not None else None

    def stop(self, grace_s: float) -> None:
        """End the job: a waiting one at once, a running one by SIGTERM, and by force after the grace period."""
        now = time.monotonic()
        self._stop_at = min(self._stop_at, now)
        self._kill_at = min(self._kill_at, now + grace_s + MORE_S)
        self._wake.set()

    def ask(self) -> None:
        """Ask Slurm now."""
        self._wake.set()

    def close(self) -> None:
        """Stop watching. The job goes on."""
        self._closed.set()
        self._wake.set()
        # The thread may be waiting for Slurm.
        self._thread.join(1.0)

    def _run(self) -> None:
        pause_s, ask_s = 1.0, SOON_S
        while not self._closed.is_set():
            before = self.seen
            try:
                self._step()
            except Refused as error:
                self.refused = f"Slurm refuses it: {error}"
                return
            except FootplateError as error:
                self.refused = str(error)
                return
            except (Away, OSError, ValueError) as error:
                self.trouble = str(error) or type(error).__name__
                log.warning("%s: %s; retry in %g s", self._key, self.trouble, pause_s)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self.trouble, pause_s = "", 1.0
            if self.cancelled:
                return
            changed = self.seen is None or before is None or self.seen.job != before.job
            ask_s = SOON_S if changed else min(2 * ask_s, ASK_S)
            self._wake.wait(min(ask_s, END_S) if self._stopping else ask_s)
            self._wake.clear()

    @property
    def _stopping(self) -> bool:
        return self._stop_at < float("inf")

    def _step(self) -> None:
        asked_at = time.monotonic()
        jobs = self._client.jobs(self._key) if self._may_exist else []
        if not jobs and self.job_id is None:
            if self._stopping:
                self.cancelled = True
                return
            # From here on, Slurm may have the job, even if this fails.
            self._may_exist = True
            self._note(self._submit())
            self._wake.set()
            return

        job = self._choose(jobs)
        if job is None:
            job = self._client.accounted(self._key)
        elif job.id != self.job_id:
            self._note(job.id)
        if job is not None and self._stopping:
            self._end(job)
        self.seen = Seen(job, asked_at)

    def _choose(self, jobs: Sequence[JobInfo]) -> JobInfo | None:
        """The job that runs the attempt. Others of its name are cancelled."""
        if not jobs:
            return None
        claimed = attempt_files.claimed(self._folder)
        wanted = claimed if claimed is not None else min(job.id for job in jobs)
        for job in jobs:
            if job.id != wanted and not job.final:
                log.warning("%s: job %d was submitted twice, also as %d; that is cancelled", self._key, wanted, job.id)
                self._client.cancel(job.id)
        return next((job for job in jobs if job.id == wanted), None)

    def _note(self, job: int) -> None:
        assert self._record is not None
        self._record = replace(self._record, job=job)
        self._record.write(self._folder)

    def _end(self, job: JobInfo) -> None:
        if job.final:
            return
        if time.monotonic() > self._kill_at:
            self._client.cancel(job.id)
        elif job.state == "RUNNING":
            # The entry point may not have heard an earlier one, if it was just starting. It obeys the first that it hears.
            self._client.terminate(job.id)
        else:
            self._client.cancel(job.id, waiting=True)
