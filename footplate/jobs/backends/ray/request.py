"""What Ray is asked for, as plain values: the arguments of `JobSubmissionClient.submit_job`, and the driver's own task.

The task goes as a variable of the job's environment, where everybody who may see the cluster's dashboard can read it. So it
has no secrets: of the submitting shell's variables only those about how a program computes; of this machine's paths only
the directory of the submission and the job's, which the nodes may have, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.jobs.backends.ray import resources
from footplate.jobs.backends.ray.entrypoint import VARIABLE
from footplate.jobs.execution import BUCKETS, Execution
from footplate.jobs.supervision.exit_status import GRACE_S
from footplate.jobs.translate.common import no_tpus, no_tuning, refuse_if

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

STOP_S = 15.0  # that Ray gives the driver beyond the grace of its replicas
ENTRY_POINT = "exec python -P -m footplate.jobs.backends.ray.entrypoint"

_PREFIXES = (
    "GLOO_", "JAX_", "KMP_", "MKL_", "MLFLOW_", "NCCL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_", "XLA_",
)  # fmt: skip
_NAMES = {
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_REGION", "FOOTPLATE_SEED", "GOOGLE_CLOUD_PROJECT",
    "STORAGE_EMULATOR_HOST", "TZ",
}  # fmt: skip
_OF_MACHINES = ("_IFNAME", "_HCA")  # how its network is called


def refuse(resolved: ResolvedJob) -> None:
    """Raise if a job can't run on Ray.

    Raises:
        ConfigError: it has no name.
        Untranslatable: it has no module; it has TPUs; it is a tuning.
    """
    if resolved.name is None:
        raise ConfigError("a job needs a name.")
    problems = [*no_tuning(resolved), *no_tpus(resolved)]
    if not resolved.command:
        problems.append(
            "It has no module, and on Ray's nodes jobs run as Python packages: give --package-path and --module-name."
        )
    refuse_if("Ray", problems)


def notices(resolved: ResolvedJob, nodes: int) -> Iterator[str]:
    """What its nodes may not have: the image, the directory; each a sentence.

    Args:
        resolved: the job.
        nodes: how many there are.
    """
    if any(one.image_uri for one in resolved.replicas):
        yield "On Ray's nodes the package runs as it is, without the container image that the spec names."
    if resolved.job_dir and not resolved.job_dir.startswith(BUCKETS) and nodes > 1:
        yield (
            f"--job-dir {resolved.job_dir} is a path, and the Ray cluster has {nodes} nodes: let it be on storage that all "
            "of them share, or give gs:// or s3://. What a node alone has is lost with it."
        )


def submission(task: Mapping[str, Any], labels: Mapping[str, str], working_dir: str) -> dict[str, Any]:
    """The arguments of `submit_job`.

    Args:
        task: what `document` has made.
        labels: of the job.
        working_dir: the zip that is sent.
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
    job: str, attempt: int, plan: Execution, spec: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """What the driver is told of its attempt.

    Args:
        job: its id.
        attempt: which, from 1.
        plan: the job's.
        spec: the job as it was resolved.
        variables: that its processes get, as they were kept at submission.
    """
    return {
        "job": job,
        "attempt": attempt,
        "key": f"{job}-{attempt}",
        "plan": {**plan.to_dict(), "python": "", "library": "", "place": {}},  # of this machine
        "needs": [asdict(one) for one in resources.needs(spec["replicas"])],
        "variables": portable(variables),
        "grace_s": GRACE_S,
    }


def portable(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that mean the same on another machine.

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
