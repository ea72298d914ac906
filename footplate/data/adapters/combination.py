"""The batches of several loaders, combined in one of four modes.

    {"a": loader of 2 batches, "b": loader of 3}       mode             batches
                                                       min_size         {a0 b0} {a1 b1}
                                                       max_size_cycle   {a0 b0} {a1 b1} {a0 b2}
                                                       max_size         {a0 b0} {a1 b1} {None b2}
                                                       sequential       a0 a1 b0 b1 b2

Each loader has a `LoaderPosition` in the epoch. `training_combination.py` saves and restores these positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from footplate.core.errors import ConfigError, DataError
from footplate.distributed.uneven_loaders import close

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES = ("min_size", "max_size_cycle", "max_size", "sequential")

Build = Callable[[Iterator[Any]], Any]

_END = object()


@dataclass
class LoaderPosition:
    """Position of one loader in the current epoch.

    Attributes:
        passes: the number of times that the loader was begun again.
        batch: the number of batches of this pass that were handed out.
        before: the number of batches of the pass before.
        ended: True if the loader has no more batches.
    """

    passes: int = 0
    batch: int = 0
    before: int = 0
    ended: bool = False


class Combination:
    """The batches of several loaders, combined. Each iteration begins with their first batches.

    Args:
        parts: the loaders.
        build: makes a batch of one value from each loader.
        mode: see `CombinedLoader`.
    """

    def __init__(self, parts: list[Any], build: Build, mode: Mode) -> None:
        if not parts:
            raise ConfigError("The collection of loaders is empty. Give at least one loader.")
        self.parts = parts
        self.mode: Mode = mode
        self._build = build
        self._batch = 0
        self._positions = [LoaderPosition() for _ in parts]

    def __len__(self) -> int:
        sizes = [count_batches(part) for part in self.parts]
        total = {"min_size": min, "sequential": sum}.get(self.mode, max)(sizes)
        if math.isinf(total):
            raise TypeError("the number of batches of a combined loader isn't known")
        return int(total)

    def __iter__(self) -> Iterator[Any]:
        self._batch, self._positions = 0, [LoaderPosition() for _ in self.parts]
        return self._iterate()

    def weight(self, batch: int, weights: Sequence[Callable[[int], float] | None]) -> float:
        """Weight of this rank's share of a batch: the mean over the loaders that have a part in the batch.

        Args:
            batch: index of the batch in the epoch.
            weights: for each loader, the function from the index of its batch to the weight; None for a weight of 1.
        """
        sizes = [count_batches(part) for part in self.parts]
        if self.mode == "sequential":
            index = 0
            while batch >= sizes[index]:
                batch, index = batch - int(sizes[index]), index + 1
            return _weight(weights[index], batch)

        present = [
            _weight(weight, batch % int(size) if batch >= size else batch)
            for weight, size in zip(weights, sizes, strict=True)
            if self.mode == "max_size_cycle" or batch < size
        ]
        return sum(present) / len(present)

    def _iterate(self) -> Iterator[Any]:
        return self._one_after_another() if self.mode == "sequential" else self._side_by_side()

    def _one_after_another(self) -> Iterator[Any]:
        for index, position in enumerate(self._positions):
            if position.ended:
                continue
            batches = self._open(index)
            try:
                for batch in batches:
                    position.batch += 1
                    self._batch += 1
                    yield batch
            finally:
                close(batches)
            position.ended = True

    def _side_by_side(self) -> Iterator[Any]:
        iterators = [
            iter(()) if position.ended else self._open(index) for index, position in enumerate(self._positions)
        ]
        try:
            while True:
                values = []
                for index in range(len(iterators)):
                    value = self._next_of(index, iterators)
                    if value is _END:
                        return
                    values.append(value)

                if all(position.ended for position in self._positions):
                    return
                self._batch += 1
                yield self._build(iter(values))
        finally:
            for iterator in iterators:
                close(iterator)

    def _next_of(self, index: int, iterators: list[Iterator[Any]]) -> Any:
        """Take the next batch of a loader.

        Return None if this loader has ended and other loaders have batches left, or `_END` if the epoch has ended.
        """
        position = self._positions[index]
        if position.ended:
            return None
        value = next(iterators[index], _END)
        if value is _END and self.mode == "max_size":
            position.ended = True
            return None

        if value is _END:
            others = (other for other in self._positions if other is not position)
            if self.mode == "min_size" or all(other.passes for other in others):
                return _END
            # max_size_cycle: begin the loader again, as long as another loader is still in its first pass.
            close(iterators[index])
            position.before, position.batch, position.passes = position.batch, 0, position.passes + 1
            iterators[index] = self._open(index)
            value = next(iterators[index], _END)
            if value is _END:
                raise DataError(
                    f"Loader {index} of a combined loader gave no batch when it was begun again. Give a loader that can be "
                    'iterated over more than once, or use mode="min_size".'
                )

        position.batch += 1
        return value

    def _open(self, index: int) -> Iterator[Any]:
        return iter(self.parts[index])


def count_batches(loader: Any) -> float:
    """Return the length of a loader. Infinite if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def _weight(weight: Callable[[int], float] | None, batch: int) -> float:
    return 1.0 if weight is None else weight(batch)
