"""The rows of a step: table, version, file, row group and row, for each rank. Nothing was logged for it.

    >>> rows = fp.rows("runs/flowers", step=12345)
    >>> rows.rows[0]
    Row(rank=0, batch=344, loader=0, table='lake/flowers', version=12, file='/data/lake/flowers/part-3.parquet', …)

The order of events:

1. The history of steps in the newest checkpoint gives the epoch of the step, its batches, the number of ranks, and the
   loader's settings (`footplate.checkpoint.step_history`).
2. The table is opened at the version that the run read, with the same filter and split. Its digest must be the same.
3. The order of rows is a pure function of the settings and the epoch (`footplate.data.order.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from footplate.checkpoint.step_history import StepBatches
from footplate.checkpoint.storage import Place
from footplate.core.errors import ConfigError, DataError
from footplate.data.digest import Digest
from footplate.data.lengths import RowLengths
from footplate.data.order.grouping import GroupedEpoch
from footplate.data.order.mixed_epoch import MixedEpoch, MixedOrder
from footplate.data.order.plan import Epoch, Order, epoch_of_pass
from footplate.data.table import Table
from footplate.replaying.recorded_run import batches_of, check_step, saved_in


@dataclass(frozen=True)
class Row:
    """A row of a step.

    Attributes:
        rank: the rank that trained on it.
        batch: the index of its batch in the epoch. A step of several accumulated batches has several.
        loader: the number of its loader among combined loaders, or of its table in a mixture; else 0.
        table: the table, as the run named it.
        version: the version of a Delta table; None for other tables.
        file: its file, or a name in angle brackets for a table in memory.
        row_group: the number of its row group in the file.
        row: its number in the row group.
        row_in_file: its number in the file.
        sequence: of a packed document, the number of its sequence in the rank's batch; else None.
        start: of a packed document, the first of its tokens that are in the sequence; else None.
        stop: of a packed document, the token after the last one; else None.
    """

    rank: int
    batch: int
    loader: int
    table: str
    version: int | None
    file: str
    row_group: int
    row: int
    row_in_file: int
    sequence: int | None = None
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    Attributes:
        step: the optimizer step, from 1.
        epoch: its epoch, from 0.
        batches: the indices of its batches in the epoch.
        ranks: the number of ranks.
        planned: the newest checkpoint is older than the step, so the rows are those that follow by the order.
        rows: the rows, rank by rank, in the order of the batch.
    """

    step: int
    epoch: int
    batches: list[int]
    ranks: int
    planned: bool
    rows: list[Row]


def rows(run: str | Place, step: int, table: Table | Mapping[str, Table] | None = None) -> StepRows:
    """Name the rows of a step of a run.

    Rows that the loader left out because they couldn't be read (`on_error="skip"`) are named too.

    Args:
        run: the run's directory, or one of its checkpoints.
        step: the optimizer step, from 1, as in `trainer.global_step` after it and in the names of checkpoints.
        table: the table of the run, if it was in memory or has moved; of a mixture, the tables by name. By default it is
            opened where it was.

    Raises:
        CheckpointError: the run has no checkpoint.
        ConfigError: the step isn't known, or its rows aren't: they came from a loader whose order isn't Footplate's.
        DataError: the table, or its version, is gone.

    Examples:
        >>> step = fp.rows("runs/flowers", step=3)
        >>> step.epoch, len(step.rows)
        (1, 4)
    """
    check_step(step)
    made_by = batches_of(saved_in(run)[-1], step)
    batches = list(range(made_by.first, made_by.stop))
    named = list(_rows_of(made_by, batches, table))
    return StepRows(step, made_by.epoch, batches, made_by.ranks, made_by.planned, named)


def _rows_of(made_by: StepBatches, batches: list[int], table: Table | Mapping[str, Table] | None) -> Iterator[Row]:
    parts: list[_Ordered] = []
    for settings in _parts_of(made_by.loader):
        first = sum(part.num_tables for part in parts)
        parts.append((_OrderedMixture if settings["kind"] == "mixed" else _OrderedTable)(settings, table, first))
    mode = made_by.loader.get("mode")
    for rank in range(made_by.ranks):
        for batch in batches:
            for number, epoch, index in _shares(parts, mode, made_by.epoch, batch, made_by.ranks):
                yield from parts[number].rows(rank, made_by.ranks, epoch, index, batch)


def _parts_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of each table of a loader.

    Raises:
        ConfigError: a loader has an order that isn't Footplate's.
    """
    parts = settings["parts"] if settings["kind"] == "combined" else [settings]
    for part in parts:
        if part["kind"] not in ("table", "mixed"):
            name = part.get("name", "a combination of loaders inside another one")
            raise ConfigError(
                f"The rows of this run can't be named: they came from {name}, whose order is that of its own code. Rows of "
                "a footplate.data.Loader can be named. `footplate replay` gives the batch itself."
            )
    return parts


def _shares(
    parts: Sequence[_Ordered], mode: str | None, epoch: int, batch: int, ranks: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the loader, its epoch and its batch for each part of a batch; see `Combination`."""
    if mode is None:
        yield 0, epoch, batch
        return
    sizes = [part.num_batches(ranks) for part in parts]
    if mode == "sequential":
        number = 0
        while batch >= sizes[number]:
            batch, number = batch - sizes[number], number + 1
        yield number, epoch, batch
        return
    for number, size in enumerate(sizes):
        if mode == "max_size_cycle":
            yield number, epoch_of_pass(epoch, batch // size), batch % size
        elif batch < size:
            yield number, epoch, batch


class _Ordered(Protocol):
    """The rows of one loader, in the order in which a run read them."""

    num_tables: int

    def num_batches(self, ranks: int) -> int:
        """The number of batches of an epoch."""
        ...

    def rows(self, rank: int, ranks: int, epoch: int, index: int, batch: int) -> Iterator[Row]:
        """Yield the rows of a rank's share of batch `index`, which is a part of batch `batch` of the run."""
        ...


class _OrderedTable:
    """A table, and the order in which a run read it.

    Args:
        settings: of its loader; see `footplate.data.adapters.order_record`.
        table: the table, if the user passed it.
        number: the number of the loader.
    """

    num_tables = 1

    def __init__(self, settings: dict[str, Any], table: Table | Mapping[str, Table] | None, number: int) -> None:
        self._same_epoch, self._number = settings["same_epoch"], number
        self._record: dict[str, Any] = settings["table"]
        self._table = _reopen(self._record, table, "table=table")
        order = settings["order"]
        names = ("seed", "shuffle", "drop_last", "streams", "window", "window_rows")
        self._order = Order(order["global_batch_size"], **{name: order[name] for name in names})
        # Runs of earlier versions have no such entry.
        column = order.get("group_by_length")
        self._lengths = None if column is None else RowLengths(self._table, column)
        if self._lengths is not None and self._lengths.digest != order["lengths"]:
            raise DataError(
                f"{self._table.uri}: the rows have other lengths in the column {column!r} than in the run, so the rows of "
                "its batches aren't known. Give the files that the run read."
            )
        self._megabatch: int = order.get("megabatch", 0)

    def num_batches(self, ranks: int) -> int:
        """The number of batches of an epoch."""
        return self._epoch(0).num_batches(ranks)

    def rows(self, rank: int, ranks: int, epoch: int, index: int, batch: int) -> Iterator[Row]:
        """Yield the rows of a rank's share of batch `index`, which is a part of batch `batch` of the run."""
        numbers = self._epoch(epoch).rows(index, rank, ranks)
        yield from _named(self._table, self._record, numbers, rank, batch, self._number)

    def _epoch(self, epoch: int) -> Epoch:
        epoch = 0 if self._same_epoch else epoch
        if self._lengths is None:
            return Epoch(self._table.group_rows, self._order, epoch)
        return GroupedEpoch(self._table.group_rows, self._order, epoch, self._lengths.values, self._megabatch)


class _OrderedMixture:
    """The tables of a mixture, and the order in which a run read them.

    Args:
        settings: of its loader; see `footplate.data.adapters.order_record`.
        tables: the tables by name, if the user passed them.
        number: the number of the first table.
    """

    def __init__(self, settings: dict[str, Any], tables: Table | Mapping[str, Table] | None, number: int) -> None:
        self._same_epoch, self._number = settings["same_epoch"], number
        self._records: dict[str, dict[str, Any]] = settings["tables"]
        self.num_tables = len(self._records)
        self._tables = [
            _reopen(record, tables.get(name) if isinstance(tables, Mapping) else None, f"table={{{name!r}: table, …}}")
            for name, record in self._records.items()
        ]
        self._order = MixedOrder.from_state(settings["order"])

    def num_batches(self, ranks: int) -> int:
        """The number of batches of an epoch."""
        return self._epoch(0).num_batches(ranks)

    def rows(self, rank: int, ranks: int, epoch: int, index: int, batch: int) -> Iterator[Row]:
        """Yield the rows of a rank's share of batch `index`, which is a part of batch `batch` of the run."""
        first_sequence = 0
        tables = zip(self._tables, self._records.values(), self._epoch(epoch).tables, strict=True)
        for number, (table, record, order) in enumerate(tables, self._number):
            numbers = order.rows(index, rank, ranks)
            for row in _named(table, record, numbers, rank, batch, number):
                yield row if row.sequence is None else replace(row, sequence=row.sequence + first_sequence)
            first_sequence += len(numbers)

    def _epoch(self, epoch: int) -> MixedEpoch:
        counts = [table.group_rows for table in self._tables]
        return MixedEpoch(counts, list(self._records), self._order, 0 if self._same_epoch else epoch)


def _reopen(record: dict[str, Any], table: Table | Mapping[str, Table] | None, argument: str) -> Table:
    """Return the table of a record: the user's, if they passed it, or opened where it was.

    Raises:
        ConfigError: it was in memory, and isn't passed.
        DataError: it has other rows.
    """
    digest = Digest.from_state(record["digest"])
    if isinstance(table, Table):
        table.check_rows(digest)
        return table
    if record["source"] is None:
        raise ConfigError(
            f"The table of this run ({digest.uri}) was in memory. Make it again and pass it: "
            f"fp.rows(run, step, {argument})."
        )
    return Table.reopen(record)


def _named(
    table: Table, record: dict[str, Any], numbers: np.ndarray, rank: int, batch: int, loader: int
) -> Iterator[Row]:
    """Yield the rows of some numbers, (rows, 2): the row group, and the row within it. The run's record names the table."""
    digest = Digest.from_state(record["digest"])
    for address in table.addresses(numbers):
        yield Row(rank, batch, loader, digest.uri, digest.version, **vars(address))
