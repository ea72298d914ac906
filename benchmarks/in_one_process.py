"""Training loops that take turns in one process, on one module: for differences that are smaller than those of processes.

The time of a step depends on where its tensors are in memory, which differs from process to process. Here all loops train
the same module, with the same optimizer and the same batches. Freed memory stays with the process. Otherwise each step gets
hundreds of pages from the kernel again, or none, depending on what is at the end of the heap.

A round has a turn of each loop, in random order. Each turn is a training of its own. Its first steps aren't timed, nor is
its end. Each round gives one quotient of two loops, and the result is the median of these. Other load on the machine
affects the turns of a round alike.

Resampling the rounds tells how sure the median is: with 95%, it is between `low` and `high`. To see if the design works,
compare a loop with itself.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Figures, Ratio, Rounds, ratio

WARM_STEPS = 30
RESAMPLES = 10_000
# Parameters of glibc's mallopt, and the largest values that it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST = 2**31 - 1, 32 * 2**20

Turn = Callable[[Any, Path], None]


class TimedBatches:
    """Prepared batches, which note the clocks after the first steps and before the last.

    Args:
        steps: the number of timed steps.
        ready: the batches, used again and again.
    """

    def __init__(self, steps: int, ready: list[Any]) -> None:
        self._steps, self._ready = steps, ready
        self._clocks: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return WARM_STEPS + self._steps + 1

    def __iter__(self) -> Iterator[Any]:
        endless = itertools.cycle(self._ready)
        for steps in (WARM_STEPS, self._steps):
            yield from itertools.islice(endless, steps)
            self._clocks.append((time.perf_counter(), time.process_time()))
        yield next(endless)

    def figures(self) -> Figures:
        """Microseconds of a step, by the wall clock and of the process with all its threads."""
        (wall, cpu), (wall_end, cpu_end) = self._clocks
        return {"wall_us": (wall_end - wall) / self._steps * 1e6, "cpu_us": (cpu_end - cpu) / self._steps * 1e6}


def measure_in_one_process(turns: dict[str, Turn], rounds: int, steps: int) -> Rounds:
    """Let each loop have its turn in each round, in random order. A first round isn't counted.

    Args:
        turns: by name, functions that train on the batches, and write into the directory.
        rounds: their number.
        steps: the timed steps of a turn.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    numbers = torch.Generator().manual_seed(0)
    ready = [
        (torch.randn(32, 32, generator=numbers), torch.randint(0, 10, (32,), generator=numbers)) for _ in range(64)
    ]
    order = random.Random(0)
    results: Rounds = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in order.sample(list(turns), len(turns)):
            directory = Path(tempfile.mkdtemp(prefix="footplate-bench-"))
            batches = TimedBatches(steps, ready)
            gc.collect()
            try:
                turns[name](batches, directory)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            if number > 0:
                results[name].append(batches.figures())
    return results


def keep_freed_memory() -> None:
    """Let glibc give no freed memory back to the kernel, nor take a block of its own for each large tensor."""
    library = ctypes.CDLL(None)
    for parameter, value in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, NEVER)):
        if not library.mallopt(parameter, value):
            raise SystemExit(f"mallopt({parameter}, {value}) was refused: this benchmark needs glibc.")


def paired(results: Rounds, over: str, under: str, figure: str, measure: str) -> Ratio:
    """Compare two loops, as `ratio` does, with the interval of the median (95%)."""
    quotients = np.array([a[figure] / b[figure] for a, b in zip(results[over], results[under], strict=True)])
    draws = np.random.default_rng(0).choice(quotients, (RESAMPLES, len(quotients)))  # (resamples, rounds)
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {**ratio(results, over, under, figure, measure), "low": float(low), "high": float(high)}
