"""Mixing of tables by weights, as pure functions: which table each place of each global batch belongs to.

The places of all batches of an epoch follow one another. A *pattern* of `PATTERN` places is repeated. Each table has its
share of the pattern, spread evenly:

    weights 0.5, 0.3, 0.2      places  a b c a a b a c b a | a b c a a b a c b a | …

So after any number of places, a table has had its weight of them, within a few rows. A schedule is a list of *phases*. Each
begins at a batch, with a pattern of its own.

Row r of a table, counted over the whole epoch, belongs to pass r // rows of the table. A pass has an order of its own, as
an epoch of that table alone would (`plan.py`).

Ranks. A rank takes an even slice of the places of a batch. So each rank has the same number of rows, and about the same
mixture. All ranks together have the same rows for any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from footplate.core.errors import ConfigError, DataError

# Places of a pattern. A weight is a multiple of 1 / PATTERN.
PATTERN = 10_000

Mode = Literal["min_size", "max_size_cycle"]


@dataclass(frozen=True)
class Phase:
    """Weights from a batch of the epoch on.

    Attributes:
        first_batch: the first batch with these weights.
        weights: one for each table; their sum is 1.
    """

    first_batch: int
    weights: tuple[float, ...]

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The places of each table in a pattern, (tables,) int64."""
        exact = np.array(self.weights) * PATTERN
        places = np.floor(exact + 1e-9).astype(np.int64)
        # The largest remainders are rounded up.
        short = PATTERN - int(places.sum())
        places[np.argsort(places - exact, kind="stable")[:short]] += 1
        return places

    @functools.cached_property
    def pattern(self) -> np.ndarray:
        """The table of each place, (PATTERN,) int64."""
        table = np.repeat(np.arange(len(self.places)), self.places)
        number = np.arange(PATTERN) - np.repeat(np.cumsum(self.places) - self.places, self.places)
        return table[np.argsort((number + 0.5) / self.places[table], kind="stable")]

    @functools.cached_property
    def before(self) -> np.ndarray:
        """The rows of each table before each place of the pattern, (PATTERN + 1, tables) int64."""
        ones = self.pattern[:, None] == np.arange(len(self.places))
        return np.concatenate([np.zeros((1, len(self.places)), np.int64), np.cumsum(ones, axis=0)])

    def rows_before(self, place: int) -> np.ndarray:
        """The rows of each table in the first places of the phase, (tables,) int64."""
        patterns, rest = divmod(place, PATTERN)
        return patterns * self.places + self.before[rest]

    def place_of(self, table: int, row: int) -> int | None:
        """The place of the phase that has row `row` of a table, counted from the phase's first; None if it has none."""
        if not self.places[table]:
            return None
        patterns, rest = divmod(row, int(self.places[table]))
        return patterns * PATTERN + int(np.searchsorted(self.before[:, table], rest, side="right")) - 1


class Mixing:
    """The tables of all places of an epoch.

    Args:
        phases: the schedule, in order. The first phase begins at batch 0.
        batch_size: rows of a global batch.

    Attributes:
        batch_size: rows of a global batch.
    """

    def __init__(self, phases: Sequence[Phase], batch_size: int) -> None:
        self._phases = list(phases)
        self.batch_size = batch_size
        # base: the rows of each table before each phase, (tables,)
        self._bases = [np.zeros(len(phases[0].weights), np.int64)]
        for phase, following in pairwise(self._phases):
            places = (following.first_batch - phase.first_batch) * batch_size
            self._bases.append(self._bases[-1] + phase.rows_before(places))

    def rows_before(self, batch: int, place: int = 0) -> np.ndarray:
        """The rows of each table before a place of a batch, (tables,) int64."""
        number = sum(phase.first_batch <= batch for phase in self._phases) - 1
        phase = self._phases[number]
        return self._bases[number] + phase.rows_before((batch - phase.first_batch) * self.batch_size + place)

    def batch_of(self, table: int, row: int) -> int | None:
        """The batch that has row `row` of a table, counted from the first batch; None if no batch has it."""
        for number in reversed(range(len(self._phases))):
            phase, base = self._phases[number], int(self._bases[number][table])
            if row >= base:
                place = phase.place_of(table, row - base)
                return None if place is None else phase.first_batch + place // self.batch_size
        return None

    def num_batches(self, rows: Sequence[int], mode: Mode) -> int:
        """The number of batches of an epoch.

        Args:
            rows: the number of rows of each table.
            mode: "min_size" ends before a table would begin again. "max_size_cycle" ends when every table has been read
                once.
        """
        if mode == "min_size":
            # The batch that would need one row more than a table has is too many.
            following = [self.batch_of(table, count) for table, count in enumerate(rows)]
            return min(batch for batch in following if batch is not None)
        last = [self.batch_of(table, count - 1) for table, count in enumerate(rows)]
        return 1 + max(batch for batch in last if batch is not None)


def parse_weights(
    weights: Mapping[str, float] | Mapping[int, Mapping[str, float]], names: Sequence[str]
) -> list[Phase]:
    """Convert weights, or a schedule of weights, to phases.

    Args:
        weights: `{"web": 3, "code": 1}`; or `{0: {"web": 3, "code": 1}, 5000: {"web": 1, "code": 1}}`, by first batch.
        names: the names of the tables.

    Raises:
        ConfigError: weights that don't fit the tables, or a schedule that doesn't begin at batch 0.
    """
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights={weights!r}: expected a weight for each of the tables {', '.join(names)}.")
    if not any(isinstance(value, Mapping) for value in weights.values()):
        return [Phase(0, _normal(weights, names, "weights"))]

    schedule = {
        batch: value for batch, value in weights.items() if isinstance(batch, int) and not isinstance(batch, bool)
    }
    if len(schedule) < len(weights) or min(schedule) != 0:
        raise ConfigError(
            f"weights: the phases of a schedule begin at batches {', '.join(map(repr, weights))}. Expected integers, "
            "of which the first is 0."
        )
    return [Phase(batch, _normal(schedule[batch], names, f"weights[{batch}]")) for batch in sorted(schedule)]


def count_batches(mixing: Mixing, rows: Sequence[int], names: Sequence[str], mode: Mode) -> int:
    """Return the number of batches of an epoch.

    Args:
        mixing: the tables of all places.
        rows: the number of rows of each table.
        names: the names of the tables.
        mode: see `Mixing.num_batches`.

    Raises:
        ConfigError: the schedule stops reading a table before it has been read once, so that the epoch has no end.
        DataError: a table has too few rows for one batch.
    """
    for table, (name, count) in enumerate(zip(names, rows, strict=True)):
        if mode == "max_size_cycle" and mixing.batch_of(table, count - 1) is None:
            raise ConfigError(
                f"weights: table {name!r} has {count} rows, and its weight becomes 0 before they have been read once. So "
                'an epoch of mode="max_size_cycle" would never end. Give it a weight in the last phase, or use '
                'mode="min_size".'
            )
    batches = mixing.num_batches(rows, mode)
    if batches == 0:
        needed = mixing.rows_before(1)
        name, count, least = next(row for row in zip(names, rows, needed.tolist(), strict=True) if row[1] < row[2])
        raise DataError(
            f"Table {name!r} has {count} rows, and a global batch of {mixing.batch_size} takes {least} of it, so there is "
            'no batch. Use a smaller batch_size, a smaller weight, or mode="max_size_cycle".'
        )
    return batches


def _normal(weights: Any, names: Sequence[str], where: str) -> tuple[float, ...]:
    """Return the weights in the order of the tables, with a sum of 1."""
    if not isinstance(weights, Mapping) or {*weights} != {*names}:
        given = ", ".join(map(repr, weights)) if isinstance(weights, Mapping) else repr(weights)
        raise ConfigError(f"{where}: expected a weight for each of the tables {', '.join(names)}; got {given}.")
    values = [weights[name] for name in names]
    if not all(isinstance(value, (int, float)) and 0 <= value < float("inf") for value in values) or not sum(values):
        raise ConfigError(f"{where}={dict(weights)}: expected numbers of at least 0, not all 0.")
    for name, value in zip(names, values, strict=True):
        if 0 < value < sum(values) / PATTERN:
            raise ConfigError(
                f"{where}: the weight of {name!r} is {value / sum(values):.2g} of all, and the smallest is 1 / {PATTERN}. "
                "Give it a larger weight, or 0."
            )
    return tuple(value / sum(values) for value in values)
