"""Translate a job into a resource of Kubeflow's training operator, version 1, for `kubectl apply -f`.

Master and workers become a `PyTorchJob`, whose pods get RANK, WORLD_SIZE and MASTER_ADDR. With parameter servers or
evaluators the result is a `TFJob`, whose pods get TF_CONFIG. A pod runs an image that contains the program, since
Kubernetes installs no packages. GKE's labels for the machine type and the GPUs of nodes select the node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from footplate.jobs.spec import naming
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import Replica
from footplate.jobs.translate import kubernetes
from footplate.jobs.translate.common import Translation, command, no_tpus, no_tuning, refuse_if

SYSTEM = "Kubeflow"
TORCH = {"master": "Master", "worker": "Worker"}
TENSORFLOW = {"master": "Chief", "worker": "Worker", "parameter_server": "PS", "evaluator": "Evaluator"}
# Of 63 characters; the operator appends a suffix for each pod.
MAX_NAME = 50


def translate(job: ResolvedJob) -> Translation:
    """Make a PyTorchJob or, with parameter servers or evaluators, a TFJob.

    Raises:
        Untranslatable: Kubeflow can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    torch = all(replica.role in TORCH for replica in job.replicas)
    names, container = (TORCH, "pytorch") if torch else (TENSORFLOW, "tensorflow")
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob" if torch else "TFJob",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "runPolicy": {
                "activeDeadlineSeconds": max(1, round(naming.seconds(job.max_running_time))),
                "cleanPodPolicy": "Running",
            },
            "pytorchReplicaSpecs" if torch else "tfReplicaSpecs": {
                names[replica.role]: _replica(job, replica, container) for replica in job.replicas
            },
        },
    }
    return Translation(document, "yaml", tuple(_notes(job)))


def _replica(job: ResolvedJob, replica: Replica, container: str) -> dict[str, Any]:
    program: dict[str, Any] = {"name": container, "image": replica.image_uri, **kubernetes.words(job, replica)}
    if resources := kubernetes.resources(replica):
        program["resources"] = resources
    pod: dict[str, Any] = {"nodeSelector": kubernetes.node_selector(replica), "containers": [program]}
    if job.spec.get("serviceAccount"):
        pod["serviceAccountName"] = job.spec["serviceAccount"]
    return {"replicas": replica.count, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from no_tpus(job)
    yield from kubernetes.name_problems(job, MAX_NAME)
    yield from kubernetes.problems(job)


def _notes(job: ResolvedJob) -> Iterator[str]:
    yield from kubernetes.name_notes(job)
    if any(not command(job, replica) for replica in job.replicas):
        yield "The image's own program runs."
    yield from kubernetes.keys_left_out(job, SYSTEM)
