"""The processes of an attempt: program, variables and devices of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from footplate.hardware.machine import usable_cores
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.backends.local.attempt import Member
from footplate.jobs.backends.local.machine import resources, share_devices
from footplate.jobs.cluster_env import processes
from footplate.jobs.execution import BUCKETS, Execution
from footplate.jobs.home import Home
from footplate.jobs.package import Installed, install, stored
from footplate.jobs.tuning.trial_jobs import trial_variables
from footplate.launch.hang_files import HANGS_DIR
from footplate.launch.rendezvous import HOST, free_addresses

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob


# What this process has installed, by the package's digest and the home's folder.
_installed: dict[tuple[str, Path], Installed] = {}


def installed(package: str, root: Path, folder: Path) -> Installed:
    """Install a package, unless it is installed.

    Args:
        package: its digest.
        root: the home's folder.
        folder: the attempt's folder.
    """
    if (package, root) not in _installed:
        _installed[package, root] = _install(package, root, folder)
    return _installed[package, root]


def use_installed(package: str, root: Path, result: Installed) -> None:
    """Use what another process has installed.

    Args:
        package: its digest.
        root: the home's folder.
        result: the program, with locks of this process.
    """
    _installed[package, root] = result


def _install(package: str, root: Path, folder: Path) -> Installed:
    log = folder / "prepare.log"
    with log.open("a") as file:
        result = install(stored(package, root), root, file)
    if not log.stat().st_size:
        log.unlink()
    return result


def prepare(task: Task) -> None:
    """Install the package, and create the job's directory, unless that is in a bucket."""
    if task.execution.job_dir is not None and not task.execution.job_dir.startswith(BUCKETS):
        Path(task.execution.job_dir).mkdir(parents=True, exist_ok=True)
    installed(task.execution.package, task.home.root, task.folder)


def base_environment(home: Home, name: str, execution: Execution, package: Installed) -> dict[str, str]:
    """The variables that all processes of a job have: those of its submission, and those of its package.

    Args:
        home: the home of the job.
        name: the job's name.
        execution: what the job runs.
        package: its program.
    """
    before, count = process_env.read(home.job(name), os.environ), sum(role.count for role in execution.replicas)
    share = {"OMP_NUM_THREADS": str(max(1, int(usable_cores()) // count))} if count > 1 else {}
    return {
        **share,
        **before,
        **package.env,
        "PYTHONPATH": os.pathsep.join(filter(None, [package.env.get("PYTHONPATH"), before.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
    }


def directory_of(home: Home, execution: Execution) -> str:
    """The current directory of a job's processes: that of the submission, or the job's folder where there is none."""
    return execution.directory if Path(execution.directory).is_dir() else str(home.job(execution.name))


def members(task: Task) -> list[Member]:
    """The processes of an attempt, in the order of their roles."""
    execution, package = task.execution, installed(task.execution.package, task.home.root, task.folder)
    has_gpus, count = resources().gpus > 0, sum(role.count for role in execution.replicas)
    base = base_environment(task.home, execution.name, execution, package)
    common = {
        **base,
        "FOOTPLATE_JOB_ID": task.job.id,
        "FOOTPLATE_JOB_ATTEMPT": str(task.attempt),
        HANGS_DIR: str(task.folder),
    }
    *addresses, rendezvous = free_addresses(HOST, count + 1)

    # An Execution has all fields of a resolved job that `processes` reads.
    trial = execution.trial
    replicas = processes(
        cast("ResolvedJob", execution), addresses, rendezvous, task.attempt - 1, execution.job_dir,
        None if trial is None else trial["number"],
    )  # fmt: skip
    devices = share_devices(task.job.devices, execution.replicas)
    directory = directory_of(task.home, execution)
    return [
        Member(
            replica.role,
            replica.index,
            [str(package.python), "-P", *execution.arguments],
            {
                **common,
                **replica.env,
                **({} if trial is None else trial_variables(trial, task.folder, replica.role, replica.index)),
                **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} if has_gpus else {}),
            },
            directory,
            task.folder / f"{replica.role}-{replica.index}.log",
            base,
        )
        for replica, own in zip(replicas, devices, strict=True)
    ]
