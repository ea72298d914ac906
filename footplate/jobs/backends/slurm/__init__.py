"""Jobs on a Slurm cluster: an attempt is a batch job, and continues when its supervisor dies.

a login node                           │  the cluster
supervisor ─► attempt.py ◄── events.jsonl ── entrypoint.py, the batch script on the first node
              watcher.py ── sbatch,    │         ▲ srun's standard streams
              client.py     squeue, …──►         ▼
              request.py               │     replica.py, a task for each replica ─► its processes ─► their logs

request.py        the options of sbatch, and the task
client.py         Slurm's commands; watcher.py: a thread that uses them; attempt.py: the supervisor's view
attempt_files.py  the files on the shared disk
entrypoint.py     one attempt, on the cluster: judged and ended together
replica.py        one replica, on its node: installation, processes, output
asking.py         questions to the processes of a running job, and their answers

Footplate's home (`FOOTPLATE_HOME`) must be on a disk that all nodes share, as home directories usually are.

who dies                      what follows
a replica's process           the entry point judges its exit code, as on this machine
a node, the entry point       Slurm requeues the job, or the next supervisor submits it again; the program isn't blamed
the supervisor                nothing: the next one reads the events, and asks Slurm
Slurm's controller            nothing: the job goes on, and the supervisor retries without limit
the job is preempted          Slurm requeues it: that is the next attempt, and the trainer resumes
its time limit is near        the program gets SIGTERM, saves and ends; then the entry point requeues the job
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.execution import BUCKETS, absolute_job_dir, check_job_dir
from footplate.jobs.record import Job, Process
from footplate.jobs.scheduling import Resources

if TYPE_CHECKING:
    from footplate.jobs.backends.slurm.attempt import SlurmAttempt
    from footplate.jobs.package import Snapshot
    from footplate.jobs.questions import JobProcesses
    from footplate.jobs.spec.resolving import ResolvedJob

# sbatch's own variables for its options. They count at the submission, as they do for sbatch.
_VARIABLES = {
    "partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT", "qos": "SBATCH_QOS", "time": "SBATCH_TIMELIMIT",
}  # fmt: skip


class Slurm:
    """A Slurm cluster."""

    outlives = True

    def destination(self, options: Mapping[str, str | None]) -> dict[str, str]:
        """The options of sbatch, from the command and from sbatch's variables, and the cluster's slurm.conf if it is named.

        Raises:
            ConfigError: `--sbatch-args` has an open quote.
        """
        place = {}
        for name, variable in _VARIABLES.items():
            if value := options.get(name) or os.environ.get(variable):
                place[name] = value
        if more := options.get("sbatch-args"):
            try:
                shlex.split(more)
            except ValueError as error:
                raise ConfigError(f"--sbatch-args {more}: {error}. Quote it as in a shell.") from None
            place["sbatch_args"] = more
        if conf := os.environ.get("SLURM_CONF"):
            place["conf"] = conf
        return place

    def check(self, resolved: ResolvedJob, destination: Mapping[str, str]) -> list[str]:
        """Let Slurm check the job. Returns what the user may not expect.

        Raises:
            Unavailable: Slurm's controller doesn't answer.
            ConfigError: the job can't run on this cluster as it is; Slurm isn't installed here.
        """
        from footplate.jobs.backends.slurm import request
        from footplate.jobs.backends.slurm.client import Away, Client, NoNodes, Refused
        from footplate.jobs.supervision.logfiles import limit
        from footplate.jobs.translate.common import refuse_without_package

        refuse_without_package(resolved, "Slurm")
        if resolved.job_dir is not None and not resolved.job_dir.startswith(BUCKETS):
            check_job_dir(absolute_job_dir(resolved.job_dir, Path.cwd()))
        # A wrong FOOTPLATE_LOG_MB must fail now, not when the job starts.
        limit()
        shortages = []
        try:
            Client(destination.get("conf")).test(request.options(resolved, destination))
        except NoNodes as error:
            shortages = [f"Slurm can't place the job now: {error} If those nodes are down, it waits for them."]
        except Refused as error:
            raise ConfigError(f"Slurm refuses the job: {error}") from None
        except Away as error:
            raise Unavailable(
                f"Slurm's controller does not answer: {error}. `scontrol ping` tells if it runs."
            ) from None
        return [*shortages, *request.notices(resolved)]

    def needs(self, resolved: ResolvedJob) -> Resources:
        """The resources of this machine that the job needs: none, since it runs elsewhere."""
        return Resources()

    def request(
        self, resolved: ResolvedJob, destination: Mapping[str, str], package: Snapshot | None
    ) -> dict[str, Any]:
        """The command and the script.

        Raises:
            ConfigError: the job can't run on Slurm as it is.
        """
        from footplate.jobs.backends.slurm import attempt_files, request
        from footplate.jobs.execution import Execution
        from footplate.jobs.home import Home
        from footplate.jobs.translate.common import refuse_without_package

        refuse_without_package(resolved, "Slurm")
        execution = Execution.of(resolved, "DIGEST", Path.cwd(), destination)
        folder = Home.existing_or_not().attempt(resolved.name or "", 1)
        options = request.arguments(resolved, destination, f"{resolved.name}-TIME-1", folder)
        return {
            "command": ["sbatch", *options, str(folder / attempt_files.SCRIPT)],
            "script": request.script(execution, folder),
        }

    def find(self, task: Task) -> SlurmAttempt | None:
        """Find the attempt, if its job was submitted, or if Slurm has requeued the job of the attempt before it."""
        from footplate.jobs.backends.slurm.attempt_files import Record

        record = Record.read(task.folder)
        return _attempt(task, record.first) if record is not None else None

    def prepare(self, task: Task) -> None:
        """Install the package on the shared disk, and create the job's directory."""
        from footplate.jobs.backends.local.members import prepare

        prepare(task)

    def begin(self, task: Task) -> SlurmAttempt:
        """Submit the attempt as soon as Slurm answers."""
        return _attempt(task, task.attempt)

    def reach(self, job: Job, processes: Sequence[Process], what: str) -> JobProcesses:
        """Return the processes on the cluster's nodes, which are asked over the shared disk."""
        from footplate.jobs.backends.slurm.asking import job_processes
        from footplate.jobs.home import Home

        return job_processes(job.name, processes, Home.existing_or_not().attempt(job.name, job.attempt))


def _attempt(task: Task, first: int) -> SlurmAttempt:
    import json

    from footplate.jobs.backends.slurm import attempt_files, request
    from footplate.jobs.backends.slurm.attempt import SlurmAttempt
    from footplate.jobs.backends.slurm.client import Client
    from footplate.jobs.backends.slurm.watcher import Watcher
    from footplate.jobs.spec.resolving import ResolvedJob

    place, folder, key = task.execution.place, task.home.attempt(task.execution.name, first), f"{task.job.id}-{first}"
    client = Client(place.get("conf"))

    def submit() -> int:
        resolved = ResolvedJob.from_dict(task.job.spec)
        document = request.task(resolved, task.execution, task.job.id, first, task.home.root)
        attempt_files.write(folder / attempt_files.TASK, json.dumps(document))
        attempt_files.write(folder / attempt_files.SCRIPT, request.script(task.execution, folder), mode=0o700)
        # The variables of --env are not among these: Slurm keeps a job's variables. A replica reads them from the home.
        environ = {**process_env.lasting(os.environ), **process_env.credentials(os.environ)}
        return client.submit(
            request.arguments(resolved, place, key, folder), str(folder / attempt_files.SCRIPT), environ
        )

    count = sum(role.count for role in task.execution.replicas)
    return SlurmAttempt(Watcher(client, key, folder, submit), task.attempt, first, task.folder, count)


BACKEND = Slurm()
