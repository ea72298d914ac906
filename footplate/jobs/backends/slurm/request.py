"""The request to Slurm, as plain values: the options of sbatch, the script, and the task of the entry point.

Each replica is a task of one step. The tasks of a step are alike, so each gets the cores and the memory of the largest
machine in the spec. Replicas with GPUs get a node each. Other replicas may share a node.

The script is the entry point (`entrypoint.py`), which starts the replicas with srun. Slurm sends it SIGUSR1 before the time
limit. `--requeue` lets Slurm start it again after a node was lost or the job was preempted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.jobs.backends.slurm import attempt_files
from footplate.jobs.execution import Execution
from footplate.jobs.supervision.exit_status import GRACE_S
from footplate.jobs.translate.common import WORLD, gpus, without_image
from footplate.jobs.translate.slurm import GRACE_S as SAVE_S
from footplate.jobs.translate.slurm import Machine, machine_of, machine_options

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

SCRIPT = """\
#!/bin/bash
export PYTHONPATH={library}
exec {python} -P -m footplate.jobs.backends.slurm.entrypoint {folder}
"""
# Options of sbatch with the names of the backend's options.
_NAMED = ("partition", "account", "qos", "time")


def notices(resolved: ResolvedJob) -> Iterator[str]:
    """What the user may not expect, one sentence each."""
    yield from without_image(resolved, "Slurm")
    if len({str(replica.machine) for replica in resolved.replicas}) > 1:
        yield "The tasks of a Slurm job are alike: each replica gets the cores, memory and GPUs of the largest machine."


def ranks_of_each(resolved: ResolvedJob) -> int:
    """The processes of each master and worker: one for each GPU, in a job of several machines.

    A master alone starts its own processes, as `Trainer(devices=4)` does. A program with parameter servers has one process
    on each machine, whatever its GPUs.
    """
    world = [replica for replica in resolved.replicas if replica.role in WORLD]
    has_servers = any(replica.role == "parameter_server" for replica in resolved.replicas)
    if has_servers or sum(replica.count for replica in world) == 1:
        return 1
    return max(1, *(gpus(replica) for replica in world))


def largest_machine(resolved: ResolvedJob) -> Machine:
    """The resources of each task. A spec that names no machine leaves them to Slurm."""
    if resolved.scale_tier == "BASIC":
        return Machine(None, None, 0)
    machines = [machine_of(replica) for replica in resolved.replicas]
    return Machine(
        max((machine.vcpus for machine in machines if machine.vcpus is not None), default=None),
        max((machine.memory_gb for machine in machines if machine.memory_gb is not None), default=None),
        max(machine.gpus for machine in machines),
    )


def options(resolved: ResolvedJob, destination: Mapping[str, str]) -> list[str]:
    """The options of sbatch that describe the nodes: those of the spec, then those of the backend, which override them."""
    count = sum(replica.count for replica in resolved.replicas)
    machine = largest_machine(resolved)
    if machine.gpus:
        tasks = [f"nodes={count}", "ntasks-per-node=1"]
    else:
        tasks = [f"ntasks={count}"]
    named = [f"{name}={destination[name]}" for name in _NAMED if name in destination]
    more = shlex.split(destination.get("sbatch_args", ""))
    return [
        f"--{option}" for option in (*tasks, *machine_options(machine, share_nodes=not machine.gpus), *named)
    ] + more


def arguments(resolved: ResolvedJob, destination: Mapping[str, str], key: str, folder: Path) -> list[str]:
    """All options of sbatch.

    Args:
        resolved: the job.
        destination: the backend's options.
        key: the name of the Slurm job.
        folder: the folder of its first attempt.
    """
    return [
        f"--job-name={key}",
        f"--comment=footplate {resolved.name}",
        f"--output={folder / attempt_files.OUTPUT}",
        "--open-mode=append",
        f"--chdir={folder}",
        "--export=ALL",
        "--requeue",
        f"--signal=B:USR1@{SAVE_S}",
        *options(resolved, destination),
    ]


def script(execution: Execution, folder: Path) -> str:
    """The script of a Slurm job, whose first attempt has this folder."""
    words = {"library": execution.library, "python": execution.python, "folder": str(folder)}
    return SCRIPT.format(**{name: shlex.quote(word) for name, word in words.items()})


def task(resolved: ResolvedJob, execution: Execution, job: str, first: int, home: Path) -> dict[str, Any]:
    """The task of the entry point and the replicas. It contains no secrets.

    Args:
        resolved: the job.
        execution: what its attempts run.
        job: the job's id.
        first: the number of the first attempt.
        home: the home's folder.
    """
    return {
        "job": job,
        "first": first,
        "home": str(home),
        "execution": execution.to_dict(),
        "ranks": ranks_of_each(resolved),
        "own_node": largest_machine(resolved).gpus > 0,
        "grace_s": GRACE_S,
        # The rest is for the last report, and for Slurm.
        "save_s": SAVE_S - 15.0,
    }
