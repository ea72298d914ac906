"""A sweep: what makes anything happen. See the package's docstring for who sweeps, and when.

    1  a supervised job whose supervisor is gone gets a new one. Unless its attempt outlives supervisors, it gets a new
       attempt, too, or is cancelled if it was being cancelled
    2  of the queue, those that have waited for longer than they were to (`maxWaitTime`) are cancelled
    3  those whose turn it is get what they need of the machine, and a supervisor

One sweep at a time, by a lock. A sweep that is killed in between leaves at worst a job that is PREPARING and has no
supervisor, which the next one finds.

A supervisor is gone when the process that was noted as such doesn't live any more and nobody holds the job's lock. The
sweep holds that itself while it counts the next attempt: a supervisor of which it doesn't know begins before that, and is
not gone, or after it, with that attempt. Two supervisors of one job can't be: the second doesn't get the lock, and ends.

Users of one machine who share a store have homes of their own. They queue for the machine together, and each one's sweeps
take care of the jobs of their home alone. As the lock is of a home, two of them who sweep at the same moment may begin more
than there is room for.

A neighbour's job whose turn it is, and which nobody starts, lets others pass after `NEIGHBOUR_S`: its user may have left.
It still starts with the next sweep of its own home, if there is room.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from footplate.jobs.backends import named
from footplate.jobs.backends.local import machine
from footplate.jobs.home import Home
from footplate.jobs.plan import Plan
from footplate.jobs.record import Job
from footplate.jobs.scheduling import MIN_WAIT_S, Resources, Waiting, starts, why_too_long
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision import prestart
from footplate.jobs.supervision.identity import Identity, boot, end_groups
from footplate.jobs.supervision.locks import Held, held
from footplate.launch.policy import Restarts
from footplate.launch.process_lifetime import kill_marked

PATIENCE_S = 30.0  # for another's sweep, each of which takes milliseconds
LOCK = "supervisor.lock"
SUPERVISOR_LOG = "supervisor.log"
LIMITS = Restarts()
NEIGHBOUR_S = 60.0  # a neighbour who follows a job sweeps every few seconds

_started: list[subprocess.Popen[bytes]] = []  # by this process, which must fetch their exit codes


def sweep(home: Home, store: Store, patience_s: float = PATIENCE_S) -> None:
    """Sweep once, unless somebody else does for so long."""
    _started[:] = [one for one in _started if one.poll() is None]
    try:
        with held(home.root / "sweep.lock", patience_s):
            _recover(home, store)
            _end_waiting(store)
            _start(home, store)
    except Held:  # somebody has swept all the time
        return


def _recover(home: Home, store: Store) -> None:
    for job in store.of_host(machine.host(), SUPERVISED):
        owner = Identity.from_dict(job.owner)
        if not is_ours(home, job) or (owner is not None and owner.alive()):
            continue
        home.job(job.name).mkdir(parents=True, mode=0o700, exist_ok=True)
        again = False
        with suppress(Held), held(home.job(job.name) / LOCK):
            again = named(job.backend).outlives or _count_loss(store, job.name)
        if again:
            _spawn(home, store, job)


def _count_loss(store: Store, name: str) -> bool:
    """Bring a job whose supervisor is gone into the state that follows; whether that is another attempt."""
    job = store.get(name)
    if job is None or job.state not in SUPERVISED:  # it has ended since
        return False
    _end_processes(store, job)
    cause, now = _what_was_lost(job), time.time()
    if job.state == State.CANCELLING:
        store.move(job.name, job.state, State.CANCELLED, now, cause, ended=now)
        return False
    if job.losses >= LIMITS.max_host_restarts:
        cause = f"{cause}; max_host_restarts={LIMITS.max_host_restarts} is used up"
        store.move(job.name, job.state, State.FAILED, now, cause, ended=now)
        return False
    return store.move(
        job.name, job.state, State.PREPARING, now, cause, attempt=job.attempt + 1, losses=job.losses + 1, owner=None
    )


def _end_waiting(store: Store) -> None:
    now = time.time()
    for name, since, plan in store.waiting_since(machine.host(), now - MIN_WAIT_S):
        if cause := why_too_long(plan["spec"], since, now):
            store.move(name, State.QUEUED, State.CANCELLED, now, cause, ended=now)


def _start(home: Home, store: Store) -> None:
    host, there = machine.host(), machine.resources()
    queue = store.waiting(host)
    if not queue:
        return
    running = store.of_host(host, SUPERVISED)
    taken = [device for job in running for device in job.devices]
    for job in _due(home, store, there, [job.needs for job in running], queue):
        devices = machine.choose_devices(job.needs.gpus, taken, there)
        taken += devices
        if store.move(
            job.name, State.QUEUED, State.PREPARING, time.time(), attempt=job.attempt + 1, devices=devices, owner=None
        ):
            _spawn(home, store, job)


def _due(home: Home, store: Store, there: Resources, running: list[Resources], queue: list[Waiting]) -> list[Job]:
    """The jobs of this home whose turn it is."""
    now, room_since = time.time(), store.last_end(machine.host())
    while True:
        jobs = {waiting.name: store.get(waiting.name) for waiting in starts(there, running, queue, now)}
        neighbours = {name for name, job in jobs.items() if job is not None and not is_ours(home, job)}

        # Room only shrinks between two ends. So a job that fits now has fitted since the last end, or since it came.
        abandoned = {
            waiting.name
            for waiting in queue
            if waiting.name in neighbours and now - max(waiting.since, room_since) > NEIGHBOUR_S
        }
        if not abandoned:
            return [job for name, job in jobs.items() if job is not None and name not in neighbours]
        queue = [waiting for waiting in queue if waiting.name not in abandoned]


def is_ours(home: Home, job: Job) -> bool:
    """Whether a job was submitted from this home, and not from another on the same machine that shares the store.

    Its folder alone doesn't tell: it may be what is left of ours of the same name, which somebody else has deleted.
    """
    return home.store is None or (home.job(job.name) / job.id).exists()


def _spawn(home: Home, store: Store, job: Job) -> None:
    """Give a job a supervisor, in a session of its own, with the interpreter that has submitted the job."""
    plan = Plan.from_dict(job.plan)
    folder = home.job(job.name)
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    process = prestart.take(plan.python, plan.library)
    waits = process is not None
    if process is None:
        python = plan.python if Path(plan.python).exists() else sys.executable
        with (folder / SUPERVISOR_LOG).open("ab") as log:
            process = subprocess.Popen(
                [python, "-m", "footplate.jobs.supervision.supervisor", job.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home.root,
                env=prestart.surroundings(plan.library, home.variables()),
                start_new_session=True,
            )
    _started.append(process)
    identity = Identity.of(process.pid)
    store.own(job.name, identity and identity.to_dict())
    if waits:
        prestart.post(process, job.name)


def _what_was_lost(job: Job) -> str:
    owner = Identity.from_dict(job.owner)
    if owner is not None and owner.boot != boot():
        return "the machine was started anew"
    return "its supervisor was lost" if owner is not None else "its supervisor was never there"


def _end_processes(store: Store, job: Job) -> None:
    """End what a lost supervisor's processes have left; they themselves died with it."""
    owner = Identity.from_dict(job.owner)
    if owner is not None:
        left = [one for one in store.processes(job.name) if one.attempt == job.attempt and one.ended is None]
        end_groups([Identity(one.pid, one.mark, owner.boot) for one in left])
        kill_marked("FOOTPLATE_JOB_ID", job.id)  # what has left those groups
