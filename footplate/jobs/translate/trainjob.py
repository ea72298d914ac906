"""Translate a job into a TrainJob of Kubeflow Trainer 2 (`trainer.kubeflow.org/v1alpha1`), for `kubectl apply -f`.

The result is a list of two objects. The TrainJob names image, program, nodes and GPUs. Its TrainingRuntime holds what a
TrainJob can't say: which failures restart the pods, the time to save, and volumes. The runtime that Kubeflow brings along,
`torch-distributed`, restarts each container in place, so no pod would know its attempt.

Kubeflow Trainer turns both into a JobSet, and sets torchrun's variables: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and
PET_MASTER_PORT. A line of shell exports them under the names that a program reads without torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from footplate.jobs.spec import naming
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.translate import kubernetes
from footplate.jobs.translate.common import (
    Translation,
    no_servers,
    no_tpus,
    no_tuning,
    one_kind_of_machine,
    refuse_if,
)

SYSTEM = "Kubeflow Trainer"
VERSION = "trainer.kubeflow.org/v1alpha1"
# The names by which Kubeflow Trainer finds the pods and the container of the program.
CONTAINER = "node"
TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def translate(job: ResolvedJob) -> Translation:
    """Make a TrainJob and its TrainingRuntime.

    Raises:
        Untranslatable: Kubeflow Trainer can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    document = {"apiVersion": "v1", "kind": "List", "items": [_runtime(job), _train_job(job)]}
    return Translation(document, "yaml", tuple(_notes(job)))


def _runtime(job: ResolvedJob) -> dict[str, Any]:
    replica = job.replicas[0]
    container = {"name": CONTAINER, "image": replica.image_uri, "env": kubernetes.job_variables(job)}
    pods = {
        "name": CONTAINER,
        "template": {"metadata": {"labels": TRAINER}, "spec": kubernetes.job_spec(job, replica, container)},
    }
    return {
        "apiVersion": VERSION,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": kubernetes.name_of(job),
            "labels": {**job.labels, "trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": _nodes(job), "torch": {}},
            "template": {"spec": {"failurePolicy": kubernetes.RESTARTS, "replicatedJobs": [pods]}},
        },
    }


def _train_job(job: ResolvedJob) -> dict[str, Any]:
    replica = job.replicas[0]
    rank = "$PET_NODE_RANK"
    world = kubernetes.world_variables(_nodes(job), rank, rank, "$PET_MASTER_ADDR", "$PET_MASTER_PORT")
    trainer: dict[str, Any] = {
        "image": replica.image_uri,
        **kubernetes.in_shell(job, replica, world),
        "numNodes": _nodes(job),
        "numProcPerNode": 1,
    }
    if resources := kubernetes.resources(replica):
        trainer["resourcesPerNode"] = resources
    name = kubernetes.name_of(job)
    return {
        "apiVersion": VERSION,
        "kind": "TrainJob",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "activeDeadlineSeconds": max(1, round(naming.seconds(job.max_running_time))),
            "trainer": trainer,
        },
    }


def _nodes(job: ResolvedJob) -> int:
    return sum(replica.count for replica in job.replicas)


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from no_tpus(job)
    yield from no_servers(job, "its pods are ranks. --to kubeflow makes a TFJob.")
    yield from one_kind_of_machine(job)
    yield from kubernetes.jobset_problems(job)
    yield from kubernetes.problems(job)


def _notes(job: ResolvedJob) -> Iterator[str]:
    yield from kubernetes.name_notes(job)
    yield from kubernetes.jobset_notes(job)
    yield "If Kubernetes says that the runtime must be created before the TrainJob, give kubectl apply again."
    yield from kubernetes.keys_left_out(job, SYSTEM)
