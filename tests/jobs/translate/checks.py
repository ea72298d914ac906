"""Checks of translated documents against the published definition of each system, as far as it is available offline.

- Vertex AI: the fields and enumerations of its own client library, copied into vertex_custom_job.json.
- Ray: its own classes for a job submission and a runtime environment.
- Kubeflow: the fields of PyTorchJob and TFJob (`kubeflow.org/v1`) that are used, from the training operator's reference.
- Kubeflow Trainer and JobSet: JSON schemas of the fields, types and required fields of their own Python models, in
  kubernetes.json; their enumerations, and the rules between fields, by hand.
- Slurm: bash runs the script, with stand-ins for `scontrol` and `srun`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA = json.loads((Path(__file__).parent / "vertex_custom_job.json").read_text())
KUBERNETES = json.loads((Path(__file__).parent / "kubernetes.json").read_text())
DNS = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
LABEL = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"


def check_vertex(document: dict[str, Any]) -> None:
    _check_message(document, "CustomJob")
    pools = document["jobSpec"]["workerPoolSpecs"]
    assert pools[0]["replicaCount"] == "1"
    assert 1 <= len(pools) <= 4
    for pool in filter(None, pools):
        assert ("containerSpec" in pool) != ("pythonPackageSpec" in pool)
        assert re.fullmatch(r"[a-z0-9-]+", pool["machineSpec"]["machineType"])


def _check_message(value: dict[str, Any], name: str) -> None:
    fields = SCHEMA["messages"][name]
    for key, item in value.items():
        assert key in fields, f"{name} has no field {key}"
        kind = fields[key]
        if isinstance(kind, list):
            assert isinstance(item, list)
            for element in item:
                _check_value(element, kind[0])
        elif isinstance(kind, dict):
            assert all(isinstance(text, str) for pair in item.items() for text in pair)
        else:
            _check_value(item, kind)


def _check_value(item: Any, kind: str) -> None:
    if kind in SCHEMA["messages"]:
        _check_message(item, kind)
    elif kind in SCHEMA["enums"]:
        assert item in SCHEMA["enums"][kind]
    elif kind == "google.protobuf.Duration":
        assert re.fullmatch(r"\d+(\.\d{1,9})?s", item)
    elif kind == "int64":
        assert item.isdigit()
    else:
        assert type(item) is {"string": str, "bool": bool, "int32": int}[kind]


def check_ray(document: dict[str, Any]) -> None:
    from ray.dashboard.modules.job.common import JobSubmitRequest, validate_request_type
    from ray.runtime_env import RuntimeEnv

    validate_request_type(json.loads(json.dumps(document)), JobSubmitRequest)
    RuntimeEnv(**{key: value for key, value in document["runtime_env"].items() if key != "py_modules"})
    if "image_uri" in document["runtime_env"]:
        assert len(document["runtime_env"]) == 1  # Ray accepts an image only without other fields
    assert shlex.split(document["entrypoint"])


KUBEFLOW: dict[str, Any] = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "labels": None},
    "spec": {
        "runPolicy": {"activeDeadlineSeconds": int, "cleanPodPolicy": str},
        "pytorchReplicaSpecs": None, "tfReplicaSpecs": None,
    },
}  # fmt: skip
REPLICA: dict[str, Any] = {
    "replicas": int, "restartPolicy": str,
    "template": {"spec": {"nodeSelector": None, "containers": None, "serviceAccountName": str}},
}  # fmt: skip
CONTAINER: dict[str, Any] = {"name": str, "image": str, "command": list, "args": list, "resources": None}
ROLES = {
    "PyTorchJob": ("pytorch", {"Master", "Worker"}),
    "TFJob": ("tensorflow", {"Chief", "Worker", "PS", "Evaluator"}),
}


def check_kubeflow(document: dict[str, Any]) -> None:
    _check_fields(document, KUBEFLOW)
    container, roles = ROLES[document["kind"]]
    assert re.fullmatch(DNS, document["metadata"]["name"])
    assert all(re.fullmatch(LABEL, text) for pair in document["metadata"].get("labels", {}).items() for text in pair)
    replicas = document["spec"]["pytorchReplicaSpecs" if container == "pytorch" else "tfReplicaSpecs"]
    assert set(replicas) <= roles
    for replica in replicas.values():
        _check_fields(replica, REPLICA)
        (runs,) = replica["template"]["spec"]["containers"]
        _check_fields(runs, CONTAINER)
        assert runs["name"] == container
        assert all(re.fullmatch(LABEL, value) for value in replica["template"]["spec"]["nodeSelector"].values())


def _check_fields(value: dict[str, Any], fields: dict[str, Any]) -> None:
    for key, item in value.items():
        assert key in fields, key
        if isinstance(fields[key], dict):
            _check_fields(item, fields[key])
        elif fields[key] is not None:
            assert type(item) is fields[key]


ACTIONS = {
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts",
}  # fmt: skip
JOB_FAILURES = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}
# Kubeflow Trainer sets them, and refuses a TrainJob that does.
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}


def check_jobset(document: dict[str, Any]) -> None:
    _check_object(document, "JobSet")
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    jobs = [(job["name"], job["template"]["spec"]) for job in document["spec"]["replicatedJobs"]]
    assert set(document["spec"]["successPolicy"]["targetReplicatedJobs"]) <= {name for name, _ in jobs}
    _check_restarts(document["spec"]["failurePolicy"])
    for name, spec in jobs:
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"] >= 1
        container = _check_job(spec)
        assert container["command"][:2] == ["sh", "-c"]
        # The controller's limit: JobSet, role, index of the Job, index of the pod, and five random letters.
        assert len(f"{document['metadata']['name']}-{name}-0-{spec['completions'] - 1}-12345") <= 63


def check_trainjob(document: dict[str, Any]) -> None:
    assert (document["apiVersion"], document["kind"]) == ("v1", "List")
    runtime, train_job = document["items"]
    _check_object(runtime, "TrainingRuntime")
    _check_object(train_job, "TrainJob")
    assert runtime["apiVersion"] == train_job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert train_job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    template = runtime["spec"]["template"]["spec"]
    (pods,) = template["replicatedJobs"]
    assert pods["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    _check_restarts(template["failurePolicy"])
    container = _check_job(pods["template"]["spec"])
    assert container["name"] == pods["name"] == "node"
    assert not RESERVED & {variable["name"] for variable in container["env"]}
    assert train_job["spec"]["trainer"]["command"][:2] == ["sh", "-c"]
    assert train_job["spec"]["trainer"]["numNodes"] >= 1
    assert len(f"{train_job['metadata']['name']}-node-0-{train_job['spec']['trainer']['numNodes'] - 1}-12345") <= 63


def _check_object(document: dict[str, Any], kind: str) -> None:
    assert document["kind"] == kind
    jsonschema.validate(document, {"$ref": f"#/$defs/{KUBERNETES['kinds'][kind]}", "$defs": KUBERNETES["$defs"]})
    assert re.fullmatch(DNS, document["metadata"]["name"])
    for pair in document["metadata"].get("labels", {}).items():
        assert all(re.fullmatch(LABEL, text.removeprefix("trainer.kubeflow.org/")) for text in pair)


def _check_restarts(policy: dict[str, Any]) -> None:
    assert policy["restartStrategy"] in {"Recreate", "BlockingRecreate", "InPlaceRestart"}
    for rule in policy["rules"]:
        assert rule["action"] in ACTIONS
        assert set(rule["onJobFailureReasons"]) <= JOB_FAILURES
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])


def _check_job(spec: dict[str, Any]) -> dict[str, Any]:
    """Check the parts of a Job that belong together. Returns its container."""
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in {"FailJob", "FailIndex", "Ignore", "Count"}
        assert rule["onExitCodes"]["operator"] in {"In", "NotIn"}
        assert rule["onExitCodes"]["containerName"] == container["name"]
    # Kubernetes refuses a policy for failed pods otherwise.
    assert pod["restartPolicy"] == "Never"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(re.fullmatch(r"/[^:]*", mount["mountPath"]) for mount in container["volumeMounts"])
    assert all(re.fullmatch(LABEL, value) for value in pod["nodeSelector"].values())
    return container


def run_pod(
    command: list[str],
    args: list[str],
    variables: list[dict[str, Any]],
    labels: dict[str, str],
    directory: Path,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run a container's command as a kubelet would, with its variables from values and from the pod's labels.

    Args:
        command: the container's.
        args: the container's.
        variables: the container's `env`.
        labels: the pod's.
        directory: where it runs.
        environ: variables that a controller adds.
    """  # fmt: skip
    environ = {"PATH": os.environ["PATH"], **environ}
    for variable in variables:
        if "value" in variable:
            environ[variable["name"]] = _expanded(variable["value"])
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            environ[variable["name"]] = labels.get(path.removeprefix("metadata.labels['").removesuffix("']"), "")
    words = [_expanded(word) for word in (*command, *args)]
    return subprocess.run(words, env=environ, cwd=directory, capture_output=True, text=True)


def _expanded(text: str) -> str:
    """A text as Kubernetes passes it on: `$$` is a dollar. A variable in it would be an injection."""
    assert "$(" not in text.replace("$$", "")
    return text.replace("$$(", "$(")


STAND_INS = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=1 SLURM_NODEID=1 SLURM_LOCALID=0 exec "$@"',
}
SHOWS = """
for name in RANK WORLD_SIZE NODE_RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FOOTPLATE_JOB_DIR; do
  printf '%s\\0' "${!name-}"
done
for word in "$@"; do printf '%s\\0' "$word"; done
"""


def run_slurm(script: str, directory: Path) -> tuple[list[str], list[str]]:
    """Run an sbatch script as the second of two nodes. Return the variables that its program sees, and its arguments.

    The program must be called `python`.
    """
    path = directory / "bin"
    path.mkdir(exist_ok=True)
    for name, text in {**STAND_INS, "python": SHOWS}.items():
        (path / name).write_text(f"#!/bin/bash\n{text}\n")
        (path / name).chmod(0o755)
    environ = {
        "PATH": f"{path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
    }
    done = subprocess.run(["bash"], input=script.encode(), env=environ, capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    return words[:8], words[8:]
