"""Overhead of hvd.DistributedOptimizer per step, compared with a raw DistributedDataParallel loop.

    python benchmarks/horovod_overhead.py --json benchmarks/results/horovod_overhead.json

Two ranks train over gloo, each a process with one torch thread and prepared batches. There are three models: the tiny MLP
of the other benchmarks, whose step is nearly all overhead; an MLP of 3.2 million parameters, whose gradients need two
buckets; and a small convolutional network. For each model the two loops take turns, both ranks of a loop together. The
ratios compare the wall time of a turn, and the processor time of both ranks with all their threads.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    CPU_STEP,
    QUICK_ROUNDS,
    WALL_STEP,
    arguments,
    interleave,
    machine,
    median,
    process_context,
    ratio,
    report,
)
from ddp_overhead import RANKS, Ranks
from ddp_variants import leave_group
from torch import nn

ROUNDS = 20
STEPS = {"tiny MLP": 400, "wide MLP": 40, "small CNN": 40}


def network(name: str) -> nn.Module:
    if name == "tiny MLP":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    if name == "wide MLP":
        return nn.Sequential(
            nn.Linear(32, 1024), nn.ReLU(), *itertools.chain(*((nn.Linear(1024, 1024), nn.ReLU()) for _ in range(3))),
            nn.Linear(1024, 10),
        )  # fmt: skip
    layers: list[nn.Module] = [
        nn.Unflatten(1, (2, 4, 4)),
        nn.Conv2d(2, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
    ]
    for _ in range(8):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class Ddp:
    """A raw DistributedDataParallel loop."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, batches: Any, directory: Path) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self._train(batches)
        leave_group()

    def _train(self, batches: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(network(self._name), broadcast_buffers=False)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches)


class Horovod:
    """The same loop with Horovod's calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, batches: Any, directory: Path) -> None:
        import footplate.compat.horovod as hvd

        hvd.init()
        model = network(self._name)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, optimizer, batches)
        hvd.shutdown()


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def measure(rounds: int, scale: float, quick: bool) -> dict[str, list[dict[str, float]]]:
    """Microseconds per step of each loop in each round: wall time, and processor time as the mean of the ranks."""
    results: dict[str, list[dict[str, float]]] = {}
    context = process_context(quick, "horovod_overhead", "torch.nn.parallel", "footplate.compat.horovod")
    for model, usual in STEPS.items():
        steps = max(5, int(usual * scale))
        turns = [steps] * (rounds + 1)
        loops: dict[str, Ranks] = {}
        for kind in (Ddp, Horovod):
            name = f"{model}, {kind.__name__}"
            loops[name] = Ranks(name, kind(model), turns, context)
            loops[name].begin_turn()  # to warm up
            loops[name].end_turn()

        def turn(name: str, loops: dict[str, Ranks] = loops, steps: int = steps) -> dict[str, float]:
            begun, ended = loops[name].begin_turn(), loops[name].end_turn()
            wall = max(clocks.wall for clocks in ended) - min(clocks.wall for clocks in begun)
            cpu = sum(after.cpu - before.cpu for before, after in zip(begun, ended, strict=True)) / RANKS
            return {"wall_us": wall / steps * 1e6, "cpu_us": cpu / steps * 1e6}

        results.update(interleave(list(loops), turn, rounds))
        for ranks in loops.values():
            ranks.begin_turn()
            ranks.join()
    return results


def main() -> None:
    options = arguments("Overhead of hvd.DistributedOptimizer per step")
    host = machine()
    rounds, scale = (QUICK_ROUNDS, 0.1) if options.quick else (ROUNDS, 1.0)
    results = measure(rounds, scale, options.quick)
    ratios = {
        f"{figure.removesuffix('_us')}_{model.replace(' ', '_').lower()}": ratio(
            results, f"{model}, Horovod", f"{model}, Ddp", figure, measure
        )
        for model in STEPS
        for figure, measure in (("wall_us", WALL_STEP), ("cpu_us", CPU_STEP))
    }
    rows = [
        {"name": name, "wall_us": median(runs, "wall_us"), "cpu_us": median(runs, "cpu_us"), "rounds": runs}
        for name, runs in results.items()
    ]
    columns = {"wall_us": "wall µs/step", "cpu_us": "CPU µs/step"}
    report(
        "horovod_overhead", f"{RANKS} ranks over gloo, medians of {rounds} rounds", columns,
        rows, ratios, {"steps": STEPS, "ranks": RANKS}, host, ("torch", "footplate", "rich"), options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
