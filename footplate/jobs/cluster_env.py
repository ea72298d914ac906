"""What each process of a job is told of the others: by which variables, in whose words.

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
  trainer read, for the master and the workers. Replicas whose addresses have one host share a node, and divide its devices.
  A master without workers gets none of these: it is free to start processes of its own, as `Trainer(devices=4)` does.
- `FOOTPLATE_JOB_NAME`, `FOOTPLATE_ATTEMPT` (0 is the first), `FOOTPLATE_JOB_DIR` for all of them.

Pure functions: who chooses the addresses is the backend, anew for each attempt.
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
FIRST_WITH_CHIEF = (2, 1)  # the runtime version from which on the master was called chief


@dataclass(frozen=True)
class Seat:
    """A place in a job's cluster: one of `spec.scaling.ROLES`, and its index among those of the role."""

    role: str
    index: int


@dataclass(frozen=True)
class ReplicaProcess:
    """One process of a job.

    Attributes:
        role: one of `spec.scaling.ROLES`.
        index: among those of its role, from 0.
        env: what it is told, over the environment that it gets.
    """

    role: str
    index: int
    env: dict[str, str]


def seats(resolved: ResolvedJob) -> list[Seat]:
    """Every process of a job, in the order in which addresses are given."""
    return [Seat(one.role, index) for one in resolved.replicas for index in range(one.count)]


def processes(
    resolved: ResolvedJob, addresses: Sequence[str], rendezvous: str, attempt: int, job_dir: str | None
) -> list[ReplicaProcess]:
    """The processes of one attempt of a job, each with its variables.

    Args:
        resolved: the job.
        addresses: `host:port` of each of `seats`, in their order: where its TensorFlow, or what it has, may listen.
        rendezvous: `host:port` at which the master meets the workers.
        attempt: how often the job was begun before.
        job_dir: as the program is given it; None when the job has none.
    """
    places = dict(zip(seats(resolved), addresses, strict=True))
    common = {"FOOTPLATE_ATTEMPT": str(attempt)}
    if resolved.name:
        common["FOOTPLATE_JOB_NAME"] = resolved.name
    if job_dir:
        common["FOOTPLATE_JOB_DIR"] = job_dir
    return [
        ReplicaProcess(
            seat.role,
            seat.index,
            {
                "TF_CONFIG": json.dumps(tf_config(resolved, places, seat)),
                "CLUSTER_SPEC": json.dumps(cluster_spec(resolved, places, seat)),
                **world(places, seat, rendezvous),
                **common,
            },
        )
        for seat in places
    ]


def tf_config(resolved: ResolvedJob, places: Mapping[Seat, str], seat: Seat) -> dict[str, Any]:
    """`TF_CONFIG` of a seat, as AI Platform Training wrote it."""
    names = {"master": _first(resolved), "worker": "worker", "parameter_server": "ps"}
    return {
        "cluster": _cluster(places, names),
        "task": {"type": {**names, "evaluator": "evaluator"}[seat.role], "index": seat.index},
        "job": _snake(resolved.spec),
        "environment": "cloud",
    }


def cluster_spec(resolved: ResolvedJob, places: Mapping[Seat, str], seat: Seat) -> dict[str, Any]:
    """`CLUSTER_SPEC` of a seat, as Vertex AI writes it; its `job` is text."""
    return {
        "cluster": _cluster(places, POOLS),
        "environment": "cloud",
        "task": {"type": POOLS[seat.role], "index": seat.index},
        "job": json.dumps(resolved.spec),
    }


def world(places: Mapping[Seat, str], seat: Seat, rendezvous: str) -> dict[str, str]:
    """What torch and a trainer read; empty for a seat that doesn't train, and for a master alone."""
    members = [one for one in places if one.role in WORLD]
    if seat not in members or len(members) == 1:
        return {}
    hosts = [_host(places[one]) for one in members]
    rank = members.index(seat)
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
    """What the master is called in `TF_CONFIG`."""
    said = resolved.spec.get("useChiefInTfConfig")
    if said is not None:
        return "chief" if said else "master"
    if any(one.image_uri for one in resolved.replicas):
        return "master"
    version = resolved.spec.get("runtimeVersion")
    major, minor = map(int, version.split(".")[:2]) if version else FIRST_WITH_CHIEF
    return "chief" if (major, minor) >= FIRST_WITH_CHIEF else "master"


def _cluster(places: Mapping[Seat, str], names: Mapping[str, str]) -> dict[str, list[str]]:
    cluster: dict[str, list[str]] = {}
    for seat, address in places.items():
        if seat.role in names:
            cluster.setdefault(names[seat.role], []).append(address)
    return cluster


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _snake(value: Any) -> Any:
    """Keys as TF_CONFIG has them, such as `worker_count`; 64-bit integers, as its JSON has them, are text."""
    if isinstance(value, dict):
        return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): _snake(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_snake(one) for one in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
