"""The environment variables that tell each process of a job about the others.

    replica of the job      TF_CONFIG            CLUSTER_SPEC      torch's world
    master                  chief, or master     workerpool0       rank 0
    worker 0, 1, …          worker               workerpool1       rank 1, 2, …
    parameter server        ps                   workerpool2       -
    evaluator               evaluator            workerpool3       -

- `TF_CONFIG` as AI Platform Training wrote it: cluster, task, job, environment. The evaluator is a task outside of the
  cluster. The master is `chief` with `useChiefInTfConfig`; where that isn't given, it is `master` in an image and in
  runtimes before 2.1.
- `CLUSTER_SPEC` as Vertex AI writes it.
- `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`, which torch and a
  trainer read, for the master and the workers. Replicas with the same host in their addresses share a node, and divide its
  devices. A master without workers gets none of these, so it can start processes of its own, as `Trainer(devices=4)` does.
- `FOOTPLATE_JOB_NAME`, `FOOTPLATE_ATTEMPT` (0 is the first), `FOOTPLATE_JOB_DIR` for all of them.
- In a trial of a tuning, its number as `trial` in `TF_CONFIG`'s task.

All functions are pure. The backend chooses the addresses, again for each attempt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

POOLS = {
    "master": "workerpool0",
    "worker": "workerpool1",
    "parameter_server": "workerpool2",
    "evaluator": "workerpool3",
}
WORLD = ("master", "worker")
# The first runtime version that called the master chief.
FIRST_WITH_CHIEF = (2, 1)


@dataclass(frozen=True)
class ReplicaId:
    """A replica of a job: one of `spec.scaling.ROLES`, and an index within the role."""

    role: str
    index: int


@dataclass(frozen=True)
class ReplicaProcess:
    """A process of a job.

    Attributes:
        role: one of `spec.scaling.ROLES`.
        index: its number within the role, from 0.
        env: its own variables. They override the rest of its environment.
    """

    role: str
    index: int
    env: dict[str, str]


def replica_ids(resolved: ResolvedJob) -> list[ReplicaId]:
    """All replicas of a job, in the order of the addresses that other functions take."""
    return [ReplicaId(group.role, index) for group in resolved.replicas for index in range(group.count)]


def processes(
    resolved: ResolvedJob,
    addresses: Sequence[str],
    rendezvous: str,
    attempt: int,
    job_dir: str | None,
    trial: int | None = None,
) -> list[ReplicaProcess]:
    """The processes of an attempt, with their variables.

    Args:
        resolved: the job.
        addresses: `host:port` of each of `replica_ids`, in their order. TensorFlow, or another library, may listen there.
        rendezvous: `host:port` at which the master meets the workers.
        attempt: the number of earlier attempts.
        job_dir: the program's `--job-dir`; None if the job has none.
        trial: the number of the trial that the job is; None if it is no trial.
    """
    address_of = dict(zip(replica_ids(resolved), addresses, strict=True))
    common = {"FOOTPLATE_ATTEMPT": str(attempt)}
    if resolved.name:
        common["FOOTPLATE_JOB_NAME"] = resolved.name
    if job_dir:
        common["FOOTPLATE_JOB_DIR"] = job_dir
    return [
        ReplicaProcess(
            replica.role,
            replica.index,
            {
                "TF_CONFIG": json.dumps(tf_config(resolved, address_of, replica, trial)),
                "CLUSTER_SPEC": json.dumps(cluster_spec(resolved, address_of, replica)),
                **world(address_of, replica, rendezvous),
                **common,
            },
        )
        for replica in address_of
    ]


def tf_config(
    resolved: ResolvedJob, address_of: Mapping[ReplicaId, str], replica: ReplicaId, trial: int | None = None
) -> dict[str, Any]:
    """`TF_CONFIG` of a replica, as AI Platform Training wrote it."""
    names = {"master": _first(resolved), "worker": "worker", "parameter_server": "ps"}
    task = {"type": {**names, "evaluator": "evaluator"}[replica.role], "index": replica.index}
    return {
        "cluster": _cluster(address_of, names),
        # Programs append it to a path, so it is text.
        "task": task if trial is None else {**task, "trial": str(trial)},
        "job": _snake(resolved.spec),
        "environment": "cloud",
    }


def cluster_spec(resolved: ResolvedJob, address_of: Mapping[ReplicaId, str], replica: ReplicaId) -> dict[str, Any]:
    """`CLUSTER_SPEC` of a replica, as Vertex AI writes it. Its `job` is text."""
    return {
        "cluster": _cluster(address_of, POOLS),
        "environment": "cloud",
        "task": {"type": POOLS[replica.role], "index": replica.index},
        "job": json.dumps(resolved.spec),
    }


def world(address_of: Mapping[ReplicaId, str], replica: ReplicaId, rendezvous: str) -> dict[str, str]:
    """The variables for torch and a trainer; empty for a replica that doesn't train, and for a master without workers."""
    members = [member for member in address_of if member.role in WORLD]
    if replica not in members or len(members) == 1:
        return {}
    hosts = [_host(address_of[member]) for member in members]
    rank = members.index(replica)
    nodes = list(dict.fromkeys(hosts))
    address, _, port = rendezvous.rpartition(":")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(members)),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        "NODE_RANK": str(nodes.index(hosts[rank])),
        "GROUP_RANK": str(nodes.index(hosts[rank])),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def _first(resolved: ResolvedJob) -> str:
    """The master's name in `TF_CONFIG`."""
    use_chief = resolved.spec.get("useChiefInTfConfig")
    if use_chief is not None:
        return "chief" if use_chief else "master"
    if any(group.image_uri for group in resolved.replicas):
        return "master"
    version = resolved.spec.get("runtimeVersion")
    major, minor = map(int, version.split(".")[:2]) if version else FIRST_WITH_CHIEF
    return "chief" if (major, minor) >= FIRST_WITH_CHIEF else "master"


def _cluster(address_of: Mapping[ReplicaId, str], names: Mapping[str, str]) -> dict[str, list[str]]:
    cluster: dict[str, list[str]] = {}
    for replica, address in address_of.items():
        if replica.role in names:
            cluster.setdefault(names[replica.role], []).append(address)
    return cluster


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _snake(value: Any) -> Any:
    """Keys in TF_CONFIG's form, such as `worker_count`. Integers are text, as JSON writes 64-bit ones."""
    if isinstance(value, dict):
        return {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): _snake(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_snake(item) for item in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
