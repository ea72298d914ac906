"""Sharding: each rank's share of the batches of an epoch, as pure functions of numbers.

The epoch is cut into *global batches*, which don't depend on the number of ranks. Each rank takes its share of each:

    rows        12 rows, batch_size 2, 2 ranks: global batches of 4     [0 1 | 2 3]  [4 5 | 6 7]  [8 9 | 10 11]
                the same on 4 ranks, after resuming                     [0|1|2|3]    [4|5|6|7]    [8|9|10|11]
    batches     made by a user's batch sampler: one for each rank makes a global batch, and each rank gets one of them.
                On another number of ranks, their rows are spread evenly

Every rank has the same number of batches. If a rank's share is empty (a tail of fewer rows than ranks), the rank gets a row
of another rank with weight 0.

A share's *weight* is its rows × ranks / rows of the global batch: 1 for equal shares. If each rank's mean loss is
multiplied by its weight, the average over the ranks is the mean over the rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch.

    Attributes:
        rows: the rows that the rank reads; never empty.
        weight: see above. 0 means that the rows are another rank's and don't count here.
    """

    rows: list[Any]
    weight: float


def share(batch: Sequence[Any], rank: int, ranks: int) -> Share:
    """Return a rank's even slice of a global batch (of at least one row)."""
    start, stop = len(batch) * rank // ranks, len(batch) * (rank + 1) // ranks
    if start == stop:
        return Share([batch[rank % len(batch)]], 0.0)
    return Share(list(batch[start:stop]), (stop - start) * ranks / len(batch))


def share_rows(order: Sequence[Any], size: int, drop_last: bool, rank: int, ranks: int) -> list[Share]:
    """Return a rank's shares of an epoch of rows, in global batches of `size`."""
    rows = len(order) - len(order) % size if drop_last else len(order)
    return [share(order[start : min(start + size, rows)], rank, ranks) for start in range(0, rows, size)]


def share_batches(batches: Sequence[Sequence[Any]], group: int, rank: int, ranks: int) -> list[Share]:
    """Return a rank's shares of an epoch of ready batches, of which `group` make a global batch."""
    shares = []
    for start in range(0, len(batches), group):
        members = batches[start : start + group]
        if group != ranks:
            shares.append(share([row for member in members for row in member], rank, ranks))
        elif rank < len(members):
            rows = sum(len(member) for member in members)
            shares.append(Share(list(members[rank]), len(members[rank]) * ranks / rows))
        else:
            shares.append(Share([members[0][0]], 0.0))
    return shares
