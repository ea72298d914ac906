"""The logical ranks of this process (`Trainer(logical_ranks=…)`): what depends on a rank is made once for each.

    loaders              `data/adapters/logical_loader.py`   one for each logical rank
    random draws         `enter`, below                      seeded by (seed, purpose, batches so far, logical rank)
    logged values        `metrics/logical_log.py`            kept apart, and merged in the order of logical ranks
    gradients            `distributed/logical_ddp.py`        kept apart, and summed in one order
    checkpoints          `parts`, below                      a part for each logical rank

Between two logical ranks' forward passes, the generators are seeded again. What runs once on each process, such as hooks
between two steps, draws under a seed that is the same on all processes. So no draw depends on the number of processes.

The results of CPU kernels depend on the number of torch's threads. So all processes use the same number, which a checkpoint
keeps. At the beginning it is the share of a logical rank of rank 0's cores, whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from footplate.core import rng
from footplate.core.errors import CheckpointError
from footplate.data.adapters.logical_loader import LogicalBatch
from footplate.distributed.logical_ranks import ranks_of
from footplate.distributed.world import World
from footplate.hardware.machine import usable_cores

if TYPE_CHECKING:
    from footplate.training.run import Run

# What the generators are seeded for.
STEP, TRANSFER, EVALUATION, BETWEEN = range(4)


@dataclass
class LogicalRanks:
    """The logical ranks of a process.

    Attributes:
        total: the number of logical ranks.
        world: the rank of this process among all processes.
        position: of the logical rank whose code runs, among those of this process. None between them.
        threads: torch's threads, the same on all processes. None before they are set.
    """

    total: int
    world: World
    position: int | None = None
    threads: int | None = None
    _threads_before: int = field(default=0, init=False)
    _seeds: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    @property
    def own(self) -> range:
        """The logical ranks of this process."""
        return ranks_of(self.world.rank, self.world.size, self.total)

    @property
    def rank(self) -> int:
        """The logical rank whose code runs. Between them, the first of this process."""
        return self.own[self.position or 0]

    @property
    def worlds(self) -> list[World]:
        """The logical ranks of this process, each as rank and world size."""
        local = self.world.local_size * len(self.own)
        return [World(rank, self.total, 0, min(local, self.total), launched=True) for rank in self.own]

    # Random draws

    def enter(self, run: Run, position: int | None, purpose: int = BETWEEN, batch: int = 0) -> None:
        """Begin the work of a logical rank, or with None, work that each process does once: seed its draws.

        Args:
            run: the run.
            position: of the logical rank among those of this process.
            purpose: one of the constants above.
            batch: a number that differs in each call with this purpose.
        """
        self.position = position
        rank = self.total if position is None else self.own[position]
        key = (run.seed, purpose, rank)
        seed = self._seeds.get(key)
        if seed is None:
            seed = self._seeds[key] = rng.mix(*key)
        rng.seed_host(seed + batch)
        seed_device = rng.device_seeder(run.device)
        if seed_device is not None:
            seed_device(seed + batch)

    def transferred(self, run: Run, batches: LogicalBatch, transfer: Callable[[Any, int], Any] | None) -> LogicalBatch:
        """Bring the batches of a training step to the device, each with the draws of its logical rank."""
        if transfer is not None:
            moved = []
            for position, batch in enumerate(batches):
                self.enter(run, position, TRANSFER, run.progress.batches)
                run.metrics.enter(position)
                moved.append(transfer(batch, 0))
            batches = LogicalBatch(moved)
            run.metrics.enter(None)
        self.enter(run, None, TRANSFER, run.progress.batches)
        return batches

    def enter_step(self, run: Run, position: int | None) -> None:
        """Begin the training step of a logical rank, or with None, what follows those of all."""
        self.enter(run, position, STEP, run.progress.batches)
        run.metrics.enter(position)

    # Threads

    def use_threads(self, run: Run, saved: dict[str, Any] | None) -> None:
        """Set the number of torch's threads: that of a checkpoint, or a share of the cores of rank 0's machine."""
        if saved is None or "logical_ranks" not in saved:
            threads = run.group.ask_first(lambda: max(1, int(usable_cores()) // self.total))
        else:
            threads = saved["logical_ranks"]["threads"]
        self._threads_before = self._threads_before or torch.get_num_threads()
        self.threads = threads
        torch.set_num_threads(threads)

    def give_threads_back(self) -> None:
        """Set the number of threads that this process had before."""
        if self._threads_before:
            torch.set_num_threads(self._threads_before)
            self._threads_before = 0

    # Checkpoints

    def record(self) -> dict[str, Any]:
        """What a checkpoint holds about logical ranks."""
        return {"total": self.total, "threads": self.threads}

    def parts(self, run: Run, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of a checkpoint that belong to single logical ranks, on rank 0. All ranks call this."""
        own = [
            {"metrics": metrics, "loader": state["loader"], "rng": state["rng"], "torchmetrics": {}}
            for metrics in state["metrics"]
        ]
        return [part for parts in run.group.gather_to_first(own) for part in parts]

    def part_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a run state with the parts of this process's logical ranks."""
        parts = state.get("ranks")
        if parts is None:
            # Another program wrote it, or it has only weights. Nothing in it belongs to a single rank.
            return {name: value for name, value in state.items() if name != "metrics"}
        return {**state, **parts[self.own.start], "metrics": [parts[rank]["metrics"] for rank in self.own]}


def check_resumed(logical_ranks: int | None, state: dict[str, Any], source: str) -> None:
    """Refuse to continue a training with another number of logical ranks.

    Raises:
        CheckpointError: the checkpoint was made with another number.
    """
    if "progress" not in state or "made_by" in state:
        return
    saved = state.get("logical_ranks", {}).get("total")
    if saved == logical_ranks:
        return
    made = "without logical_ranks" if saved is None else f"with logical_ranks={saved}"
    raise CheckpointError(
        f"logical_ranks={logical_ranks}: {source} was made {made}. The shares of a batch, their random draws and the order "
        f"of sums would be others. Use {'no logical_ranks' if saved is None else f'logical_ranks={saved}'} to resume, or "
        "load the weights (load_from_checkpoint) and start a new run."
    )
