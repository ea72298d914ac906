"""`TF_CONFIG` and `CLUSTER_SPEC`: variables that tell a task its role, for TensorFlow and for Google's training jobs.

Rank 0 is the chief (`workerpool0`), the other ranks are workers (`workerpool1`). Each has an address of its own for its
TensorFlow server; torch doesn't use them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence


def environment(tasks: Sequence[str], rank: int) -> dict[str, str]:
    """Both variables for one rank; empty if the addresses of the tasks aren't known.

    >>> environment(["a:1", "b:2"], 1)["TF_CONFIG"]
    '{"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": 0}}'
    """
    if not tasks:
        return {}
    return {
        "TF_CONFIG": json.dumps(_description(tasks, rank, "chief", "worker")),
        "CLUSTER_SPEC": json.dumps(_description(tasks, rank, "workerpool0", "workerpool1")),
    }


def _description(tasks: Sequence[str], rank: int, first: str, rest: str) -> dict[str, object]:
    cluster = {first: [tasks[0]]}
    if len(tasks) > 1:
        cluster[rest] = list(tasks[1:])
    task = {"type": rest, "index": rank - 1} if rank else {"type": first, "index": 0}
    return {"cluster": cluster, "task": task}
