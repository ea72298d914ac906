"""Checks of translated documents against the published definition of each system, as far as it is available offline.

- Vertex AI: the fields and enumerations of its own client library, copied into vertex_custom_job.json.
- Ray: its own classes for a job submission and a runtime environment.
- Kubeflow: the fields of PyTorchJob and TFJob (`kubeflow.org/v1`) that are used, from the training operator's reference.
- Slurm: bash runs the script, with stand-ins for `scontrol` and `srun`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

SCHEMA = json.loads((Path(__file__).parent / "vertex_custom_job.json").read_text())
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
            for one in item:
                _check_value(one, kind[0])
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
    for one in replicas.values():
        _check_fields(one, REPLICA)
        (runs,) = one["template"]["spec"]["containers"]
        _check_fields(runs, CONTAINER)
        assert runs["name"] == container
        assert all(re.fullmatch(LABEL, value) for value in one["template"]["spec"]["nodeSelector"].values())


def _check_fields(value: dict[str, Any], fields: dict[str, Any]) -> None:
    for key, item in value.items():
        assert key in fields, key
        if isinstance(fields[key], dict):
            _check_fields(item, fields[key])
        elif fields[key] is not None:
            assert type(item) is fields[key]


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
