"""Overhead of a training loop per step, beside the training itself.

    python benchmarks/step_overhead.py --json benchmarks/results/step_overhead.json

A tiny MLP (32-64-10), AdamW, batches of 32 that are ready, one torch thread. Every loop trains in its own process, on its
own terminal. The batch iterator, which all loops call, stops and resumes a loop. So the loops take turns of a thousand
steps, and only steady steps are timed, without start and end.

The ratios compare CPU time of the training process with all its threads, from the beginning of one turn to the beginning of
the next. This includes what a thread writes in the background later. The table also shows the wall time of the turns, and
the CPU time of child processes. That is an upper bound: it includes the idle polling of Footplate's MLflow uploader while
the other loops have their turns.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pty
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil
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
from step_variants import CHECKPOINT_EVERY, VARIANTS, Loop

STEPS = 2 * CHECKPOINT_EVERY  # a turn; each has two checkpoints, in its middle
ROUNDS = 30
QUICK_STEPS = 100  # a checkpoint falls into the middle of a quick turn
# Time for MLflow's import and its new database, in any process.
WARM_UP_S = 10.0
PRELOAD = ("step_variants", "preloaded")  # what a quick run imports before it forks


@dataclass(frozen=True)
class Clocks:
    """The time that a process has used since it began, in seconds."""

    wall: float
    cpu: float
    children: float

    @classmethod
    def read(cls) -> Clocks:
        children = 0.0
        for child in psutil.Process().children(recursive=True):
            times = child.cpu_times()
            children += times.user + times.system
        return cls(time.perf_counter(), time.process_time(), children)


class Turns:
    """Prepared batches, yielded turn by turn. Each turn waits for a message, and sends the clocks before and after."""

    def __init__(self, connection: Connection, turns: list[int]) -> None:
        import torch

        self._connection = connection
        self._turns = turns
        numbers = torch.Generator().manual_seed(0)
        self._ready = [
            (torch.randn(32, 32, generator=numbers), torch.randint(0, 10, (32,), generator=numbers)) for _ in range(64)
        ]

    def __len__(self) -> int:
        return sum(self._turns) + 1

    def __iter__(self) -> Iterator[Any]:
        endless = itertools.cycle(self._ready)
        for steps in self._turns:
            self._connection.recv()
            self._connection.send(Clocks.read())
            yield from itertools.islice(endless, steps)
            self._connection.send(Clocks.read())
        self._connection.recv()
        self._connection.send(Clocks.read())
        yield next(endless)  # a trainer that knows the length does not ask again after the last batch


def train(loop: Loop, connection: Connection, turns: list[int], terminal: str, environment: dict[str, str]) -> None:
    """Run a training loop in this process, on a terminal."""
    screen = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="footplate-bench-"))
    try:
        loop(Turns(connection, turns), directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Runner:
    """Handle of one training process.

    Args:
        name: its name.
        loop: one of `VARIANTS`, or a similar function.
        turns: the steps of each of its turns.
        context: the start method of the process.
        environment: variables that are set before the loop imports anything.
    """

    def __init__(
        self, name: str, loop: Loop, turns: list[int], context: BaseContext, environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self._said = b""
        self._screen, terminal = pty.openpty()
        threading.Thread(target=self._watch, daemon=True).start()
        self._connection, other = Pipe()
        arguments = (loop, other, turns, os.ttyname(terminal), environment or {})
        self._process: Any = context.Process(target=train, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self._process.start()

        # When another runner fails, SIGTERM would only ask a trainer to end its step.
        atexit.register(self._process.kill)
        other.close()

    def begin_turn(self) -> Clocks:
        self.let_go()
        return self.receive()

    def end_turn(self) -> Clocks:
        return self.receive()

    def let_go(self) -> None:
        """Let it begin its next turn. Then `receive` returns its clocks at the beginning, and again at the end."""
        self._connection.send("go")

    def join(self) -> None:
        self._process.join(120)
        if self._process.exitcode is None:
            raise SystemExit(f"{self.name} doesn't end:\n{self._said.decode(errors='replace')}")

    def receive(self) -> Clocks:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise SystemExit(f"{self.name} failed:\n{self._said.decode(errors='replace')}") from None

    def _watch(self) -> None:
        while True:
            self._said = (self._said + os.read(self._screen, 1 << 16))[-4000:]


def measure(
    loops: dict[str, Loop],
    rounds: int,
    steps: int,
    warm_up_s: float,
    quick: bool = False,
    warm_up_steps: int = CHECKPOINT_EVERY + CHECKPOINT_EVERY // 2,
) -> dict[str, list[Figures]]:
    """Run the loops in turns. Return microseconds per step of each turn.

    By default, the warm-up ends half-way between two checkpoints, so that no checkpoint falls between two turns.
    """
    turns = [warm_up_steps, *[steps] * rounds]
    runners: dict[str, Runner] = {}
    context = process_context(quick, *PRELOAD)
    for name, loop in loops.items():
        runners[name] = Runner(name, loop, turns, context)
        runners[name].begin_turn()
        runners[name].end_turn()
    time.sleep(warm_up_s)

    begun: dict[str, list[Clocks]] = {name: [] for name in loops}

    def turn(name: str) -> Figures:
        begun[name].append(runners[name].begin_turn())
        return {"wall_us": (runners[name].end_turn().wall - begun[name][-1].wall) / steps * 1e6}

    results = interleave(list(loops), turn, rounds)
    for name, runner in runners.items():
        begun[name].append(runner.begin_turn())
        for figures, (begins, ends) in zip(results[name], itertools.pairwise(begun[name]), strict=True):
            figures["cpu_us"] = (ends.cpu - begins.cpu) / steps * 1e6
            figures["children_cpu_us"] = (ends.children - begins.children) / steps * 1e6
    for runner in runners.values():
        runner.join()
    return results


def main() -> None:
    options = arguments("Overhead of a training loop per step")
    os.environ.update(OMP_NUM_THREADS="1", TERM="xterm-256color", COLUMNS="120", LINES="24")
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
    host = machine()
    if options.quick:
        warm_up_steps = CHECKPOINT_EVERY - QUICK_STEPS // 2
        results = measure(VARIANTS, QUICK_ROUNDS, QUICK_STEPS, 0.0, quick=True, warm_up_steps=warm_up_steps)
    else:
        results = measure(VARIANTS, ROUNDS, STEPS, WARM_UP_S)

    ratios = {
        "footplate_vs_raw": ratio(results, "footplate", "raw loop", "cpu_us", CPU_STEP),
        "footplate_bare_vs_raw": ratio(results, "footplate bare", "raw loop", "cpu_us", CPU_STEP),
        "lightning_vs_footplate": ratio(results, "lightning", "footplate", "cpu_us", CPU_STEP),
        "lightning_vs_raw": ratio(results, "lightning", "raw loop", "cpu_us", CPU_STEP),
        "lightning_bare_vs_raw": ratio(results, "lightning bare", "raw loop", "cpu_us", CPU_STEP),
        "fabric_vs_raw": ratio(results, "fabric", "raw loop", "cpu_us", CPU_STEP),
        "accelerate_vs_raw": ratio(results, "accelerate", "raw loop", "cpu_us", CPU_STEP),
    }
    rows = []
    for name, runs in results.items():
        spread = ratio(results, name, "raw loop", "cpu_us", CPU_STEP)
        rows.append(
            {
                "name": name,
                "cpu_us": median(runs, "cpu_us"),
                "least_cpu_us": min(run["cpu_us"] for run in runs),
                "vs_raw": spread["median"],
                "wall_us": median(runs, "wall_us"),
                "wall_vs_raw": ratio(results, name, "raw loop", "wall_us", WALL_STEP)["median"],
                # The kernel counts it in ticks of 10 ms, so only the mean is accurate.
                "children_cpu_us": statistics.fmean(run["children_cpu_us"] for run in runs),
                "rounds": runs,
            }
        )
    columns = {
        "cpu_us": "CPU µs/step",
        "least_cpu_us": "least",
        "vs_raw": "× raw",
        "wall_us": "wall µs/step",
        "wall_vs_raw": "× raw",
        "children_cpu_us": "CPU of children",
    }
    wall = {
        "wall_footplate_vs_raw": ratio(results, "footplate", "raw loop", "wall_us", WALL_STEP),
        "wall_lightning_vs_footplate": ratio(results, "lightning", "footplate", "wall_us", WALL_STEP),
    }
    packages = ("torch", "footplate", "lightning", "accelerate", "mlflow", "rich")
    clock = {"clock": "CPU time of the training process, all threads"}
    report(
        "step_overhead", f"Tiny MLP, {STEPS} steps a turn, medians of {len(results['footplate'])} rounds", columns, rows,
        ratios, {**wall, **clock}, host, packages, options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
