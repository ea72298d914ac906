"""A sampler whose indices carry the seed of their batch into the process that reads the rows.

Augmentation draws from the global generators of the process that reads a row. To make a batch a function of its seed, these
generators are seeded just before the rows of the batch are read:

    in this process    when the sampler hands out the indices, after which torch reads the rows
    in a worker        when the worker unpickles the indices, after which torch reads the rows

Nothing else of a `DataLoader` changes. Data set, collate function and workers are the user's, and
`get_worker_info().dataset` is the user's data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from footplate.core import rng


class SeededBatches:
    """A sampler that gives the remaining batches of an epoch, and seeds the generators for each.

    Args:
        in_workers: True if worker processes read the rows.

    Attributes:
        items: the seed and the indices (or the single index) of each batch.
        total: the number of batches of the whole epoch, which `len` returns; None if it isn't known.
        taken: True once a batch was asked for.
    """

    def __init__(self, in_workers: bool) -> None:
        self.items: Iterable[tuple[int, Any]] = []
        self.total: int | None = 0
        self.taken = False
        self._in_workers = in_workers

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("The sampler has no length, so the number of batches isn't known.")
        return self.total

    def __iter__(self) -> Iterator[Any]:
        for seed, indices in self.items:
            self.taken = True
            if not self._in_workers:
                rng.seed_host(seed)
                yield indices
            else:
                yield _SeededIndices(seed, indices) if isinstance(indices, list) else _SeededIndex(seed, indices)


class _SeededIndex:
    """An index that unpickles as the plain index, and seeds the worker that unpickles it."""

    def __init__(self, seed: int, index: Any) -> None:
        self._seed, self._index = seed, index

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_and_return, (self._seed, self._index)


class _SeededIndices(list[Any]):
    """The indices of a batch, which unpickle as a plain list and seed the worker that unpickles them."""

    def __init__(self, seed: int, indices: list[Any]) -> None:
        super().__init__(indices)
        self._seed = seed

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _seed_and_return, (self._seed, list(self))


def _seed_and_return(seed: int, indices: Any) -> Any:
    """Seed the generators of the process that is about to read these rows."""
    rng.seed_host(seed)
    return indices
