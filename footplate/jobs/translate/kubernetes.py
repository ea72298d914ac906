"""The parts that the translations for Kubernetes share: names, a program's command, nodes, and a job's pods in a JobSet.

The pods of a JobSet restart together. A failed pod fails its Job (`backoffLimit: 0`). The JobSet then deletes all pods
and creates them again, as Footplate restarts all processes of a job. So all pods are of the same attempt. JobSet writes
it into a label of each pod (`jobset.sigs.k8s.io/restart-attempt`). The label `jobset-uid` is the same in all attempts,
and no other job has it. A line of shell exports both as FOOTPLATE_JOB_ATTEMPT and FOOTPLATE_JOB_ID, so a trainer resumes.

The causes of failures count as in Footplate's own jobs (`jobs/supervision`):

    exit code 2                     a mistake: the JobSet fails
    the end of its running time     the JobSet fails
    another failure, a lost pod     a restart of all pods, up to `MAX_RESTARTS` times

Footplate counts failures and losses apart. JobSet has one number, so it is the larger one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from footplate.jobs.spec.resolving import ResolvedJob
from footplate.jobs.spec.scaling import Replica
from footplate.jobs.translate.common import UNNAMED, accelerator, command, gpus, left_out, machine_type, spoken

# The seconds from SIGTERM to SIGKILL, in which a trainer saves.
GRACE_S = 120
MAX_RESTARTS = 10
# Of 63 characters. A JobSet's controller appends a suffix for each pod.
MAX_JOBSET_NAME = 40
MASTER_PORT = 29500
_LABEL = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?")
# A narrower pattern than that of `process_env.py`: --pad-token and --max-tokens are no secrets.
_SECRET_OPTION = re.compile(
    r"_+(\w+_)?(password|passwd|secret|((secret|private|access|api)_?key))|_+((hf|api|auth|access|session|bearer)_?)?token",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")

RESTARTS: dict[str, Any] = {
    "maxRestarts": MAX_RESTARTS,
    # Without this, the pods of two attempts could write into one directory.
    "restartStrategy": "BlockingRecreate",
    "rules": [
        {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "outOfTime", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
    ],
}

JOB_VARIABLES = (
    'export FOOTPLATE_JOB_ID="jobset-${JOBSET_UID:?expected JobSet 0.9 or newer}" '
    'FOOTPLATE_JOB_ATTEMPT="$((JOBSET_RESTARTS + 1))"'
)


def name_of(job: ResolvedJob) -> str:
    """The job's name in the form that Kubernetes accepts."""
    return (job.name or UNNAMED).lower().replace("_", "-").rstrip("-")


def name_problems(job: ResolvedJob, longest: int) -> Iterator[str]:
    """The problem of a name that is too long for the names of pods."""
    name = name_of(job)
    if len(name) > longest:
        yield f"The name {name} has {len(name)} characters: at most {longest} leave room for its pods' names."


def name_notes(job: ResolvedJob) -> Iterator[str]:
    """The note about a name that Kubernetes doesn't accept as it is."""
    if job.name and name_of(job) != job.name:
        yield f"It is called {name_of(job)}: names on Kubernetes have no underscores or capitals."


def metadata(job: ResolvedJob) -> dict[str, Any]:
    """The name and labels of an object."""
    return {"name": name_of(job), **({"labels": dict(job.labels)} if job.labels else {})}


def problems(job: ResolvedJob) -> Iterator[str]:
    """The problems of a job on any Kubernetes: images, packages, labels and accounts."""
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


def words(job: ResolvedJob, replica: Replica) -> dict[str, list[str]]:
    """A container's command and arguments."""
    if replica.container_command or replica.container_args:
        parts = {"command": list(replica.container_command), "args": list(replica.container_args)}
    else:
        parts = {"command": list(job.command[:3]), "args": list(job.command[3:])}
    return {key: escaped(part) for key, part in parts.items() if part}


def escaped(arguments: list[str]) -> list[str]:
    """Arguments with `$(` escaped, since Kubernetes would read it as a variable."""
    return [argument.replace("$(", "$$(") for argument in arguments]


def node_selector(replica: Replica) -> dict[str, str]:
    """GKE's labels for the machine type and the GPUs of nodes."""
    kind = accelerator(replica)
    selector = {"node.kubernetes.io/instance-type": machine_type(replica)}
    if kind and kind.compute_engine:
        selector["cloud.google.com/gke-accelerator"] = kind.compute_engine
    return selector


def resources(replica: Replica) -> dict[str, Any]:
    """The GPUs of a container; empty without."""
    return {"limits": {"nvidia.com/gpu": gpus(replica)}} if gpus(replica) else {}


def jobset_problems(job: ResolvedJob) -> Iterator[str]:
    """The problems of a job whose pods need a command, a directory that outlasts them, and no secrets in public."""
    yield from name_problems(job, MAX_JOBSET_NAME)
    for replica in job.replicas:
        program = command(job, replica)
        if replica.image_uri and (not program or (replica.container_args and not replica.container_command)):
            yield "It needs a command to run in the image: give --module-name, or containerCommand."
            break
    if (job.job_dir or "").startswith("/") and ":" in (job.job_dir or ""):
        yield f"jobDir {job.job_dir}: a volume can't be mounted at a path with a colon."
    elif job.job_dir and not job.job_dir.startswith(("/", "gs://", "s3://")):
        yield f"jobDir {job.job_dir}: pods share no directory. Expected gs://…, s3://…, or the absolute path of a volume."
    for option in sorted({option for replica in job.replicas for option in _secret_options(command(job, replica))}):
        yield (
            f"The argument {option}: the manifest would show its value. Put it into the Secret {secret_name(job)}, whose "
            "keys become the pods' environment variables."
        )


def _secret_options(arguments: list[str]) -> Iterator[str]:
    """The options that carry a secret: `--hf-token VALUE`, `--api_key=VALUE`, or a URL with a password."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        name, equals, value = argument.partition("=")
        value = value if equals else "" if following.startswith("-") else following
        is_secret = _SECRET_OPTION.fullmatch(name.replace("-", "_")) is not None and value
        if name.startswith("-") and (is_secret or _URL_PASSWORD.search(value)):
            yield name


def secret_name(job: ResolvedJob) -> str:
    """The name of the Secret with the job's credentials."""
    return f"{name_of(job)}-secrets"


def jobset_notes(job: ResolvedJob) -> Iterator[str]:
    """Notes about the restarts, the Secret and the volume of a job's pods."""
    yield (
        f"Failures and lost pods restart all pods, up to {MAX_RESTARTS} times: JobSet counts them together. "
        "Exit code 2 isn't retried."
    )
    yield (
        f"Credentials are read from the Secret {secret_name(job)}, if it exists: "
        f"kubectl create secret generic {secret_name(job)} --from-literal=NAME=VALUE."
    )
    if job.job_dir and job.job_dir.startswith("/"):
        yield f"Create the PersistentVolumeClaim {name_of(job)} first. All pods mount it at {job.job_dir} and write to it."
    elif not job.job_dir:
        yield "There is no job directory: after a restart, the program finds only checkpoints that it keeps elsewhere."
    if len(job.replicas) > 1 and gpus(job.replicas[0]) > 1:
        yield "Each pod is one rank, and a rank of a Trainer on GPUs uses one of them: choose machines with one GPU."


def job_spec(job: ResolvedJob, replica: Replica, container: dict[str, Any]) -> dict[str, Any]:
    """A Job of a JobSet: the pods of a role, which run a container. `completions` isn't set."""
    name = container["name"]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    # The usual 64 MB are too small for the worker processes of a DataLoader.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.job_dir and job.job_dir.startswith("/"):
        mounts.append({"name": "job-dir", "mountPath": job.job_dir})
        volumes.append({"name": "job-dir", "persistentVolumeClaim": {"claimName": name_of(job)}})
    pod: dict[str, Any] = {
        # A policy for failed pods needs pods that aren't restarted in place.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": node_selector(replica),
        "containers": [
            {
                **container,
                "envFrom": [{"secretRef": {"name": secret_name(job), "optional": True}}],
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if job.spec.get("serviceAccount"):
        pod["serviceAccountName"] = job.spec["serviceAccount"]
    mistake = {"action": "FailJob", "onExitCodes": {"containerName": name, "operator": "In", "values": [2]}}
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": [mistake]}, "template": {"spec": pod}}


def job_variables(job: ResolvedJob) -> list[dict[str, Any]]:
    """The variables of a container that describe the job. `JOB_VARIABLES` reads the last two."""
    values = {"FOOTPLATE_JOB_NAME": job.name or UNNAMED, "FOOTPLATE_JOB_DIR": job.job_dir}
    labels = {"JOBSET_UID": "jobset-uid", "JOBSET_RESTARTS": "restart-attempt"}
    return [
        *({"name": key, "value": value.replace("$(", "$$(")} for key, value in values.items() if value),
        *(
            {
                "name": key,
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['jobset.sigs.k8s.io/{label}']"}},
            }
            for key, label in labels.items()
        ),
    ]


def world_variables(size: int, rank: str, node_rank: str, address: str, port: str) -> str:
    """A line of shell that exports torchrun's variables, for pods of one process each; empty for a single pod.

    Without the variables, a `Trainer(devices=4)` in a single pod starts its own processes.
    """
    if size == 1:
        return ""
    return (
        f' RANK="{rank}" NODE_RANK="{node_rank}" WORLD_SIZE={size} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1'
        f' MASTER_ADDR="{address}" MASTER_PORT="{port}"'
    )


def in_shell(job: ResolvedJob, replica: Replica, world: str) -> dict[str, list[str]]:
    """A container's command and arguments: a shell that exports variables, and then becomes the program.

    Args:
        job: the job.
        replica: the role's machines.
        world: the result of `world_variables`.
    """
    script = f'{JOB_VARIABLES}{world}; exec "$@"'
    return {"command": escaped(["sh", "-c", script, "task"]), "args": escaped(command(job, replica))}


def keys_left_out(job: ResolvedJob, system: str) -> Iterator[str]:
    """Notes about the keys that no object on Kubernetes has."""
    yield from left_out(
        job, system,
        region="is where its cluster is", network="has its cluster's",
        scheduling__priority="takes a priorityClassName, which the cluster defines",
        scheduling__max_wait_time="waits for as long as it takes",
        use_chief_in_tf_config="always says chief in a TFJob", encryption_config="leaves that to its cluster",
        enable_web_access="has kubectl exec",
    )  # fmt: skip
    for role in ("master", "worker", "parameterServer", "evaluator"):
        if "diskConfig" in job.spec.get(f"{role}Config", {}):
            yield f"{role}Config.diskConfig is left out: {system} has its nodes' disks."
