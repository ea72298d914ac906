"""Overhead of a data-parallel training loop per step, beside the training itself.

    python benchmarks/ddp_overhead.py --json benchmarks/results/ddp_overhead.json

Two ranks train the tiny MLP of `step_overhead.py` over gloo. Each rank is a process with one torch thread. As in
`step_overhead.py`, the loops take turns of a thousand steady steps, and their batch iterators begin and end the turns. Both
ranks of a loop have their turn together. The ratios compare the processor time of both ranks with all their threads,
without the time that a rank waits for the other. The table also shows the wall time of a turn, from the beginning of the
first rank to the end of the last rank.
"""

from __future__ import annotations

import itertools
import os
import socket
from multiprocessing.context import BaseContext

from common import (
    CPU_STEP,
    QUICK_ROUNDS,
    WALL_STEP,
    Figures,
    arguments,
    interleave,
    machine,
    median,
    process_context,
    ratio,
    report,
)
from ddp_variants import VARIANTS
from step_overhead import PRELOAD, Clocks, Runner
from step_variants import CHECKPOINT_EVERY, Loop

STEPS = 2 * CHECKPOINT_EVERY  # a turn; each has two checkpoints, in its middle
ROUNDS = 20
RANKS = 2
RAW = "raw DDP loop"


class Ranks:
    """The two processes of one loop. Neither can step without the other, so both must start before either is awaited."""

    def __init__(self, name: str, loop: Loop, turns: list[int], context: BaseContext) -> None:
        port = free_port()
        self._runners = [Runner(name, loop, turns, context, environment(rank, port)) for rank in range(RANKS)]

    def begin_turn(self) -> list[Clocks]:
        for runner in self._runners:
            runner.let_go()
        return [runner.receive() for runner in self._runners]

    def end_turn(self) -> list[Clocks]:
        return [runner.receive() for runner in self._runners]

    def join(self) -> None:
        for runner in self._runners:
            runner.join()


def environment(rank: int, port: int) -> dict[str, str]:
    """The variables of torchrun that these loops read."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark",
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(names: list[str], rounds: int, steps: int, quick: bool = False) -> dict[str, list[Figures]]:
    """Run the loops in turns. Return microseconds per step of each turn, with processor time as the mean of the ranks."""
    # The warm-up ends half-way between two checkpoints, so that no checkpoint falls between two turns.
    turns = [steps * 3 // 4, *[steps] * rounds]
    loops: dict[str, Ranks] = {}
    context = process_context(quick, *PRELOAD)
    for name in names:
        loops[name] = Ranks(name, VARIANTS[name], turns, context)
        loops[name].begin_turn()
        loops[name].end_turn()

    begun: dict[str, list[list[Clocks]]] = {name: [] for name in names}

    def turn(name: str) -> Figures:
        begun[name].append(loops[name].begin_turn())
        ended = max(clocks.wall for clocks in loops[name].end_turn())
        return {"wall_us": (ended - min(clocks.wall for clocks in begun[name][-1])) / steps * 1e6}

    results = interleave(names, turn, rounds)
    for name, ranks in loops.items():
        begun[name].append(ranks.begin_turn())
        for figures, (begins, ends) in zip(results[name], itertools.pairwise(begun[name]), strict=True):
            spent = sum(after.cpu - before.cpu for before, after in zip(begins, ends, strict=True))
            figures["cpu_us"] = spent / RANKS / steps * 1e6
        ranks.join()
    return results


def main() -> None:
    options = arguments("Overhead of a data-parallel training loop per step")
    os.environ.update(OMP_NUM_THREADS="1", TERM="xterm-256color", COLUMNS="120", LINES="24")
    host = machine()
    rounds, steps = (QUICK_ROUNDS, STEPS // 20) if options.quick else (ROUNDS, STEPS)
    results = measure(list(VARIANTS), rounds, steps, options.quick)

    ratios = {
        "footplate_vs_raw_ddp": ratio(results, "footplate bare", RAW, "cpu_us", CPU_STEP),
        "footplate_full_vs_raw_ddp": ratio(results, "footplate", RAW, "cpu_us", CPU_STEP),
        "lightning_vs_raw_ddp": ratio(results, "lightning bare", RAW, "cpu_us", CPU_STEP),
        "lightning_full_vs_raw_ddp": ratio(results, "lightning", RAW, "cpu_us", CPU_STEP),
        "lightning_vs_footplate": ratio(results, "lightning bare", "footplate bare", "cpu_us", CPU_STEP),
        "wall_footplate_vs_raw_ddp": ratio(results, "footplate bare", RAW, "wall_us", WALL_STEP),
        "wall_lightning_vs_raw_ddp": ratio(results, "lightning bare", RAW, "wall_us", WALL_STEP),
    }
    rows = [
        {
            "name": name,
            "cpu_us": median(runs, "cpu_us"),
            "least_cpu_us": min(run["cpu_us"] for run in runs),
            "vs_raw": ratio(results, name, RAW, "cpu_us", CPU_STEP)["median"],
            "wall_us": median(runs, "wall_us"),
            "wall_vs_raw": ratio(results, name, RAW, "wall_us", WALL_STEP)["median"],
            "rounds": runs,
        }
        for name, runs in results.items()
    ]
    columns = {
        "cpu_us": "CPU µs/step",
        "least_cpu_us": "least",
        "vs_raw": "× raw",
        "wall_us": "wall µs/step",
        "wall_vs_raw": "× raw",
    }
    clock = {"clock": "CPU time of a rank's process, all threads, mean of the ranks", "ranks": RANKS}
    report(
        "ddp_overhead", f"Tiny MLP, {RANKS} ranks, {steps} steps a turn, medians of {rounds} rounds", columns,
        rows, ratios, clock, host, ("torch", "footplate", "lightning", "rich"), options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
