"""The request to Ray, as plain values: the arguments of `JobSubmissionClient.submit_job`, and the entry point's task.

The task is a variable of the job's environment, which everybody with access to the cluster's dashboard can read. So it
contains no secrets. Of the submitting shell's variables it has only those that affect computation. Of this machine's paths
it has only the directory of the submission and the job's directory, which the nodes may have, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from footplate.jobs.backends.ray import resources
from footplate.jobs.backends.ray.entrypoint import VARIABLE
from footplate.jobs.execution import BUCKETS, Execution
from footplate.jobs.supervision.exit_status import GRACE_S
from footplate.jobs.translate.common import without_image

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

# The time that Ray gives the entry point beyond the grace period of its replicas.
STOP_S = 15.0
ENTRY_POINT = "exec python -P -m footplate.jobs.backends.ray.entrypoint"

_PREFIXES = (
    "GLOO_", "JAX_", "KMP_", "MKL_", "MLFLOW_", "NCCL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_", "XLA_",
)  # fmt: skip
_NAMES = {
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_REGION", "FOOTPLATE_SEED", "GOOGLE_CLOUD_PROJECT",
    "STORAGE_EMULATOR_HOST", "TZ",
}  # fmt: skip
# Names of this machine's network interfaces.
_OF_MACHINES = ("_IFNAME", "_HCA")


def notices(resolved: ResolvedJob, nodes: int) -> Iterator[str]:
    """Notices about things that the nodes may lack, the image and the job directory; one sentence each.

    Args:
        resolved: the job.
        nodes: the number of nodes.
    """
    yield from without_image(resolved, "Ray")
    if resolved.job_dir and not resolved.job_dir.startswith(BUCKETS) and nodes > 1:
        yield (
            f"--job-dir {resolved.job_dir} is a path, and the Ray cluster has {nodes} nodes. Use storage that all of them "
            "share, or gs://, s3:// or abfss://. Files that only one node has are lost with it."
        )


def submission(task: Mapping[str, Any], labels: Mapping[str, str], working_dir: str) -> dict[str, Any]:
    """The arguments of `submit_job`.

    Args:
        task: from `document`.
        labels: the job's labels.
        working_dir: the zip to send.
    """
    return {
        "submission_id": task["key"],
        "entrypoint": ENTRY_POINT,
        "runtime_env": {
            "working_dir": working_dir,
            "env_vars": {
                VARIABLE: json.dumps(task, sort_keys=True),
                "RAY_JOB_STOP_WAIT_TIME_S": str(round(task["grace_s"] + STOP_S)),
            },
        },
        "metadata": {"footplate_job": task["job"], **labels},
    }


def document(
    job: str, attempt: int, execution: Execution, spec: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """The entry point's task.

    Args:
        job: the job's id.
        attempt: the attempt's number, from 1.
        execution: what the attempt runs.
        spec: the resolved job.
        variables: the variables of its processes, as they were kept at the submission.
    """
    return {
        "job": job,
        "attempt": attempt,
        "key": f"{job}-{attempt}",
        # Without the paths of this machine.
        "plan": {**execution.to_dict(), "python": "", "library": "", "place": {}},
        "needs": [asdict(need) for need in resources.needs(spec["replicas"])],
        "variables": portable(variables),
        "grace_s": GRACE_S,
    }


def portable(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that have the same meaning on another machine.

    >>> portable({"PATH": "/bin", "OMP_NUM_THREADS": "2", "TORCH_HOME": "/home/me/torch", "NCCL_SOCKET_IFNAME": "eth1"})
    {'OMP_NUM_THREADS': '2'}
    """
    return {
        name: value
        for name, value in variables.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and not name.endswith(_OF_MACHINES)
        and not value.startswith(("/", "~"))
    }
