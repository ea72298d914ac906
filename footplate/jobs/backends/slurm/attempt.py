"""The supervisor's view of an attempt on Slurm.

The entry point (`entrypoint.py`) judges the replicas, and writes events into a file on the shared disk. Replicas write
their logs into the attempt's folder themselves. This module reads the events, and asks Slurm (`watcher.py`) for what they
don't tell: why the job waits, and how it ended if the entry point couldn't say it.

A requeued job is the next attempt. Slurm counts how often it has started a job again, and each start has an attempt of its
own: the number of the job's first attempt, and that count. So the entry point knows its number without a supervisor. When
the count is larger than this attempt's, the attempt is over, and its failure is `Requeued`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from footplate.jobs.backends.contract import Requeued
from footplate.jobs.backends.slurm import attempt_files
from footplate.jobs.backends.slurm.client import JobInfo
from footplate.jobs.backends.slurm.watcher import MORE_S, Watcher
from footplate.jobs.record import Process
from footplate.launch.failure import Failure, Kind

LOOK_S = 0.05
# Another machine's events may arrive this much later than the end of the job.
EVENTS_S = 3.0
# A job that Slurm has preempted waits for its next start, or has ended. Slurm needs a while to tell which.
PREEMPTED_S = 15.0
# A job that neither squeue nor sacct knows for this long is lost.
UNKNOWN_S = 30.0
# After the grace period, a controller that doesn't answer has this time to end a job.
UNREACHED_S = 60.0

_ENDS: dict[str, tuple[Kind, str]] = {
    "BOOT_FAIL": ("host", "its node didn't boot"),
    "COMPLETED": ("host", "its entry point ended without a verdict"),
    "FAILED": ("exception", "its entry point failed"),
    "NODE_FAIL": ("host", "its node was lost"),
    "OUT_OF_MEMORY": ("exception", "it used more memory than it had asked Slurm for"),
    "PREEMPTED": ("host", "it was preempted"),
    "TIMEOUT": ("host", "its time limit was over before it had saved"),
}
_MISTAKES = {
    "CANCELLED": "it was cancelled in Slurm, by scancel",
    "DEADLINE": "Slurm could not finish it before its --deadline",
    "REVOKED": "another cluster of the federation runs it",
}
# Reasons for which Slurm doesn't start a job until somebody changes something.
_BLOCKED = {
    "PartitionConfig": "no nodes of the partition are as it needs them",
    "PartitionTimeLimit": "its --time is more than the partition allows",
    "PartitionNodeLimit": "it needs more nodes than the partition allows",
    "JobHeldUser": "it is held: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "BeginTime": "Slurm waits before it starts a requeued job again",
}


class SlurmAttempt:
    """An attempt on Slurm. Implements `Attempt`.

    Args:
        watcher: talks to Slurm. This object starts and closes it.
        number: the attempt's number.
        first: the number of the first attempt of its Slurm job.
        folder: the attempt's folder.
        count: the number of replicas.
    """

    def __init__(self, watcher: Watcher, number: int, first: int, folder: Path, count: int) -> None:
        self.over = False
        self.succeeded = False
        self.failure: Failure | None = None
        self._watcher = watcher
        self._number = number
        self._first = first
        self._folder = folder
        self._count = count
        self._processes: dict[tuple[str, int], Process] = {}
        self._ended: list[Process] = []
        self._started = False
        self._stop_requested = False
        self._verdict: dict[str, Any] | None = None
        self._stopped = False
        self._give_up_at = float("inf")
        self._unknown_since: float | None = None
        self._final_since: float | None = None
        watcher.start(first)
        self._events = attempt_files.LineReader(folder / attempt_files.EVENTS)
        self._read()

    @property
    def running(self) -> bool:
        """True when all replicas have begun."""
        return len(self._processes) == self._count

    @property
    def waits_for(self) -> str:
        """The reason why the replicas haven't begun."""
        if self._watcher.trouble:
            return f"waits for Slurm's controller: {self._watcher.trouble}"
        job = self._job
        if job is None or job.state not in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"):
            return ""
        reason = _BLOCKED.get(job.reason)
        why = f"{job.reason} ({reason})" if reason else job.reason
        return f"waits in Slurm's queue as job {job.id}" + (f": {why}" if why else "")

    @property
    def processes(self) -> list[Process]:
        """The processes that have begun."""
        return list(self._processes.values())

    def wait(self, timeout_s: float) -> list[Process]:
        """Read events for `timeout_s`, or until a process has ended. Returns the processes that have ended."""
        until = time.monotonic() + timeout_s
        while True:
            self._read()
            self._judge()
            left = until - time.monotonic()
            if self.over or self._ended or left <= 0:
                break
            time.sleep(min(LOOK_S, left))
        ended, self._ended = self._ended, []
        return ended

    def stop(self, grace_s: float) -> None:
        """End the job. The entry point ends the replicas, and kills the rest after the grace period."""
        self._stopped = True
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s + MORE_S + UNREACHED_S)
        self._watcher.stop(grace_s)

    def close(self) -> None:
        """Stop watching. The job goes on."""
        self._watcher.close()

    @property
    def _job(self) -> JobInfo | None:
        return self._watcher.seen.job if self._watcher.seen is not None else None

    def _read(self) -> None:
        for event in self._events.read():
            match event["event"]:
                case "start":
                    self._started = True
                case "began":
                    replica = (event["role"], event["index"])
                    self._processes[replica] = Process(self._number, *replica, pid=0, mark=0.0, began=event["at"])
                case "ended":
                    self._end((event["role"], event["index"]), event["at"], event["outcome"])
                case "told":
                    self._stop_requested = True
                case "over":
                    self._verdict = event

    def _end(self, replica: tuple[str, int], at: float, outcome: str) -> None:
        process = self._processes.get(replica, Process(self._number, *replica, pid=0, mark=0.0, began=at))
        process = Process(self._number, *replica, pid=0, mark=0.0, began=process.began, ended=at, outcome=outcome)
        self._processes[replica] = process
        self._ended.append(process)

    def _judge(self) -> None:
        """Find out if the attempt is over, from the entry point's verdict or from Slurm."""
        if self.over:
            return
        if self._watcher.refused:
            self._finish(Failure("exception", self._watcher.refused, time.monotonic(), mistake=True))
        elif self._verdict is not None and (self._stopped or not self._verdict["told"]):
            failure = self._verdict["failure"]
            self.succeeded = self._verdict["succeeded"]
            self._finish(failure and Failure(at=time.monotonic(), **failure))
        elif self._watcher.cancelled:
            self._finish(None)
        elif time.monotonic() > self._give_up_at:
            job = self._watcher.job_id
            self._finish(
                _host(f"Slurm's controller can't be told to end the job, which may go on: scancel {job}")
                if self._watcher.trouble
                else None
            )
        elif self._watcher.seen is not None and not self._watcher.trouble:
            self._judge_by_slurm(self._job)

    def _judge_by_slurm(self, job: JobInfo | None) -> None:
        now = time.monotonic()
        if job is None:
            self._unknown_since = self._unknown_since or now
            if now - self._unknown_since > UNKNOWN_S:
                self._finish(None if self._stopped else _host("Slurm doesn't know its job any more"))
            return
        self._unknown_since = None

        if job.restarts > self._number - self._first and not self._stopped:
            self._requeued(job)
            return
        if not job.final:
            self._final_since = None
            if self._verdict is not None:
                self._watcher.ask()
            return
        self._final_since = self._final_since or now
        # Without a start, or after the verdict, there are no events to wait for.
        complete = self._verdict is not None or (self._stopped and not self._started)
        patience_s = PREEMPTED_S if job.state == "PREEMPTED" and not self._stopped else 0.0 if complete else EVENTS_S
        if now - self._final_since >= patience_s:
            self._finish(None if self._stopped else self._failure_of(job))

    def _requeued(self, job: JobInfo) -> None:
        """Hand the job over to the next attempt."""
        following = self._folder.with_name(f"attempt-{self._number + 1}")
        attempt_files.Record(self._first, job.id).write(following)
        why = self._verdict["why"] if self._verdict is not None else "it was preempted, or its node was lost"
        self._finish(Requeued("host", f"Slurm has requeued it as job {job.id}: {why}", time.monotonic()))

    def _failure_of(self, job: JobInfo) -> Failure:
        """The failure of a job that has ended without a verdict that counts."""
        if job.state in _MISTAKES:
            return Failure("exception", f"{_MISTAKES[job.state]} (job {job.id})", time.monotonic(), mistake=True)
        kind, text = _ENDS.get(job.state, ("host", f"Slurm ended it with the state {job.state}"))
        if self._stop_requested:
            kind, text = "host", f"Slurm ended it with the state {job.state}"
        elif job.state == "FAILED":
            text += f": {self._last_words()}"
        return Failure(kind, f"{text} (job {job.id})", time.monotonic())

    def _last_words(self) -> str:
        """The last line of the entry point's output."""
        path = self._folder.with_name(f"attempt-{self._first}") / attempt_files.OUTPUT
        try:
            lines = path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"there is no {path}. Set FOOTPLATE_HOME to a folder on a disk that all nodes share"
        return next((line.strip() for line in reversed(lines) if line.strip()), f"{path} is empty")

    def _finish(self, failure: Failure | None) -> None:
        self.over, self.failure = True, failure


def _host(text: str) -> Failure:
    return Failure("host", text, time.monotonic())
