"""A real Ray cluster of several nodes, which are all on this machine. All launch tests share one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil

SMALL = {"object_store_memory": 80_000_000}
PROGRAM = """
from footplate.launch import launch
from footplate.launch.backends import named
import os
def work():
    print("hello")
    return int(os.environ["WORLD_SIZE"])
print("result", launch(work, world_size=2, backend=named("ray"), preload=()))
import ray
assert ray.is_initialized()
"""


# Ray without a worker for each core in advance, and without metrics. No test needs them.
LIGHT = {"prestart_worker_first_driver": False, "enable_metrics_collection": False}
# Nor are there monitors. A killed node counts as lost after 2.5 s, not after 15 s. A node that is only slow has 50 s for
# an answer, as usual.
HEAD = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "_system_config": {"health_check_period_ms": 500, **LIGHT},
}
V100 = {"accelerator_type:V100": 1}

_shared = contextlib.ExitStack()
_nodes: list[Any] = []


def ray_nodes() -> Any:
    """The cluster: two nodes with two cores each, the second with a V100. The first call starts it and connects to it."""
    if not _nodes:
        _nodes.append(_shared.enter_context(_start()))
    return _nodes[0]


def end_ray_nodes() -> None:
    """End the cluster, if it runs."""
    _nodes.clear()
    _shared.close()


@contextlib.contextmanager
def _start() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from footplate.launch.cluster.ray import RayPlacement

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **HEAD, **SMALL})
    try:
        nodes.second = nodes.add_node(num_cpus=2, resources=V100, **SMALL)
        nodes.wait_for_nodes(120)
        RayPlacement(address=nodes.address)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def is_rays(process: psutil.Process) -> bool:
    """Return True for Ray's own processes, but not for the fork servers and workers that its actors start."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return True
    return "-c" not in words and any(
        "/site-packages/ray/" in word or word.startswith(("ray::", "ray-")) for word in words
    )
