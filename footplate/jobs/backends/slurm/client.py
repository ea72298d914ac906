"""Slurm's commands, and what their messages mean.

A job is found by its name, which is the key of an attempt and belongs to no other job. Slurm's own ids aren't enough: a
controller whose state was lost counts from 1 again.

`squeue` knows a job until some minutes after its end (`MinJobAge`). `sacct` knows it longer, on a cluster with accounting.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from footplate.core.errors import ConfigError

# Slurm's commands wait for a busy controller themselves.
LIMIT_S = 120.0
FINAL = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip

_FIELDS = {"JobID": 20, "State": 20, "RestartCnt": 12, "NodeList": 200, "Reason": 60}
# Messages of a controller that is away or busy, and of a network that fails.
_AWAY = re.compile(
    r"unable to contact|connect failure|timed out|connection refused|transport endpoint|standby mode|zero bytes|"
    r"temporarily unable|communication|authentication credential|munge",
    re.IGNORECASE,
)
# The field that a message of sbatch is about, and the command that lists its values.
_FIELD = (
    # An account that may not use a partition is a message about both.
    (re.compile(r"account", re.IGNORECASE), "account", "sacctmgr show associations user=$USER"),
    (re.compile(r"partition", re.IGNORECASE), "partition", "sinfo -s"),
    (re.compile(r"qos", re.IGNORECASE), "qos", "sacctmgr show qos"),
    (re.compile(r"time", re.IGNORECASE), "time", "sinfo -o '%P %l'"),
)
_NO_NODES = re.compile(r"node configuration|node count|gres|gpus|memory specification|cpu", re.IGNORECASE)


class NoNodes(Exception):
    """The cluster has no nodes for a job, at least now."""


class Away(Exception):
    """Slurm's controller doesn't answer now."""


class Refused(Exception):
    """Slurm refuses a job."""


@dataclass(frozen=True)
class JobInfo:
    """A job, as Slurm describes it.

    Attributes:
        id: its id.
        state: its state in Slurm's words, such as PENDING.
        restarts: how often Slurm has requeued it.
        reason: why it waits, in Slurm's words.
        nodes: its nodes, as a list of Slurm's: `n[1-2]`.
    """

    id: int
    state: str
    restarts: int = 0
    reason: str = ""
    nodes: str = ""

    @property
    def final(self) -> bool:
        """True if the job has ended, and Slurm won't start it again."""
        return self.state in FINAL


class Client:
    """The commands of one cluster.

    Args:
        conf: the path of its slurm.conf; None for the usual one.
    """

    def __init__(self, conf: str | None) -> None:
        self._conf = conf

    def submit(self, arguments: Sequence[str], script: str, environ: Mapping[str, str]) -> int:
        """Submit a job. Returns its id.

        Args:
            arguments: the options of sbatch.
            script: the path of its script.
            environ: the variables of the job, beyond Slurm's.

        Raises:
            Refused: Slurm refuses it.
            Away: Slurm doesn't answer. It may have accepted the job.
        """
        result = self._run(["sbatch", "--parsable", *arguments, script], environ)
        if result.returncode:
            raise _refusal(result.stderr, arguments)
        return int(result.stdout.strip().partition(";")[0])

    def test(self, arguments: Sequence[str]) -> None:
        """Let Slurm check a job's options, without a job.

        Raises:
            NoNodes: it has no nodes for it, or they are down now.
            Refused: Slurm would refuse it.
            Away: Slurm doesn't answer.
        """
        result = self._run(["sbatch", "--test-only", *arguments], stdin="#!/bin/bash\n")
        if result.returncode:
            error = _refusal(result.stderr, arguments)
            raise NoNodes(str(error)) if _NO_NODES.search(result.stderr) else error

    def jobs(self, name: str) -> list[JobInfo]:
        """The user's jobs of a name, in the order of their ids.

        Raises:
            Away: Slurm doesn't answer.
        """
        columns = ",".join(f"{field}:{width}" for field, width in _FIELDS.items())
        result = self._run(
            ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--name={name}", "-O", columns]
        )
        if result.returncode:
            raise Away(_last_line(result.stderr))
        return sorted((_job(line) for line in result.stdout.splitlines() if line.strip()), key=lambda job: job.id)

    def accounted(self, name: str) -> JobInfo | None:
        """The ended job of a name in the cluster's accounting; None if that doesn't know it, or doesn't exist.

        Raises:
            Away: Slurm doesn't answer.
        """
        try:
            result = self._run(
                ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--name={name}",
                 f"--user={os.getuid()}", "--starttime=now-60days", "--format=JobIDRaw,State"]
            )  # fmt: skip
        except ConfigError:
            return None
        # A cluster without accounting says so here.
        if result.returncode:
            return None
        jobs = [line.split("|") for line in result.stdout.splitlines() if line.strip()]
        # After a requeue there are several records of the job. The last one is the latest.
        return JobInfo(int(jobs[-1][0]), jobs[-1][1].split()[0]) if jobs else None

    def terminate(self, job: int) -> None:
        """Send SIGTERM to a job's batch script, if it runs."""
        self._run(["scancel", "--quiet", "--signal=TERM", "--batch", str(job)])

    def cancel(self, job: int, waiting: bool = False) -> None:
        """End a job.

        Args:
            job: its id.
            waiting: end it only if it waits.
        """
        self._run(["scancel", "--quiet", *(["--state=PENDING"] if waiting else []), str(job)])

    def _run(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, with none of the variables that give its options.

        Raises:
            ConfigError: the command isn't installed.
            Away: it doesn't end.
        """
        variables = dict(os.environ if environ is None else environ)
        variables = {
            name: value
            for name, value in variables.items()
            if not name.startswith(("SLURM", "SBATCH_", "SQUEUE_", "SACCT_"))
        }
        if self._conf is not None:
            variables["SLURM_CONF"] = self._conf
        try:
            return subprocess.run(
                command, input=stdin, capture_output=True, text=True, errors="replace", env=variables, timeout=LIMIT_S
            )
        except FileNotFoundError:
            raise ConfigError(
                f"{command[0]} isn't installed on this machine. Use --backend slurm on a login node of the cluster."
            ) from None
        except subprocess.TimeoutExpired:
            raise Away(f"{command[0]} has waited for {LIMIT_S:g} s") from None


def _job(line: str) -> JobInfo:
    values, start = [], 0
    for width in _FIELDS.values():
        values.append(line[start : start + width].strip())
        start += width
    job, state, restarts, nodes, reason = values
    return JobInfo(int(job), state, int(restarts or 0), "" if reason == "None" else reason, nodes)


def _refusal(errors: str, arguments: Sequence[str]) -> Away | Refused:
    """The error that a message of sbatch means, with the option that it is about."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    text = re.sub(
        r"^(sbatch: )?(error: )?((allocation failure|Batch job submission failed): )?", "", lines[-1] if lines else ""
    )
    if _AWAY.search(text):
        return Away(text)
    if _NO_NODES.search(errors):
        asked = " ".join(
            argument for argument in arguments if re.match(r"--(nodes|ntasks|cpus|mem|gpus|gres|constraint)", argument)
        )
        return Refused(
            f"the cluster has no nodes for {asked} ({text}). Choose other machines, or override these options with "
            "--sbatch-args. `sinfo -o '%P %D %c %m %G'` lists the nodes."
        )
    for pattern, field, command in _FIELD:
        if pattern.search(errors):
            value = next(
                (argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{field}=")), None
            )
            given = f"--{field} {value}" if value is not None else f"no --{field} was given"
            return Refused(f"{given}: {text}. `{command}` lists what there is.")
    return Refused(text or "sbatch fails without a message")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
