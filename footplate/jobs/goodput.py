"""The goodput ledger of a job: its record in the store, and the records of its trainers, as seconds and money by cause.

    transitions     when it waited in the queue, and when each attempt was prepared, began and was over
    processes       when the processes of each attempt began and ended
    monitor.jsonl   below the job directory: what the trainers did meanwhile
    catalog         the list price of the job's machines

`footplate/core/goodput` computes the ledger from these. A lost process has no recorded end. It ended when the last file of
its attempt was written.

A job on this machine holds its part of the machine from the queue to its end, so all of that time has a price. Elsewhere
only the time of its processes has one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from footplate.catalog.prices import Price, price_of_replicas
from footplate.core.errors import ConfigError, MissingExtra, Unavailable
from footplate.core.goodput import NAME, Cause, Ledger, MonitorFile, Session, Stretch
from footplate.core.goodput.ledger import ledger
from footplate.core.goodput.run_ledger import damaged_note
from footplate.jobs.backends.local import machine
from footplate.jobs.execution import BUCKETS
from footplate.jobs.home import Home
from footplate.jobs.record import Job, Process, Transition
from footplate.jobs.run_files import files_below
from footplate.jobs.states import FINAL, State
from footplate.jobs.store import open_store
from footplate.jobs.store.jobs import Store

# Clocks of other machines may differ by this time.
SKEW_S = 300.0
# Between two measurements of the processes of an attempt.
SIGN_S = 1.0
# A report doesn't wait long for a store on another machine.
PATIENCE_S = 5.0
_FILES = 64
_READERS = 64


def job_ledger(home: Home, store: Store, job: Job, now: float | None = None) -> Ledger:
    """Compute the ledger of a job, until its end or until now.

    Args:
        home: the folder of the jobs.
        store: the store of the job.
        job: the job.
        now: the time of the query, in seconds since the epoch.
    """
    now = time.time() if now is None else now
    records, notes = _records(job)
    times = [window.time for sessions in records for session in sessions for window in session.windows]
    signs = functools.partial(_last_sign, home, job, times)
    stretches = stretches_of(job, store.transitions(job.name), store.processes(job.name), now, signs)
    files = _of_attempts(job, records, stretches)
    root, _ = runs_of(job)
    if not files and root is not None and job.attempt:
        notes.append(f"There is no {NAME} of this job in {root}: the time of its processes is shown as training.")
    if job.plan.get("tuning") is not None:
        # It holds no machine.
        return ledger(
            stretches, [], 1, None, "", ["This job tunes. Each of its trials has a job with a ledger of its own."]
        )
    price = price_of_replicas(job.spec.get("replicas", ()))
    return ledger(stretches, files, _devices(job), price.usd_per_hour, _machines(job, price), notes)


def ledger_of_run(job_id: str) -> Ledger | None:
    """Compute the ledger of the job that a run's record names.

    None if this machine doesn't have the job, or can't reach its store.

    Args:
        job_id: the job's id, as a file has it. So it may be any text.
    """
    with suppress(ConfigError, MissingExtra, Unavailable):
        home = Home.existing_or_not()
        name = home.name_of(job_id)
        if name is None:
            return None
        store = open_store(home, PATIENCE_S)
        try:
            job = store.get(name)
            return job_ledger(home, store, job) if job is not None and job.id == job_id else None
        finally:
            store.close()
    return None


# Times of the job's record


def stretches_of(
    job: Job,
    transitions: Sequence[Transition],
    processes: Sequence[Process],
    now: float,
    last_sign: Callable[[int, float, float], float] = lambda attempt, began, until: until,
) -> list[Stretch]:
    """Cut the time of a job into waiting, attempts, and pauses between attempts.

    Args:
        job: the job.
        transitions: its transitions, in order.
        processes: the processes of its attempts.
        now: the end, if the job hasn't ended.
        last_sign: finds the end of a lost attempt from its number, its beginning, and when its loss was noticed.
    """
    holds = job.backend == "local"
    stretches: list[Stretch] = []
    index = 0
    has_tried = False
    while index < len(transitions):
        begin = transitions[index]
        following = index + 1
        if begin.target == State.QUEUED or begin.target in FINAL:
            # A final state is over with the next submission. The last one is the end.
            runs = following == len(transitions)
            if not (runs and begin.target in FINAL):
                cause = Cause.QUEUED if begin.target == State.QUEUED else Cause.IDLE
                until = now if runs else transitions[following].at
                stretches.append(Stretch(begin.at, until, cause, begin.attempt, paid=False, runs=runs))
            has_tried = False
        else:
            while following < len(transitions) and _is_same_attempt(begin, transitions[following]):
                following += 1
            end = transitions[following] if following < len(transitions) else None
            part = transitions[index:following]
            own = [process for process in processes if process.attempt == begin.attempt]
            stretches += _attempt(part, end, own, now, has_tried, holds, last_sign)
            has_tried = True
        index = following
    return stretches


def _is_same_attempt(begin: Transition, other: Transition) -> bool:
    return other.attempt == begin.attempt and other.target != State.QUEUED and other.target not in FINAL


def _attempt(
    part: Sequence[Transition],
    end: Transition | None,
    processes: Sequence[Process],
    now: float,
    has_tried: bool,
    holds: bool,
    last_sign: Callable[[int, float, float], float],
) -> list[Stretch]:
    """Cut an attempt into the time before its processes, with them, and after them.

    Args:
        part: its transitions.
        end: the transition that ended it; None if it goes on.
        processes: its processes.
        now: the time of the query.
        has_tried: another attempt was made since the job left the queue.
        holds: the job holds its resources also without processes.
        last_sign: see `stretches_of`.
    """
    number, first = part[0].attempt, part[0].at
    until = now if end is None else end.at
    waiting = Cause.DOWN if has_tried else Cause.STARTUP
    began = [process.began for process in processes] or [each.at for each in part if each.target == State.RUNNING]
    if not began:
        return [Stretch(first, until, waiting, number, holds, runs=end is None)]

    lives = end is None and any(process.ended is None for process in processes)
    begin = ended = min(max(first, min(began)), until)
    ends = [process.ended for process in processes if process.ended is not None]
    if lives or not processes:
        ended = until
    elif len(ends) < len(processes):
        ended = last_sign(number, begin, until)
    else:
        ended = max(ends)
    ended = min(max(begin, ended), until)
    after = Cause.SHUTDOWN if end is None or end.target in FINAL else Cause.DOWN
    stretches = [Stretch(first, begin, waiting, number, holds), Stretch(begin, ended, None, number, runs=lives)]
    if not lives:
        stretches.append(Stretch(ended, until, after, number, holds, runs=end is None))
    return stretches


def _last_sign(home: Home, job: Job, times: Sequence[float], attempt: int, began: float, until: float) -> float:
    """Return the end of an attempt whose processes were lost: shortly after the last sign of life.

    Args:
        home: the folder of the jobs.
        job: the job.
        times: the times of its trainers' reports.
        attempt: the number of the attempt.
        began: the beginning of its processes.
        until: when the loss was noticed.
    """
    signs = [time for time in times if began <= time <= until]
    with suppress(OSError):
        for file in home.attempt(job.name, attempt).iterdir():
            with suppress(OSError):
                signs.append(file.stat().st_mtime)
    # The use of the machine is measured once a second at first, and the end is between two measurements.
    return max(signs) + SIGN_S / 2 if signs else until


# Records of trainers


def _records(job: Job) -> tuple[list[list[Session]], list[str]]:
    """Read the records of a job's trainers. Returns the sessions of each file, and notes about what is missing."""
    root, why = runs_of(job)
    if root is None:
        return [], [why]
    records, notes = [], []
    for path in islice(sorted(files_below(root, NAME, job.created)), _FILES):
        file = _reader(path)
        records.append(file.sessions())
        if file.damaged:
            notes.append(damaged_note(file))
    return records, notes


def _of_attempts(job: Job, records: Sequence[Sequence[Session]], stretches: Sequence[Stretch]) -> list[list[Session]]:
    """Return the sessions that began in attempts of the job. Other jobs may have trained in the same directory."""
    skew_s = 1.0 if job.backend == "local" else SKEW_S
    attempts = [(each.began - skew_s, each.ended + skew_s) for each in stretches if each.cause is None]
    own = [
        [session for session in sessions if any(began <= session.began <= ended for began, ended in attempts)]
        for sessions in records
    ]
    return [sessions for sessions in own if sessions]


def runs_of(job: Job) -> tuple[Path | None, str]:
    """Return the directory below which a job's trainers write, or the reason why it is unknown."""
    job_dir = job.plan.get("job_dir")
    if job.host != machine.host():
        return None, f"The job runs on {job.host}, and its training is recorded there."
    if not job_dir:
        return None, "The job has no job directory, so its training can't be split. Set --job-dir."
    if not job_dir.startswith(BUCKETS):
        return Path(job_dir), ""
    # With a bucket, a trainer's directory is on the machine (`training/job.py`).
    if job.backend == "local":
        return Path(job.plan["directory"]) / "runs" / job.name, ""
    return None, f"The job directory is {job_dir}. The record of a training is read only on the machine that trains."


@functools.lru_cache(_READERS)
def _reader(path: Path) -> MonitorFile:
    # A server asks again and again: only new lines are read.
    return MonitorFile(path)


# Devices and money


def _devices(job: Job) -> int:
    replicas = job.plan.get("replicas", ())
    return max(1, sum(role["count"] * max(1, role.get("gpus", 0)) for role in replicas))


def _machines(job: Job, price: Price) -> str:
    if price.usd_per_hour is None:
        return ""
    runs = "if it ran on " if job.backend == "local" else ""
    return f"{runs}{price.machines}, by the list price in us-central1"
