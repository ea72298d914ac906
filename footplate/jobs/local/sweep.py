"""A sweep: what makes anything happen. See the package's docstring for who sweeps, and when.

    1  a supervised job whose supervisor is gone gets a new one, and a new attempt; one that was being cancelled is
    cancelled 2  of the queue, those whose turn it is get what they need of the machine, and a supervisor

One sweep at a time, by a lock. A sweep that is killed in between leaves at worst a job that is PREPARING and has no
supervisor, which the next one finds.

A supervisor is gone when the process that was noted as such doesn't live any more and nobody holds the job's lock. Two
supervisors of one job can't be: the second doesn't get the lock, and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from footplate.jobs.home import Home
from footplate.jobs.local import machine
from footplate.jobs.local.identity import Identity, boot, end_groups
from footplate.jobs.local.locks import Held, held, is_held
from footplate.jobs.plan import Plan
from footplate.jobs.record import Job
from footplate.jobs.scheduling import starts
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store.jobs import Store
from footplate.launch.policy import Restarts

PATIENCE_S = 30.0  # for another's sweep, each of which takes milliseconds
LOCK = "supervisor.lock"
LIMITS = Restarts()

_started: list[subprocess.Popen[bytes]] = []  # by this process, which must fetch their exit codes


def sweep(home: Home, store: Store) -> None:
    """Sweep once."""
    _started[:] = [one for one in _started if one.poll() is None]
    try:
        with held(home.root / "sweep.lock", PATIENCE_S):
            _recover(home, store)
            _start(home, store)
    except Held:  # somebody has swept all the time
        return


def _recover(home: Home, store: Store) -> None:
    for job in store.of_host(machine.host(), SUPERVISED):
        if not _is_lost(home, job):
            continue
        _end_processes(store, job)
        cause = _what_was_lost(job)
        now = time.time()
        if job.state == State.CANCELLING:
            store.move(job.name, job.state, State.CANCELLED, now, cause, ended=now)
        elif job.losses >= LIMITS.max_host_restarts:
            cause = f"{cause}; max_host_restarts={LIMITS.max_host_restarts} is used up"
            store.move(job.name, job.state, State.FAILED, now, cause, ended=now)
        elif store.move(
            job.name, job.state, State.PREPARING, now, cause,
            attempt=job.attempt + 1, losses=job.losses + 1, owner=None,
        ):  # fmt: skip
            _spawn(home, store, job)


def _start(home: Home, store: Store) -> None:
    host, there = machine.host(), machine.resources()
    queue = store.waiting(host)
    if not queue:
        return
    running = store.of_host(host, SUPERVISED)
    taken = [device for job in running for device in job.devices]
    for waiting in starts(there, [job.needs for job in running], queue, time.time()):
        job = store.find(waiting.name)
        devices = machine.choose_devices(job.needs.gpus, taken, there)
        taken += devices
        if store.move(
            job.name, State.QUEUED, State.PREPARING, time.time(), attempt=job.attempt + 1, devices=devices, owner=None
        ):
            _spawn(home, store, job)


def _spawn(home: Home, store: Store, job: Job) -> None:
    """Start a supervisor in a session of its own, with the interpreter that has submitted the job."""
    plan = Plan.from_dict(job.plan)
    python = plan.python if Path(plan.python).exists() else sys.executable
    path = os.pathsep.join(filter(None, [plan.library, os.environ.get("PYTHONPATH", "")]))
    folder = home.job(job.name)
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    with (folder / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [python, "-m", "footplate.jobs.local.supervisor", job.name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.root,
            env={**os.environ, **home.variables(), "PYTHONPATH": path},
            start_new_session=True,
        )
    _started.append(process)
    identity = Identity.of(process.pid)
    store.own(job.name, identity and identity.to_dict())


def _is_lost(home: Home, job: Job) -> bool:
    owner = Identity.from_dict(job.owner)
    lock = home.job(job.name) / LOCK
    return not (owner and owner.alive()) and not (lock.exists() and is_held(lock))


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
