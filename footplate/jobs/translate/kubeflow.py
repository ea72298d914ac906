"""Translate a job into a resource of Kubeflow's training operator, version 1, for `kubectl apply -f`.

Master and workers become a `PyTorchJob`, whose pods get RANK, WORLD_SIZE and MASTER_ADDR. With parameter servers or
evaluators the result is a `TFJob`, whose pods get TF_CONFIG. A pod runs an image that contains the program, since
Kubernetes installs no packages. GKE's labels for the machine type and the GPUs of nodes select the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

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
    machine_type,
    no_tpus,
    no_tuning,
    refuse_if,
    spoken,
)

SYSTEM = "Kubeflow"
TORCH = {"master": "Master", "worker": "Worker"}
TENSORFLOW = {"master": "Chief", "worker": "Worker", "parameter_server": "PS", "evaluator": "Evaluator"}
# Of 63 characters; the operator appends a suffix for each pod.
MAX_NAME = 50
_LABEL = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?")


def translate(job: ResolvedJob) -> Translation:
    """Make a PyTorchJob or, with parameter servers or evaluators, a TFJob.

    Raises:
        Untranslatable: Kubeflow can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    torch = all(replica.role in TORCH for replica in job.replicas)
    names, container = (TORCH, "pytorch") if torch else (TENSORFLOW, "tensorflow")
    metadata: dict[str, Any] = {"name": _name(job)}
    if job.labels:
        metadata["labels"] = dict(job.labels)
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob" if torch else "TFJob",
        "metadata": metadata,
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
    kind, words = accelerator(replica), _words(job, replica)
    selector = {"node.kubernetes.io/instance-type": machine_type(replica)}
    if kind and kind.compute_engine:
        selector["cloud.google.com/gke-accelerator"] = kind.compute_engine
    runs: dict[str, Any] = {"name": container, "image": replica.image_uri, **words}
    if gpus(replica):
        runs["resources"] = {"limits": {"nvidia.com/gpu": gpus(replica)}}
    pod: dict[str, Any] = {"nodeSelector": selector, "containers": [runs]}
    if job.spec.get("serviceAccount"):
        pod["serviceAccountName"] = job.spec["serviceAccount"]
    return {"replicas": replica.count, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _words(job: ResolvedJob, replica: Replica) -> dict[str, list[str]]:
    """A container's command and arguments. `$(` is escaped, since Kubernetes would read it as a variable."""
    if replica.container_command or replica.container_args:
        parts = {"command": list(replica.container_command), "args": list(replica.container_args)}
    else:
        parts = {"command": list(job.command[:3]), "args": list(job.command[3:])}
    return {key: [word.replace("$(", "$$(") for word in words] for key, words in parts.items() if words}


def _name(job: ResolvedJob) -> str:
    return (job.name or UNNAMED).lower().replace("_", "-").rstrip("-")


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from no_tpus(job)
    if len(_name(job)) > MAX_NAME:
        yield f"The name {_name(job)} has {len(_name(job))} characters: at most {MAX_NAME} leave room for its pods' names."
    for replica in job.replicas:
        if replica.image_uri is None:
            yield f"The {spoken(replica.role)} has no image: build one with the program in it, and give --master-image-uri."
            break
    if job.spec.get("packageUris"):
        yield "packageUris: a pod installs no packages. Build them into the image."
    for key, value in job.labels.items():
        if not _LABEL.fullmatch(key) or (value and not _LABEL.fullmatch(value)):
            yield f"The label {key}={value}: on Kubernetes both must begin and end with a letter or a digit."
    account = job.spec.get("serviceAccount")
    if account and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", account):
        yield f"serviceAccount {account}: expected one of Kubernetes', not Google's: leave it out, or name that."


def _notes(job: ResolvedJob) -> Iterator[str]:
    if job.name and _name(job) != job.name:
        yield f"It is called {_name(job)}: names on Kubernetes have no underscores or capitals."
    if any(not command(job, replica) for replica in job.replicas):
        yield "The image's own program runs."
    yield from left_out(
        job, SYSTEM,
        region="is where its cluster is", network="has its cluster's",
        scheduling__priority="takes a priorityClassName, which the cluster defines",
        scheduling__max_wait_time="waits for as long as it takes",
        use_chief_in_tf_config="always says chief in a TFJob", encryption_config="leaves that to its cluster",
        enable_web_access="has kubectl exec",
    )  # fmt: skip
    for role in ("master", "worker", "parameterServer", "evaluator"):
        if "diskConfig" in job.spec.get(f"{role}Config", {}):
            yield f"{role}Config.diskConfig is left out: {SYSTEM} has its nodes' disks."
