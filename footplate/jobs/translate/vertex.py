"""Translate a job into a CustomJob of Vertex AI, AI Platform Training's successor.

The translation is the body of

    POST https://REGION-aiplatform.googleapis.com/v1/projects/PROJECT/locations/REGION/customJobs

The roles are positions in a list: pool 0 is the master, 1 the workers, 2 the parameter servers, 3 the evaluators. A missing
role leaves an empty pool, unless it is at the end. The program is either in the user's own image (`containerSpec`), or in
packages on Cloud Storage that an image of Google's installs (`pythonPackageSpec`): the named image, or that of the runtime
version, or the newest with PyTorch.

After a maintenance event the whole job starts again (`restartJobOnWorkerRestart`), as on AI Platform.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import ROLES, Replica
from footplate.jobs.translate.common import (
    UNNAMED,
    Translation,
    accelerator,
    left_out,
    machine_type,
    needs_program,
    no_tuning,
    refuse_if,
    spoken,
)

SYSTEM = "Vertex AI"
ACCELERATORS = {
    "NVIDIA_TESLA_K80", "NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100", "NVIDIA_TESLA_T4", "NVIDIA_L4",
    "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB", "NVIDIA_H200_141GB",
    "NVIDIA_B200", "TPU_V2", "TPU_V3",
}  # fmt: skip
"""Vertex AI's AcceleratorType, without TPUs that need a topology."""

IMAGES = {
    **{f"2.{minor}": f"2-{minor}" for minor in range(1, 10)},
    **{f"2.{minor}": f"2-{minor}.py310" for minor in range(11, 15)},
}
"""Runtime versions for which there was an image that installs packages, and its version as the image's name has it.

From the list of prebuilt containers for training, as of 2024. Some may be gone: Vertex AI ends each after two years or so.
"""

# The newest image with PyTorch on the same list.
NEWEST = "2-4.py310"
_BY_GOOGLE = re.compile(r"(us|europe|asia)-docker\.pkg\.dev/vertex-ai/training/.+")


def translate(job: ResolvedJob) -> Translation:
    """Make the body of a request that creates a CustomJob.

    Raises:
        Untranslatable: Vertex AI can't run it as it is.
    """
    refuse_if(SYSTEM, _problems(job))
    spec = job.spec
    by_role = {replica.role: replica for replica in job.replicas}
    pools = [_pool(job, by_role[role]) if role in by_role else {} for role in ROLES]
    while not pools[-1]:
        pools.pop()
    asked = {
        "workerPoolSpecs": pools,
        "scheduling": {"timeout": job.max_running_time, "restartJobOnWorkerRestart": True},
        "baseOutputDirectory": {"outputUriPrefix": job.job_dir} if job.job_dir else None,
        "network": spec.get("network"),
        "serviceAccount": spec.get("serviceAccount"),
        "enableWebAccess": spec.get("enableWebAccess"),
    }
    key = spec.get("encryptionConfig", {}).get("kmsKeyName")
    body = {
        "displayName": job.name or UNNAMED,
        "labels": job.labels or None,
        "jobSpec": _without_none(asked),
        "encryptionSpec": {"kmsKeyName": key} if key else None,
    }
    return Translation(_without_none(body), "json", tuple(_notes(job)))


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _pool(job: ResolvedJob, replica: Replica) -> dict[str, Any]:
    kind = accelerator(replica)
    attached = {"acceleratorType": kind.name, "acceleratorCount": replica.machine.count} if kind else {}
    disk = job.spec.get(_config_key(replica.role), {}).get("diskConfig")
    return {
        "machineSpec": {"machineType": machine_type(replica).replace("cloud_tpu", "cloud-tpu"), **attached},
        "replicaCount": str(replica.count),
        **({"diskSpec": dict(disk)} if disk else {}),
        **_program(job, replica),
    }


def _program(job: ResolvedJob, replica: Replica) -> dict[str, Any]:
    """`pythonPackageSpec` for Google's images that install packages, otherwise `containerSpec`."""
    if replica.image_uri is None or _installs(job, replica):
        # The command is `python -m MODULE ARGUMENTS`.
        module, args = job.command[2], list(job.command[3:])
        python = {
            "executorImageUri": replica.image_uri or _executor(job, replica),
            "packageUris": list(job.spec["packageUris"]),
            "pythonModule": module,
            "args": args or None,
        }
        return {"pythonPackageSpec": _without_none(python)}
    own, args = replica.container_command, replica.container_args
    words = own or args
    container = {
        "imageUri": replica.image_uri,
        "command": list(own if words else job.command[:3]) or None,
        "args": list(args if words else job.command[3:]) or None,
    }
    return {"containerSpec": _without_none(container)}


def _executor(job: ResolvedJob, replica: Replica) -> str:
    """Google's image that installs packages: for the runtime version, for CPU or GPU, from the region's continent."""
    continent = (job.region or "us").partition("-")[0]
    location = continent if continent in ("us", "europe", "asia") else "us"
    kind = "gpu" if accelerator(replica) else "cpu"
    framework, version = ("tf", IMAGES[_version(job)]) if _version(job) else ("pytorch", NEWEST)
    return f"{location}-docker.pkg.dev/vertex-ai/training/{framework}-{kind}.{version}:latest"


def _installs(job: ResolvedJob, replica: Replica) -> bool:
    """Return True if the named image is one of Google's, and has packages to install."""
    packages = job.command and job.spec.get("packageUris") and not (replica.container_command or replica.container_args)
    return bool(packages and replica.image_uri and _BY_GOOGLE.fullmatch(replica.image_uri))


def _version(job: ResolvedJob) -> str:
    return ".".join(job.spec.get("runtimeVersion", "").split(".")[:2])


def _config_key(role: str) -> str:
    return {"parameter_server": "parameterServer"}.get(role, role) + "Config"


def _problems(job: ResolvedJob) -> Iterator[str]:
    yield from no_tuning(job)
    yield from needs_program(job)
    for replica in job.replicas:
        kind = accelerator(replica)
        if kind and kind.name not in ACCELERATORS:
            yield f"The {spoken(replica.role)} has {kind.short}, which needs a topology, and a job's spec doesn't have one."
        elif kind and kind.kind == "tpu" and replica.image_uri is None:
            yield f"The {spoken(replica.role)} has {kind.short}, for which no image installs packages: give your own image."
    if job.command and any(replica.image_uri is None for replica in job.replicas):
        yield from _packages(job)
        if _version(job) and _version(job) not in IMAGES:
            yield (
                f"runtimeVersion {job.spec['runtimeVersion']}: no image of Google's is known that installs the "
                f"packages. Give one of {', '.join(IMAGES)}, or your own image with --master-image-uri."
            )
    if job.job_dir and not job.job_dir.startswith("gs://"):
        yield f"jobDir {job.job_dir}: expected gs://bucket/path."


def _packages(job: ResolvedJob) -> Iterator[str]:
    uris = job.spec.get("packageUris", [])
    if not uris:
        yield (
            "There is no package: Vertex AI installs those on Cloud Storage. Build one (python -m build --sdist), copy it "
            "to gs://, and name it with --packages."
        )
    for uri in uris:
        if not uri.startswith("gs://"):
            yield f"packageUris {uri}: expected gs://bucket/path."


def _notes(job: ResolvedJob) -> Iterator[str]:
    region = job.region or "REGION"
    yield f"POST it to https://{region}-aiplatform.googleapis.com/v1/projects/PROJECT/locations/{region}/customJobs."
    if job.command and not _version(job) and any(replica.image_uri is None for replica in job.replicas):
        yield (
            f"There is no runtimeVersion: Google's image with PyTorch {NEWEST.partition('.')[0].replace('-', '.')} runs "
            "it. Name another with --master-image-uri."
        )
    yield from left_out(
        job, SYSTEM,
        scheduling__priority="has no priorities",
        scheduling__max_wait_time="waits for machines only where they are scheduled flexibly",
        use_chief_in_tf_config="always says chief",
        python_version="has the image's",
    )  # fmt: skip
    if any("tpuTfVersion" in job.spec.get(_config_key(role), {}) for role in ROLES):
        yield f"tpuTfVersion is left out: {SYSTEM} has the image's."
