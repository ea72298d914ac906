"""A sampler whose indices carry the seed of their batch into the process that reads the rows.

Augmentation draws from the global generators of whichever process reads a row. So that a batch is a function of its seed,
these generators are seeded just before its rows are read:

    in this process    when the indices are handed out, after which torch reads the rows
    in a worker        when it unpickles the indices, after which torch reads the rows

Nothing else of a `DataLoader` needs to change: data set, collate function and workers stay the user's own, and
`get_worker_info().dataset` is the user's data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from footplate.core import rng


class Tickets:
    """A sampler that gives the batches of an epoch's rest, and seeds the generators for each.

    Args:
        elsewhere: whether worker processes read the rows.

    Attributes:
        items: the seed and the indices (or the single index) of each batch.
        total: batches of the whole epoch, which is what `len` gives; None where nobody knows.
        taken: whether a batch was asked for.
    """

    def __init__(self, elsewhere: bool) -> None:
        self.items: Iterable[tuple[int, Any]] = []
        self.total: int | None = 0
        self.taken = False
        self._elsewhere = elsewhere

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("The sampler has no length, so the number of batches isn't known.")
        return self.total

    def __iter__(self) -> Iterator[Any]:
        for seed, item in self.items:
            self.taken = True
            if not self._elsewhere:
                rng.seed_host(seed)
                yield item
            else:
                yield _SeededIndices(seed, item) if isinstance(item, list) else _SeededIndex(seed, item)


class _SeededIndex:
    """An index on its way to a worker, where it is unpickled as the index alone."""

    def __init__(self, seed: int, index: Any) -> None:
        self._seed, self._index = seed, index

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_batch, (self._seed, self._index)


class _SeededIndices(list[Any]):
    """The indices of a batch on their way to a worker, where they are unpickled as a plain list."""

    def __init__(self, seed: int, indices: list[Any]) -> None:
        super().__init__(indices)
        self._seed = seed

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _begin_batch, (self._seed, list(self))


def _begin_batch(seed: int, indices: Any) -> Any:
    """Seed the generators of the process that will read these rows."""
    rng.seed_host(seed)
    return indices
