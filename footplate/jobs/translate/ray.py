"""Translate a job into a job submission of Ray.

The result is the body of `POST /api/jobs/`, and the arguments of `JobSubmissionClient.submit_job`.

A master without workers is the submission's entry point, with the resources of its machine. A master with workers is
`footplate run --backend ray`, which places one process for each of them on the cluster, with its GPUs as accelerator
resources. Ray runs an entry point in a shell, so it is quoted.

The submission doesn't need Footplate's jobs. `jobs submit --backend ray` (`jobs/backends/ray/`) does more: it runs every
role, supervises the job, and resumes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from footplate.catalog.rows import catalog
from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.translate.common import (
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

SYSTEM = "Ray"
KINDS = {
    "NVIDIA_TESLA_K80": "K80", "NVIDIA_TESLA_P4": "P4", "NVIDIA_TESLA_P100": "P100", "NVIDIA_TESLA_V100": "V100",
    "NVIDIA_TESLA_T4": "T4", "NVIDIA_L4": "L4", "NVIDIA_TESLA_A100": "A100", "NVIDIA_A100_80GB": "A100",
    "NVIDIA_H100_80GB": "H100", "NVIDIA_H100_MEGA_80GB": "H100", "NVIDIA_H200_141GB": "H200", "NVIDIA_B200": "B200",
}  # fmt: skip
"""The accelerator's name on a Ray node: from `ray.util.accelerators`, or the model in the name from NVIDIA's driver."""

# The amount of a node's resource `accelerator_type:…` to request, as Ray itself does.
SHARE = 0.001


def translate(job: ResolvedJob) -> Translation:
    """Make the body of a job submission.

    Raises:
        Untranslatable: Ray can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    body: dict[str, Any] = {"entrypoint": shlex.join(_entrypoint(job)), "runtime_env": _runtime_env(job)}
    if job.name:
        body["submission_id"] = job.name
    if job.labels:
        body["metadata"] = dict(job.labels)
    if len(job.replicas) == 1:
        body |= _resources(job)
    return Translation(body, "json", tuple(_notes(job)))


def _entrypoint(job: ResolvedJob) -> list[str]:
    world = sum(replica.count for replica in job.replicas)
    if world == 1:
        return command(job, job.replicas[0])
    module, args = job.command[2], job.command[3:]
    return ["footplate", "run", "--backend", "ray", "--np", str(world), "-m", module, *(["--", *args] if args else [])]


def _resources(job: ResolvedJob) -> dict[str, Any]:
    (replica,) = job.replicas
    machine, kind = catalog().machines[replica.machine.machine], accelerator(replica)
    resources: dict[str, Any] = {"entrypoint_num_cpus": machine.vcpus, "entrypoint_num_gpus": gpus(replica) or None}
    if machine.memory_gb is not None:
        resources["entrypoint_memory"] = int(machine.memory_gb * 2**30)
    if kind:
        resources["entrypoint_resources"] = {f"accelerator_type:{KINDS[kind.name]}": SHARE}
    return {key: value for key, value in resources.items() if value is not None}


def _runtime_env(job: ResolvedJob) -> dict[str, Any]:
    image = job.replicas[0].image_uri
    environment: dict[str, Any] = {"image_uri": image} if image else {}
    uris = job.spec.get("packageUris")
    if uris:
        environment["py_modules"] = list(uris)
    return environment


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from needs_program(job)
    yield from no_tpus(job)
    yield from no_servers(job, "it places ranks. footplate jobs submit --backend ray places every role.")
    yield from no_entry_points(job)
    yield from one_kind_of_machine(job)
    (replica, *others), uris = job.replicas, job.spec.get("packageUris", [])
    if others and (replica.container_command or not job.command):
        yield "Several machines run a Python module: give --module-name, and leave out containerCommand and containerArgs."
    if replica.image_uri and uris:
        yield "packageUris: in an image Ray installs nothing. Build them into it."
    for uri in uris:
        if not uri.startswith(("gs://", "s3://")) or uri.endswith(".tar.gz"):
            yield f"packageUris {uri}: expected a .whl or a .zip at gs:// or s3://, which every node can fetch."


def _notes(job: ResolvedJob) -> Iterator[str]:
    if not job.spec.get("packageUris") and job.command and job.replicas[0].image_uri is None:
        yield 'The program itself: put "working_dir" with its parent directory into runtime_env, or give ray --working-dir.'
    if len(job.replicas) > 1 and gpus(job.replicas[0]):
        kind = accelerator(job.replicas[0])
        yield (
            f"Each process gets one device of its node, and Ray chooses the nodes: let the cluster's be of "
            f"{gpus(job.replicas[0])} {kind.short if kind else ''} each."
        )
    if job.max_running_time:
        yield f"It may run for {job.max_running_time}, which Ray doesn't enforce: stop it with ray job stop."
    yield from left_out(
        job, SYSTEM,
        region="is where its cluster is",
        scheduling__priority="has no priorities",
        scheduling__max_wait_time="waits for as long as it takes",
        runtime_version="has its nodes' packages", python_version="has its nodes' Python", network="has its cluster's",
        service_account="has its nodes'", encryption_config="keeps nothing itself",
        use_chief_in_tf_config="always says chief",
    )  # fmt: skip
