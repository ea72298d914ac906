"""Translate a job into a JobSet (`jobset.x-k8s.io/v1alpha2`), for `kubectl apply -f`.

Master and workers are one group of pods each, of their own machines and images. The master is rank 0, and the pods of the
workers are ranks 1, 2, …, by their completion index. The JobSet is complete when the master is; workers then get SIGTERM.
Restarts, credentials and volumes are as `kubernetes.py` describes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from footplate.jobs.spec import naming
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import Replica
from footplate.jobs.translate import kubernetes
from footplate.jobs.translate.common import Translation, no_servers, no_tpus, no_tuning, refuse_if

SYSTEM = "JobSet"


def translate(job: ResolvedJob) -> Translation:
    """Make a JobSet.

    Raises:
        Untranslatable: a JobSet can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "network": {"enableDNSHostnames": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["master"]},
            "failurePolicy": kubernetes.RESTARTS,
            "replicatedJobs": [
                {"name": replica.role, "replicas": 1, "template": {"spec": _job(job, replica)}}
                for replica in job.replicas
            ],
        },
    }
    return Translation(document, "yaml", tuple(_notes(job)))


def _job(job: ResolvedJob, replica: Replica) -> dict[str, Any]:
    name = kubernetes.name_of(job)
    index = "$JOB_COMPLETION_INDEX"
    rank = index if replica.role == "master" else f"$(({index.removeprefix('$')} + 1))"
    world = kubernetes.world_variables(
        sum(each.count for each in job.replicas), rank, rank, f"{name}-master-0-0.{name}", str(kubernetes.MASTER_PORT)
    )
    container: dict[str, Any] = {
        "name": "node",
        "image": replica.image_uri,
        **kubernetes.in_shell(job, replica, world),
        "env": kubernetes.job_variables(job),
    }
    if resources := kubernetes.resources(replica):
        container["resources"] = resources
    return {
        "activeDeadlineSeconds": max(1, round(naming.seconds(job.max_running_time))),
        "completionMode": "Indexed",
        "completions": replica.count,
        "parallelism": replica.count,
        **kubernetes.job_spec(job, replica, container),
    }


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from no_tpus(job)
    yield from no_servers(job, "its pods are ranks. --to kubeflow makes a TFJob.")
    yield from kubernetes.jobset_problems(job)
    yield from kubernetes.problems(job)


def _notes(job: ResolvedJob) -> Iterator[str]:
    yield from kubernetes.name_notes(job)
    yield from kubernetes.jobset_notes(job)
    yield f"It may run for {job.max_running_time}, counted from the last restart: a JobSet has no limit for all attempts."
    yield from kubernetes.keys_left_out(job, SYSTEM)
