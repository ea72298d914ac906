"""The first program in each replica on Vertex AI: it sets a job's variables, then becomes the job's program.

    python -m footplate_launch trainer.task --lr 0.1                       Google's image, which has installed this module
    python /gcs/BUCKET/…/launch.py PACKAGE… -- trainer.task --lr 0.1       a user's image: it also installs the packages

Vertex AI describes the cluster in CLUSTER_SPEC. The variables for torch and a trainer are derived from it, as on this
machine (`jobs/cluster_env.py`). Variables that are set already stay. The program uses the standard library only.
"""

import json
import os
import subprocess
import sys

ROLES = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}


def variables(spec):
    """Derive the variables of a replica from its CLUSTER_SPEC."""
    cluster, task = spec.get("cluster", {}), spec.get("task", {})
    pool, index = task.get("type", "workerpool0"), int(task.get("index", 0))
    named = {ROLES[name]: list(hosts) for name, hosts in cluster.items() if name in ROLES and name != "workerpool3"}
    environment = {
        "TF_CONFIG": json.dumps(
            {"cluster": named, "task": {"type": ROLES.get(pool, pool), "index": index}, "environment": "cloud"}
        )
    }
    masters, workers = cluster.get("workerpool0", []), cluster.get("workerpool1", [])
    if workers and pool in ("workerpool0", "workerpool1"):
        rank = index + (len(masters) if pool == "workerpool1" else 0)
        address, _, port = masters[0].rpartition(":")
        environment.update(
            RANK=str(rank), WORLD_SIZE=str(len(masters) + len(workers)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
            NODE_RANK=str(rank), GROUP_RANK=str(rank), MASTER_ADDR=address, MASTER_PORT=port,
        )  # fmt: skip
    return environment


def main(words):
    """Install the packages, and become the program."""
    packages = []
    if "--" in words and words[0].endswith((".whl", ".zip", ".tar.gz")):
        end = words.index("--")
        packages, words = words[:end], words[end + 1 :]
    if packages:
        subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages])
    spec = os.environ.get("CLUSTER_SPEC")
    for name, value in variables(json.loads(spec) if spec else {}).items():
        os.environ.setdefault(name, value)
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
