"""The global batches of one epoch of a mixture: how many there are, and the order of each table.

All batches are full. So a position is the number of a batch, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from footplate.core import rng
from footplate.core.errors import DataError
from footplate.data.order.mixed_table import MixedTable
from footplate.data.order.mixing import Mixing, Mode, Phase, count_batches
from footplate.data.order.plan import Order


@dataclass(frozen=True)
class MixedOrder:
    """Everything that the order of a mixture's rows depends on, beside the tables and the epoch.

    Attributes:
        phases: the schedule of weights.
        batch_size: rows of a global batch, over all ranks.
        mode: when an epoch ends.
        seed: seed of the orders of all tables.
        shuffle: False means the order of each table.
        streams: for each table, the number of its streams, and how many row groups a window gathers.
    """

    phases: Sequence[Phase]
    batch_size: int
    mode: Mode
    seed: int
    shuffle: bool
    streams: Sequence[tuple[int, int]]

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "weights": [[phase.first_batch, list(phase.weights)] for phase in self.phases],
            "global_batch_size": self.batch_size,
            "mode": self.mode,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "streams": [list(windows) for windows in self.streams],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> MixedOrder:
        """Make the order of a `state_dict`."""
        phases = [Phase(first_batch, tuple(weights)) for first_batch, weights in state["weights"]]
        streams = [(streams, window) for streams, window in state["streams"]]
        return cls(phases, state["global_batch_size"], state["mode"], state["seed"], state["shuffle"], streams)


class MixedEpoch:
    """The batches of one epoch of a mixture.

    Args:
        rows: for each table, the number of rows of each of its row groups, (groups,) int64.
        names: the names of the tables, for messages.
        order: what the order depends on.
        epoch: the number of the epoch.

    Attributes:
        tables: the order of each table.

    Raises:
        ConfigError: the schedule stops reading a table before it has been read once, so that the epoch has no end.
        DataError: a table has too few rows for one batch.
    """

    def __init__(self, rows: Sequence[np.ndarray], names: Sequence[str], order: MixedOrder, epoch: int) -> None:
        totals = [int(counts.sum()) for counts in rows]
        mixing = Mixing(order.phases, order.batch_size)
        self.epoch = epoch
        self._batch_size, self._batches = order.batch_size, count_batches(mixing, totals, names, order.mode)
        # Tables of equal rows have orders of their own.
        orders = [
            Order(streams, rng.mix(order.seed, number), order.shuffle, False, streams, window)
            for number, (streams, window) in enumerate(order.streams)
        ]
        self.tables = [
            MixedTable(mixing, number, counts, of_table, epoch, self._batches)
            for number, (counts, of_table) in enumerate(zip(rows, orders, strict=True))
        ]

    def num_batches(self, world: int = 1) -> int:
        """The number of batches, equal for every rank.

        Raises:
            DataError: a global batch has fewer rows than ranks.
        """
        if self._batch_size < world:
            raise DataError(
                f"A global batch of {self._batch_size} rows can't be shared by {world} ranks: use a larger batch_size, or "
                "fewer ranks."
            )
        return self._batches

    def position_after(self, batch: int, world: int = 1) -> int:
        """Return the batch that follows a batch."""
        return batch + 1

    def batch_rows(self, batch: int, world: int = 1) -> int:
        """The number of rows of a global batch."""
        return self._batch_size

    def rank_rows(self, batch: int, rank: int, world: int) -> int:
        """The number of rows of a rank's slice of a batch."""
        return self._batch_size * (rank + 1) // world - self._batch_size * rank // world
