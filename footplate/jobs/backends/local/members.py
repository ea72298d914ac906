"""What each process of an attempt is to be: its program, its variables, its share of the devices."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from footplate.hardware.machine import usable_cores
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.backends.local.attempt import Member
from footplate.jobs.backends.local.machine import resources, share_devices
from footplate.jobs.cluster_env import processes
from footplate.jobs.package import Installed, install, stored
from footplate.launch.rendezvous import HOST, free_addresses

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob


@functools.cache
def installed(package: str, root: Path, folder: Path) -> Installed:
    """Install a package, or find it installed.

    Args:
        package: its digest.
        root: of the home.
        folder: the attempt's.
    """
    log = folder / "prepare.log"
    with log.open("a") as lines:
        made = install(stored(package, root), root, lines)
    if not log.stat().st_size:
        log.unlink()
    return made


def members(task: Task) -> list[Member]:
    """The processes of an attempt, in the order of their roles."""
    plan, package = task.execution, installed(task.execution.package, task.home.root, task.folder)
    before = process_env.read(task.home.job(plan.name), os.environ)
    has_gpus, count = resources().gpus > 0, sum(one.count for one in plan.replicas)
    share = {"OMP_NUM_THREADS": str(max(1, int(usable_cores()) // count))} if count > 1 else {}
    common = {
        **share,
        **before,
        **package.env,
        "PYTHONPATH": os.pathsep.join(filter(None, [package.env.get("PYTHONPATH"), before.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "FOOTPLATE_JOB_ID": task.job.id,
        "FOOTPLATE_JOB_ATTEMPT": str(task.attempt),
    }
    *addresses, rendezvous = free_addresses(HOST, count + 1)
    # a plan has what it reads of a resolved job
    replicas = processes(cast("ResolvedJob", plan), addresses, rendezvous, task.attempt - 1, plan.job_dir)
    devices = share_devices(task.job.devices, plan.replicas)
    directory = plan.directory if Path(plan.directory).is_dir() else str(task.home.job(plan.name))
    return [
        Member(
            one.role,
            one.index,
            [str(package.python), "-P", *plan.arguments],
            {**common, **one.env, **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))} if has_gpus else {})},
            directory,
            task.folder / f"{one.role}-{one.index}.log",
        )
        for one, mine in zip(replicas, devices, strict=True)
    ]
