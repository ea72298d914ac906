"""Measurements of this process: batches, the loader, garbage collection, memory, compilation."""

from __future__ import annotations

import functools
import gc
import os
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.wrappers import ReplayedLoader, SameEpoch, StatefulLoader
from footplate.hardware.machine import usable_cores
from footplate.hardware.transfer import batch_rows
from footplate.monitoring.evidence import Compilation, LoaderFacts
from footplate.step.examined_step import ExaminedStep


@dataclass(frozen=True)
class BatchSize:
    """The size of a batch on one rank.

    Attributes:
        rows: its rows; None if they can't be counted.
        length: the integers of a row in a batch of sequences; None for another batch.
    """

    rows: int | None = None
    length: int | None = None

    @classmethod
    def of(cls, batch: Any) -> BatchSize:
        """Measure a batch."""
        try:
            rows = batch_rows(batch)
        except Exception:
            # A batch may be any object, and counting its rows must not end training.
            rows = None
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), None)
        if first is None or first.ndim != 2 or first.is_floating_point() or first.dtype == torch.bool:
            return cls(rows)
        return cls(rows, first.shape[1])


def loader_facts(loader: Any, wall_s: float) -> LoaderFacts:
    """Describe a training loader: its workers, what they do, and how busy its threads are.

    Args:
        loader: any iterable of batches, adapted or not.
        wall_s: the time for which it has been used.
    """
    while isinstance(loader, (SameEpoch, ReplayedLoader, StatefulLoader, SeededDataLoader)):
        loader = loader.loader
    cores = max(1, int(usable_cores()))
    if isinstance(loader, DataLoader):
        return LoaderFacts("torch", loader.num_workers, cores=cores)
    if hasattr(loader, "decodes"):
        busy = loader.busy
        return LoaderFacts(
            "table",
            loader.threads,
            min(1.0, busy.wall_s / max(1e-9, wall_s * loader.threads)),
            busy.cpu_s / busy.wall_s if busy.wall_s else None,
            tuple(loader.decodes),
            loader.transforms,
            cores,
        )
    return LoaderFacts("other", cores=cores)


class Collections:
    """Seconds that Python's garbage collector takes.

    Attributes:
        seconds: since `begin`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._taken = self._began = 0.0

    def begin(self) -> None:
        """Begin to measure."""
        gc.callbacks.append(self._called)

    def end(self) -> None:
        """Stop measuring."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def take(self) -> float:
        """Return the seconds since the last call."""
        taken, self._taken = self.seconds - self._taken, self.seconds
        return taken

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


def process_s() -> float | None:
    """Return the seconds since this process began; None on another system than Linux."""
    try:
        # The 22nd field is the time of the start, in ticks since the machine started. The second may have spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def memory_bytes() -> int:
    """Return the memory of this process now; its peak on another system than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory_bytes()


def peak_memory_bytes() -> int:
    """Return the peak of this process's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the peak of the memory that torch has used on a GPU; None on another device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def compilations(step: Any, since: float) -> Iterable[Compilation]:
    """Yield what was compiled: by XLA, or again by torch.compile since a time (`time.time()`)."""
    for program in getattr(step, "compilations", ()):
        yield Compilation(program.name, program.form, program.seconds)
    yield from _of_torch_compile(since)


def recompilations(step: Any, since: float) -> int:
    """Count the programs that were compiled again: by XLA, or by torch.compile since a time (`time.time()`)."""
    return sum(program.again for program in getattr(step, "compilations", ())) + len(_of_torch_compile(since))


def _of_torch_compile(since: float) -> list[Compilation]:
    """Return what torch.compile has compiled again in this process since a time, with its reason."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return []
    return [
        Compilation(f"`{metrics.co_name}`", str(metrics.recompile_reason), metrics.entire_frame_compile_time_s or 0.0)
        for metrics in dynamo.get_compilation_metrics()
        if metrics.recompile_reason and (metrics.start_time or 0.0) >= since
    ]


@functools.cache
def least_operation_s() -> float:
    """Measure the time of an operation that computes nearly nothing, forward and backward, in about a millisecond."""
    number = torch.ones((), requires_grad=True)

    def run() -> None:
        value = number
        for _ in range(50):
            value = value * 1.0
        value.backward()

    with ExaminedStep() as examined:
        run()
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds) / examined.operations
