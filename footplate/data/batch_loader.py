"""The position of a loader in an epoch: where it begins, what it has handed out, and which epoch follows.

`Loader` and `MixedLoader` are such loaders. Each adds the order of its rows (`_plan`) and the threads that make batches
(`_open`).
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, Self

from footplate.core.errors import CheckpointError
from footplate.data.argument_checks import check_count
from footplate.data.pipeline.batch_builder import Busy
from footplate.distributed.world import World


class EpochPlan(Protocol):
    """The global batches of one epoch."""

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        ...

    def num_batches(self, world: int = 1) -> int:
        """The number of batches, equal for every rank."""
        ...

    def position_after(self, batch: int, world: int = 1) -> int:
        """Return the batch that follows a batch, for any number of ranks."""
        ...

    def batch_rows(self, batch: int, world: int = 1) -> int:
        """The number of rows of a global batch."""
        ...

    def rank_rows(self, batch: int, rank: int, world: int) -> int:
        """The number of rows of a rank's slice of a batch."""
        ...


class Batches(Protocol):
    """The batches of one rank that are being made. `BatchPipeline` is one."""

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each batch, and how many bad rows were left out of it."""
        ...

    def close(self) -> None:
        """Stop all threads."""
        ...


class BatchLoader(ABC):
    """A loader that keeps its position.

    Args:
        batch_size: rows of this rank's batch.
        world: rank and world size of this process; None reads them from the environment when they are first needed.
        pin_memory: True to put batches into page-locked memory; None leaves it to the trainer.
        num_threads: how many threads work for a loader; None for the cores of this process.
        prefetch: how many batches are made ahead; None to choose.

    Attributes:
        batch_size: rows of this rank's batch.
        pin_memory: True if batches are in page-locked memory; None leaves it to the trainer.
        skipped: rows that were left out because they could not be read.
        busy: the time of the loader's threads.
    """

    def __init__(
        self,
        batch_size: int,
        world: World | None,
        pin_memory: bool | None,
        num_threads: int | Literal["auto"],
        prefetch: int | Literal["auto"],
    ) -> None:
        self.batch_size = check_count("batch_size", batch_size)
        self.pin_memory = pin_memory
        self.skipped = 0
        self.busy = Busy()
        self._world = world
        self._num_threads = None if num_threads == "auto" else check_count("num_threads", num_threads)
        self._prefetch = None if prefetch == "auto" else check_count("prefetch", prefetch)
        self._global_batch_size: int | None = None
        self._epoch = 0
        self._batch = 0
        # True after `load_state_dict`, and after `set_epoch`, until the next iteration.
        self._restored = self._epoch_is_set = False

    @abstractmethod
    def _plan(self, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""

    @abstractmethod
    def _open(self, plan: Any, start: int) -> Batches:
        """Begin to make the batches of a plan, from `start` on."""

    @property
    def world(self) -> World:
        """Rank and world size of this process. It may be set before iterating."""
        return World.present() if self._world is None else self._world

    @world.setter
    def world(self, world: World) -> None:
        self._world = world

    @property
    def global_batch_size(self) -> int:
        """Rows of a full batch over all ranks. After resuming on another number of ranks, it is that of the checkpoint."""
        return self._global_batch_size or self.batch_size * self.world.size

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two epochs."""
        return self._epoch

    def __len__(self) -> int:
        """The number of batches of an epoch. It is the same on every rank and at every position."""
        return self._plan(0).num_batches(self.world.size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rest of the epoch after `load_state_dict`, else over the whole epoch. The next epoch follows.

        An epoch ends with its last batch, also for a consumer that counts batches and doesn't ask for
        one more. After a state of that position, the next epoch follows, unless `set_epoch` asks for the ended epoch.
        """
        ended = self._batch == self._plan(self._epoch).num_batches()
        if not self._restored or (ended and not self._epoch_is_set):
            self._epoch += ended
            self._batch = 0
        self._restored = self._epoch_is_set = False
        return self._iterate()

    def _iterate(self) -> Iterator[dict[str, Any]]:
        world, plan = self.world, self._plan(self._epoch)
        start = min(self._batch, plan.num_batches(world.size))
        opened = self._open(plan, start)

        # Closing the iterator early, or an error, ends the threads too.
        try:
            for batch, (values, skipped) in enumerate(opened.batches(), start):
                self.skipped += skipped
                self._batch = plan.position_after(batch, world.size)
                yield values
        finally:
            opened.close()
        self._epoch, self._batch = plan.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It begins with its first batch, unless it is the epoch that was just restored."""
        self._epoch_is_set = True
        if epoch != self._epoch or not self._restored:
            self._epoch, self._batch, self._restored = epoch, 0, False

    def beside(self) -> Self:
        """Return a loader of the same batches with a position of its own, before the first batch of epoch 0."""
        other = copy.copy(self)
        other._epoch, other._batch, other._restored = 0, 0, False
        other.busy = Busy()
        return other

    def _check_settings(self, state_dict: dict[str, Any], names: Sequence[str]) -> None:
        """Raise if a state's position means other rows, since the state has other settings.

        Args:
            state_dict: the state.
            names: the attributes that must be equal.

        Raises:
            CheckpointError: one of them differs; or neither the batch of a rank nor the global batch is that of the state.
        """
        for name in names:
            saved, own = state_dict[name], getattr(self, name)
            if saved != own:
                raise CheckpointError(
                    f"The checkpoint was made with {name}={saved!r}, not {own!r}, so its position means other rows. Use "
                    f"{name}={saved!r} to resume."
                )
        same_batch = self.batch_size == state_dict["batch_size"]
        if not same_batch and self.batch_size * self.world.size != state_dict["global_batch_size"]:
            raise CheckpointError(
                f"The checkpoint was made with batch_size={state_dict['batch_size']} (a global batch of "
                f"{state_dict['global_batch_size']}), not {self.batch_size}, so its position means other rows. Use "
                f"batch_size={state_dict['batch_size']} to resume."
            )

    def _continue_at(self, state_dict: dict[str, Any]) -> None:
        """Take the position of a state, and its global batch."""
        self._global_batch_size = state_dict["global_batch_size"]
        self._epoch, self._batch = state_dict["epoch"], state_dict["batch"]
        self._restored, self._epoch_is_set = True, False

    def rank_rows(self, batch: int) -> int:
        """The number of rows of this rank's share of a batch: its weight in a mean over all ranks."""
        return self._plan(0).rank_rows(batch, self.world.rank, self.world.size)

    def batch_rows(self, batch: int) -> int:
        """The number of rows of a batch over all ranks."""
        return self._plan(0).batch_rows(batch, self.world.size)


def available_cores(world: World) -> int:
    """Return the number of cores of this process, shared among the ranks of its node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, world.local_size))
