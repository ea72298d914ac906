"""Slurm's daemons as a backend that runs jobs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_cluster import SlurmCluster

from footplate.jobs.backends.slurm.client import Client, JobInfo
from jobs.backends.places import Kind
from jobs.conftest import Bench, until


class Slurm:
    """The slurm backend.

    Attributes:
        cluster: its daemons.
        client: Slurm's commands.
    """

    kind = Kind("slurm", requeues=True)
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.client = Client(str(cluster.conf))
        self.variables = {"SLURM_CONF": str(cluster.conf)}

    def job(self, bench: Bench, name: str = "my_job", first: int = 1) -> JobInfo | None:
        """The Slurm job of a job: the one whose first attempt has this number."""
        return next(iter(self.client.jobs(f"{bench.jobs.find(name).id}-{first}")), None)

    def hurry(self, bench: Bench) -> None:
        """Let Slurm start a requeued job at once, without the wait that it usually imposes."""
        job = self.job(bench)
        if job is not None and job.state == "PENDING" and job.reason == "BeginTime":
            self.cluster.run("scontrol", "update", f"jobid={job.id}", "StartTime=now")

    def lose_a_machine(self, bench: Bench) -> None:
        """Kill the last node that runs replicas of `my_job`. The entry point is on the first one."""
        job = until(lambda: self.job(bench))
        nodes = self.cluster.run("scontrol", "show", "hostnames", job.nodes).split()
        assert len(nodes) > 1, nodes
        self.cluster.lose_node(nodes[-1])

    def close(self) -> None:
        """Cancel all jobs, and bring back lost nodes."""
        self.cluster.clear()
