"""A real Ray cluster of several nodes, which are all on this machine."""

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
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("hello")
    return dist.get_world_size()
print("result", launch(work, world_size=2, backend=named("ray")))
import ray
assert ray.is_initialized()
"""


@contextlib.contextmanager
def ray_nodes(num_cpus: int, **second: Any) -> Iterator[Any]:
    """Start the head and a second node with this number of cores each, and connect this process to them."""
    import ray
    from ray.cluster_utils import Cluster

    from footplate.launch.cluster.ray import RayPlacement

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, **SMALL})
    try:
        nodes.second = nodes.add_node(num_cpus=num_cpus, **second, **SMALL)
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
