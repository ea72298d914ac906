"""The Ray part of `launch.py`: time until workers in a cluster have met, Footplate beside Ray Train.

The cluster has two nodes, both on this machine. The driver is connected before the clock starts. In every round each
entrant runs the same work: form a gloo process group, do one all-reduce, return. The time is from the call to the end of
rank 0's all-reduce. All processes read the same machine's clock.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import MET, RETURNED, Figures, Ratio, interleave, ratio, row

OURS, THEIRS = "footplate on Ray", "Ray Train"


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """A cluster with this process connected: two nodes of three cores each, one core more than the workers take."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(worlds: Sequence[int], rounds: int, quick: bool) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    """Rows and ratios, for `launch.py`."""
    with ray_cluster():
        return compare(worlds, rounds)


def compare(worlds: Sequence[int], rounds: int) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    """Rows and ratios of both entrants on the cluster to which this process is connected."""
    runs = {OURS: _footplate, THEIRS: _ray_train}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    for world in worlds:
        results = interleave(list(runs), lambda name, world=world: runs[name](world), rounds)
        ratios[f"ray_vs_ray_train_{world}"] = ratio(results, OURS, THEIRS, "first_s", MET)
        ratios[f"ray_returned_vs_ray_train_{world}"] = ratio(results, OURS, THEIRS, "returned_s", RETURNED)
        rows += [row(f"{name}, {world} workers", figures) for name, figures in results.items()]
    return rows, ratios


def _footplate(world: int) -> Figures:
    from footplate.launch import launch
    from footplate.launch.backends import named

    def meet(file: str) -> None:
        import time

        import torch
        from torch import distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            with open(file, "w") as out:  # noqa: PTH123
                out.write(str(time.time()))
        dist.destroy_process_group()

    return _timed(lambda file: launch(meet, file, world_size=world, backend=named("ray")))


def _ray_train(world: int) -> Figures:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def meet(config: dict[str, str]) -> None:  # Ray Train has already made the process group
        import time

        import torch
        from torch import distributed as dist

        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            with open(config["file"], "w") as out:  # noqa: PTH123
                out.write(str(time.time()))

    def run(file: str) -> None:
        TorchTrainer(
            meet,
            train_loop_config={"file": file},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=world, use_gpu=False),
            run_config=RunConfig(storage_path=str(Path(file).parent)),
        ).fit()

    return _timed(run)


def _timed(run: Callable[[str], Any]) -> Figures:
    """Seconds until rank 0 had its sum, and until the call returned."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "first"
        begun = time.time()
        run(str(file))
        return {"first_s": float(file.read_text()) - begun, "returned_s": time.time() - begun}
