"""The Spark part of `launch.py`: time until two workers on executors have met, Footplate beside TorchDistributor.

One Spark session has two executors of one core (`local-cluster[2,1,1024]`). It has run a job before, so that no entrant's
time includes its start. In every round each entrant runs the same function with two workers: `init_process_group`, one
all-reduce, return. The time is from the call to the end of rank 0's all-reduce. All processes read the same machine's
clock. A further figure counts the calls that returned the value of another rank than rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from common import MET, RETURNED, Figures, Ratio, interleave, ratio, row

WORKERS = 2
STARTS = 3  # of TorchDistributor, at most
OURS, THEIRS, THEIRS_LOCAL = ("footplate on Spark", "TorchDistributor on Spark", "TorchDistributor in local mode")


@contextmanager
def spark_session() -> Iterator[Any]:
    """A session that has run a Python job on each executor."""
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master(f"local-cluster[{WORKERS},1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
    )
    session = builder.getOrCreate()
    try:
        while len(session.sparkContext.statusTracker().getExecutorInfos()) <= WORKERS:
            time.sleep(0.1)
        session.sparkContext.parallelize(range(WORKERS), WORKERS).barrier().mapPartitions(list).collect()
        yield session
    finally:
        session.stop()


def measure(worlds: Sequence[int], rounds: int, quick: bool) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    """Rows and ratios, for `launch.py`. The number of workers is the number of executors; `worlds` is ignored."""
    with spark_session():
        return compare(rounds, with_local_mode=not quick)


def compare(rounds: int, with_local_mode: bool) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    """Rows and ratios of the entrants on the session that runs."""
    runs = {OURS: _footplate, THEIRS: lambda: _torch_distributor(False)}
    if with_local_mode:
        runs[THEIRS_LOCAL] = lambda: _torch_distributor(True)
    results = interleave(list(runs), lambda name: runs[name](), rounds)
    rows = [
        row(f"{name}, {WORKERS} workers", figures) | {"not_rank_0": sum(run["rank"] != 0 for run in figures)}
        for name, figures in results.items()
    ]
    return rows, {
        "spark_vs_torch_distributor": ratio(results, OURS, THEIRS, "first_s", MET),
        "spark_returned_vs_torch_distributor": ratio(results, OURS, THEIRS, "returned_s", RETURNED),
    }


def _footplate() -> Figures:
    from footplate.launch import launch
    from footplate.launch.backends import named

    return _timed(lambda meet: launch(meet, world_size=WORKERS, backend=named("spark")))


def _torch_distributor(local_mode: bool) -> Figures:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=WORKERS, local_mode=local_mode, use_gpu=False)
    starts = 0
    while True:
        starts += 1
        try:
            return _timed(distributor.run)
        except Exception as error:
            # It looks for a free port, which another process may take before its rank 0 listens there.
            if starts == STARTS or "TorchDistributor failed during training" not in str(error):
                raise


def _timed(run: Callable[[Callable[[], Any]], Any]) -> Figures:
    """Seconds until rank 0 had its sum, seconds until the call returned, and the rank whose value was returned."""

    # A local function is pickled by value, which works for both entrants.
    def meet() -> dict[str, Any]:
        import time

        import torch
        from torch import distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        value = {"rank": dist.get_rank(), "at": time.time()}
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, value)
        dist.destroy_process_group()
        return {**value, "first": seen[0]["at"]}

    begun = time.time()
    value = run(meet)
    return {"first_s": value["first"] - begun, "returned_s": time.time() - begun, "rank": value["rank"]}
