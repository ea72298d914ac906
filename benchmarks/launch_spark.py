"""How long until two workers on Spark executors have met: Footplate beside TorchDistributor.

    python benchmarks/launch_spark.py --json benchmarks/results/launch_spark.json

One Spark session with two executors of one core (`local-cluster[2,1,1024]`), which has run a job before, so that its own
start is in nobody's time. In every round each entrant runs the same function with two workers: `init_process_group`, one
all-reduce, home. The time is from the call to the end of rank 0's all-reduce, read from the machine's clock, as all
processes are here. Beside it stands how often the value that came home was not rank 0's.

`launch.py` takes `measure` for its part on Spark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common import Figures, arguments, interleave, machine, median, ratio, report

WORKERS = 2
ROUNDS = 5
OURS, THEIRS, THEIRS_LOCAL = "footplate on Spark", "TorchDistributor on Spark", "TorchDistributor in local mode"


@contextmanager
def spark_session() -> Iterator[Any]:
    """A session that has run a Python job on each executor."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(f"local-cluster[{WORKERS},1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        while len(session.sparkContext.statusTracker().getExecutorInfos()) <= WORKERS:
            time.sleep(0.1)
        session.sparkContext.parallelize(range(WORKERS), WORKERS).barrier().mapPartitions(list).collect()
        yield session
    finally:
        session.stop()


def measure(rounds: int, local_mode: bool = True) -> tuple[list[dict[str, Any]], dict[str, Figures]]:
    """Rows and ratios, as `launch.py` has them; with TorchDistributor's local mode or without."""
    runs = {OURS: _footplate, THEIRS: lambda: _torch_distributor(False)}
    if local_mode:
        runs[THEIRS_LOCAL] = lambda: _torch_distributor(True)
    with spark_session():
        found = interleave(list(runs), lambda name: runs[name](), rounds)
    rows = [
        {
            "name": f"{name}, {WORKERS} workers",
            "warm_s": median(figures, "warm_s"),
            "returned_s": median(figures, "returned_s"),
            "not_rank_0": sum(one["rank"] != 0 for one in figures),
            "rounds": figures,
        }
        for name, figures in found.items()
    ]
    return rows, {
        "spark_vs_torch_distributor": ratio(found, OURS, THEIRS, "warm_s"),
        "spark_returned_vs_torch_distributor": ratio(found, OURS, THEIRS, "returned_s"),
    }


def _footplate() -> Figures:
    from footplate.launch import launch
    from footplate.launch.backends import named

    return _timed(lambda meet: launch(meet, world_size=WORKERS, backend=named("spark")))


def _torch_distributor(local_mode: bool) -> Figures:
    from pyspark.ml.torch.distributor import TorchDistributor

    return _timed(TorchDistributor(num_processes=WORKERS, local_mode=local_mode, use_gpu=False).run)


def _timed(run: Callable[[Callable[[], Any]], Any]) -> Figures:
    """Seconds until rank 0 had its sum, until the call returned, and the rank whose value came home."""

    def meet() -> dict[str, Any]:  # of this function, not of this file: it travels by value, which suits both entrants
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
    return {"warm_s": value["first"] - begun, "returned_s": time.time() - begun, "rank": value["rank"]}


def main() -> None:
    options = arguments("How long until two workers on Spark executors have met")
    os.environ.update(OMP_NUM_THREADS="1")
    here = machine()
    rounds = 2 if options.quick else ROUNDS
    rows, ratios = measure(rounds, local_mode=not options.quick)
    columns = {"warm_s": "s to the first all-reduce", "returned_s": "s in all", "not_rank_0": "values not of rank 0"}
    report(
        "launch_spark", f"{WORKERS} workers on Spark, medians of {rounds} rounds", columns, rows, ratios,
        {"workers": WORKERS}, here, ("torch", "footplate", "pyspark"), options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
