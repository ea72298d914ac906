"""A reconcile pass: compare the store with the processes that run, and start what should run.

The package's docstring says who makes a pass, and when. A pass has three steps:

    1  each job whose supervisor is gone gets a new one. Unless its attempt outlives supervisors, it also gets a new
       attempt, or is cancelled if it was being cancelled
    2  queued jobs that have waited too long (`maxWaitTime`) are cancelled
    3  the jobs that can start get their part of the machine, and a supervisor

A lock allows one pass at a time. If a pass is killed, at worst a job stays PREPARING without a supervisor, and the next
pass finds it.

A supervisor is gone if its recorded process no longer lives, and nobody holds the job's lock. The pass holds that lock
while it counts the next attempt. So a supervisor that the pass doesn't know of either got the lock earlier, and isn't
gone, or gets it later, and runs the new attempt. A job can't have two supervisors: the second doesn't get the lock, and
ends.

Users of one machine who share a store have separate homes. They share one queue for the machine, but a pass starts only the
jobs of its own home. The lock belongs to a home, so two simultaneous passes of two users may start more than fits.

If nobody starts a neighbour's job that could start, other jobs may overtake it after `NEIGHBOUR_S`: its user may have
left. It still starts with the next pass of its own home, if there is room.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from footplate.jobs.backends.local import machine
from footplate.jobs.execution import Execution
from footplate.jobs.fork_server.request import request_supervisor
from footplate.jobs.home import Home
from footplate.jobs.record import Job
from footplate.jobs.scheduling import MIN_WAIT_S, Resources, Waiting, jobs_to_start, why_too_long
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision import prestart
from footplate.jobs.supervision.identity import Identity, boot, end_groups
from footplate.jobs.supervision.locks import Held, held
from footplate.jobs.tuning import backend_of
from footplate.launch.policy import Restarts
from footplate.launch.process_lifetime import kill_marked

# A pass takes milliseconds. This is the time to wait for another one.
PATIENCE_S = 30.0
LOCK = "supervisor.lock"
SUPERVISOR_LOG = "supervisor.log"
LIMITS = Restarts()
# A neighbour who follows a job makes a pass every few seconds.
NEIGHBOUR_S = 60.0

# The supervisors that this process started. It must collect their exit codes.
_started: list[subprocess.Popen[bytes]] = []


def reconcile(home: Home, store: Store, patience_s: float = PATIENCE_S) -> None:
    """Make a pass, unless another process makes passes for all of `patience_s`."""
    _started[:] = [process for process in _started if process.poll() is None]
    try:
        with held(home.root / "sweep.lock", patience_s):
            _recover(home, store)
            _end_waiting(store)
            _start(home, store)
    except Held:
        return


def _recover(home: Home, store: Store) -> None:
    """Step 1: replace supervisors that are gone."""
    for job in store.of_host(machine.host(), SUPERVISED):
        owner = Identity.from_dict(job.owner)
        if not is_ours(home, job) or (owner is not None and owner.alive()):
            continue
        home.job(job.name).mkdir(parents=True, mode=0o700, exist_ok=True)
        again = False
        with suppress(Held), held(home.job(job.name) / LOCK):
            again = backend_of(job, store).outlives or _count_loss(store, job.name)
        if again:
            _spawn(home, store, job)


def _count_loss(store: Store, name: str) -> bool:
    """Move a job whose supervisor is gone to its next state. Returns True if that is another attempt."""
    job = store.get(name)
    # The job has ended in the meantime.
    if job is None or job.state not in SUPERVISED:
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
    """Step 2: cancel jobs that have waited too long."""
    now = time.time()
    for name, since, plan in store.waiting_since(machine.host(), now - MIN_WAIT_S):
        if cause := why_too_long(plan["spec"], since, now):
            store.move(name, State.QUEUED, State.CANCELLED, now, cause, ended=now)


def _start(home: Home, store: Store) -> None:
    """Step 3: start the jobs that can start."""
    host, resources = machine.host(), machine.resources()
    queue = store.waiting(host)
    if not queue:
        return
    running = store.of_host(host, SUPERVISED)
    taken = [device for job in running for device in job.devices]
    for job in _due(home, store, resources, [job.needs for job in running], queue):
        devices = machine.choose_devices(job.needs.gpus, taken, resources)
        taken += devices
        if store.move(
            job.name, State.QUEUED, State.PREPARING, time.time(), attempt=job.attempt + 1, devices=devices, owner=None
        ):
            _spawn(home, store, job)


def _due(home: Home, store: Store, resources: Resources, running: list[Resources], queue: list[Waiting]) -> list[Job]:
    """The jobs of this home that can start."""
    now, room_since = time.time(), store.last_end(machine.host())
    while True:
        jobs = {waiting.name: store.get(waiting.name) for waiting in jobs_to_start(resources, running, queue, now)}
        neighbours = {name for name, job in jobs.items() if job is not None and not is_ours(home, job)}

        # Between two ends, room only shrinks. So a job that fits now has fitted since the last end, or since its
        # submission.
        abandoned = {
            waiting.name
            for waiting in queue
            if waiting.name in neighbours and now - max(waiting.since, room_since) > NEIGHBOUR_S
        }
        if not abandoned:
            return [job for name, job in jobs.items() if job is not None and name not in neighbours]
        queue = [waiting for waiting in queue if waiting.name not in abandoned]


def is_ours(home: Home, job: Job) -> bool:
    """Return True if a job was submitted from this home, and not from another home that shares the store.

    The job's folder alone doesn't prove that: it may belong to an older job of this name, deleted by somebody else.
    """
    return home.store is None or (home.job(job.name) / job.id).exists()


def _spawn(home: Home, store: Store, job: Job) -> None:
    """Give a job a supervisor, in its own session, with the interpreter that submitted the job.

    The store knows the supervisor before the supervisor knows its job, so that a death in between isn't missed.
    """
    execution = Execution.from_dict(job.plan)
    folder = home.job(job.name)
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    environment = prestart.environment(execution.library, home.variables())
    forked = request_supervisor(home.job(execution.trial["tuning"])) if execution.trial is not None else None
    if forked is not None:
        _enter_owner(store, job, forked.pid)
        forked.assign(job.name, environment)
        return
    process = prestart.take(execution.python, execution.library)
    is_prestarted = process is not None
    if process is None:
        python = execution.python if Path(execution.python).exists() else sys.executable
        with (folder / SUPERVISOR_LOG).open("ab") as log:
            process = subprocess.Popen(
                [python, "-m", "footplate.jobs.supervision.supervisor", job.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home.root,
                env=environment,
                start_new_session=True,
            )
    _started.append(process)
    _enter_owner(store, job, process.pid)
    if is_prestarted:
        prestart.assign(process, job.name)


def _enter_owner(store: Store, job: Job, pid: int) -> None:
    identity = Identity.of(pid)
    store.own(job.name, identity and identity.to_dict())


def _what_was_lost(job: Job) -> str:
    owner = Identity.from_dict(job.owner)
    if owner is not None and owner.boot != boot():
        return "the machine was restarted"
    return "its supervisor was lost" if owner is not None else "its supervisor never started"


def _end_processes(store: Store, job: Job) -> None:
    """End the children that a lost supervisor's processes left. The processes themselves died with it."""
    owner = Identity.from_dict(job.owner)
    if owner is not None:
        left = [
            process for process in store.processes(job.name) if process.attempt == job.attempt and process.ended is None
        ]
        end_groups([Identity(process.pid, process.mark, owner.boot) for process in left])
        # Children may have left their process group, but keep the job's variable.
        kill_marked("FOOTPLATE_JOB_ID", job.id)
