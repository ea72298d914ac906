"""Translate a job into a script for Slurm's sbatch: `sbatch job.sh`.

One task runs on each node. `srun` sets Slurm's variables for each; a line of shell converts them to torch's (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and then becomes the program. Arguments are quoted, so they reach the program
unchanged.

Before the time limit, Slurm sends SIGUSR1 to the script. The script sends SIGTERM to the program, which saves and ends, and
requeues the job. `--requeue` starts the job again after a node was lost or the job was preempted. All runs have the same
FOOTPLATE_JOB_ID, and each has its own FOOTPLATE_JOB_ATTEMPT, so a trainer resumes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from footplate.catalog.rows import catalog
from footplate.jobs.spec import naming
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import Replica
from footplate.jobs.translate.common import (
    UNNAMED,
    Translation,
    accelerator,
    command,
    gpus,
    left_out,
    needs_program,
    no_entry_points,
    no_servers,
    no_tpus,
    no_tuning,
    one_kind_of_machine,
    refuse_if,
)
from footplate.launch.slurm_allocation import FIRST_PORT, PORTS

SYSTEM = "Slurm"
GRACE_S = 120

SCRIPT = """\
#!/bin/bash
{options}

set -euo pipefail
export FOOTPLATE_JOB_ID="slurm-$SLURM_JOB_ID" FOOTPLATE_JOB_ATTEMPT="$((${{SLURM_RESTART_COUNT:-0}} + 1))"
{before}
HOSTS="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
MASTER_ADDR="${{HOSTS%%$'\\n'*}}"
MASTER_PORT=$(({first_port} + SLURM_JOB_ID % {ports}))
export MASTER_ADDR MASTER_PORT WORLD_SIZE="$SLURM_NTASKS"

# Slurm sends SIGUSR1 to this shell {grace_s} s before the time limit. The program gets SIGTERM, saves and ends.
requeue=
save_and_requeue() {{
  requeue=yes
  scancel --signal=TERM "$SLURM_JOB_ID"
}}
trap save_and_requeue USR1

srun --kill-on-bad-exit=1 {container}bash -c {told} \\
  task {words} &
program=$!

status=0
wait "$program" || status=$?
if [ -n "$requeue" ]; then  # the signal may have interrupted the wait
  status=0
  wait "$program" || status=$?
fi
if [ -n "$requeue" ] && [ "$status" -ne 0 ]; then
  # Slurm ends this shell when it has requeued the job. If the shell ended before, Slurm could forget the requeue.
  trap '' TERM
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status"
"""

TOLD = 'export RANK="$SLURM_PROCID" NODE_RANK="$SLURM_NODEID" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE=1; exec "$@"'


def translate(job: ResolvedJob) -> Translation:
    """Make a script for sbatch.

    Raises:
        Untranslatable: Slurm can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    image = job.replicas[0].image_uri
    script = SCRIPT.format(
        options="\n".join(f"#SBATCH --{option}" for option in _options(job)),
        before=_before(job),
        first_port=FIRST_PORT,
        ports=PORTS,
        grace_s=GRACE_S,
        container=f"--container-image={shlex.quote(image)} " if image else "",
        told=shlex.quote(TOLD),
        words=shlex.join(command(job, job.replicas[0])),
    )
    return Translation(script, "script", tuple(_notes(job)))


def _options(job: ResolvedJob) -> Iterator[str]:
    replica = job.replicas[0]
    yield f"job-name={job.name or UNNAMED}"
    yield f"nodes={sum(each.count for each in job.replicas)}"
    yield "ntasks-per-node=1"
    yield from machine_options(machine_of(replica))
    yield f"time={minutes(job.max_running_time)}"
    yield f"signal=B:USR1@{GRACE_S}"
    yield "requeue"
    yield "open-mode=append"


@dataclass(frozen=True)
class Machine:
    """The resources that a replica asks Slurm for.

    Attributes:
        vcpus: cores; None if the catalog doesn't know.
        memory_gb: GiB; None if the catalog doesn't know.
        gpus: GPUs.
    """

    vcpus: int | None
    memory_gb: float | None
    gpus: int


def machine_of(replica: Replica) -> Machine:
    """The resources of a role's machines."""
    row = catalog().machines[replica.machine.machine]
    return Machine(row.vcpus, row.memory_gb, gpus(replica))


def machine_options(machine: Machine, share_nodes: bool = False) -> Iterator[str]:
    """The options of sbatch for the resources of each task.

    Args:
        machine: the resources.
        share_nodes: several tasks may run on one node; by default each has its own.
    """
    if machine.vcpus is not None:
        yield f"cpus-per-task={machine.vcpus}"
    if machine.memory_gb is not None and not share_nodes:
        yield f"mem={int(machine.memory_gb * 1024)}M"
    elif machine.memory_gb is not None:
        yield f"mem-per-cpu={int(machine.memory_gb * 1024 / (machine.vcpus or 1))}M"
    if machine.gpus:
        yield f"gpus-per-node={machine.gpus}"


def minutes(duration: str) -> int:
    """Convert a duration to whole minutes, Slurm's unit: rounded up, at least one.

    >>> minutes("7201s")
    121
    """
    return int((Decimal(duration.removesuffix("s")) / 60).to_integral_value(ROUND_CEILING))


def _before(job: ResolvedJob) -> str:
    """The first lines: variables that describe the job."""
    variables = {"FOOTPLATE_JOB_NAME": job.name or UNNAMED, "FOOTPLATE_JOB_DIR": job.job_dir}
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items() if value)


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from needs_program(job)
    yield from no_tpus(job)
    yield from no_servers(job, "tasks differ by rank alone. footplate jobs submit runs such a job on one machine.")
    yield from no_entry_points(job)
    yield from one_kind_of_machine(job)
    if job.spec.get("packageUris"):
        yield "packageUris: tasks install no packages. Put them where all nodes see them, and into PYTHONPATH."


def _notes(job: ResolvedJob) -> Iterator[str]:
    replica = job.replicas[0]
    kind = accelerator(replica)
    if replica.image_uri:
        yield "--container-image needs the plugin Pyxis on the cluster."
    else:
        yield "Submit it from the directory that holds the program's package, on a disk that all nodes see."
    if kind:
        yield f"Sites name their GPUs in their own ways: for {kind.short}, add --constraint or the type to --gpus-per-node."
    if naming.seconds(job.max_running_time) <= GRACE_S:
        yield f"SIGTERM comes {GRACE_S} s before the end, so at once."
    if job.labels:
        yield f"labels are left out: {SYSTEM} has none."
    yield from left_out(
        job, SYSTEM,
        region="is where its cluster is", network="has its cluster's", service_account="runs as you",
        scheduling__priority="has its own; see --priority and --nice", scheduling__max_wait_time="has --deadline",
        runtime_version="has its nodes' packages", python_version="has its nodes' Python",
        use_chief_in_tf_config="writes no TF_CONFIG", encryption_config="keeps nothing itself",
        enable_web_access="has srun --jobid",
    )  # fmt: skip
