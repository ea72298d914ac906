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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from footplate.checkpoint.step_history import StepBatches
from footplate.checkpoint.storage import Place
from footplate.core.errors import ConfigError
from footplate.data.adapters.training_combination import epoch_of_pass
from footplate.data.digest import Digest
from footplate.data.order.plan import Epoch, Order
from footplate.data.table import Table
from footplate.replaying.recorded_run import batches_of, check_step, saved_in


@dataclass(frozen=True)
class Row:
    """A row of a step.

    Attributes:
        rank: the rank that trained on it.
        batch: the index of its batch in the epoch. A step of several accumulated batches has several.
        loader: the number of its loader among combined loaders, else 0.
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


def rows(run: str | Place, step: int, table: Table | None = None) -> StepRows:
    """Name the rows of a step of a run.

    Rows that the loader left out because they couldn't be read (`on_error="skip"`) are named too.

    Args:
        run: the run's directory, or one of its checkpoints.
        step: the optimizer step, from 1, as in `trainer.global_step` after it and in the names of checkpoints.
        table: the table of the run, if it was in memory or has moved. By default it is opened where it was.

    Raises:
        CheckpointError: the run has no checkpoint.
        ConfigError: the step isn't known, or its rows aren't: they came from a loader whose order isn't Footplate's.
        DataError: the table, or its version, is gone.
    """
    check_step(step)
    made_by = batches_of(saved_in(run)[-1], step)
    batches = list(range(made_by.first, made_by.stop))
    named = list(_rows_of(made_by, batches, table))
    return StepRows(step, made_by.epoch, batches, made_by.ranks, made_by.planned, named)


def _rows_of(made_by: StepBatches, batches: list[int], table: Table | None) -> Iterator[Row]:
    parts = [_OrderedTable(settings, table) for settings in _parts_of(made_by.loader)]
    mode = made_by.loader.get("mode")
    for rank in range(made_by.ranks):
        for batch in batches:
            for number, epoch, index in _shares(parts, mode, made_by.epoch, batch, made_by.ranks):
                yield from parts[number].rows(rank, made_by.ranks, epoch, index, batch, number)


def _parts_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of each table of a loader.

    Raises:
        ConfigError: a loader has an order that isn't Footplate's.
    """
    parts = settings["parts"] if settings["kind"] == "combined" else [settings]
    for part in parts:
        if part["kind"] != "table":
            name = part.get("name", "a combination of loaders inside another one")
            raise ConfigError(
                f"The rows of this run can't be named: they came from {name}, whose order is that of its own code. Rows of "
                "a footplate.data.Loader can be named. `footplate replay` gives the batch itself."
            )
    return parts


def _shares(
    parts: list[_OrderedTable], mode: str | None, epoch: int, batch: int, ranks: int
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


class _OrderedTable:
    """A table, and the order in which a run read it.

    Args:
        settings: of its loader; see `footplate.data.adapters.order_record`.
        table: the table, if the user passed it.
    """

    def __init__(self, settings: dict[str, Any], table: Table | None) -> None:
        self._digest = Digest.from_state(settings["table"]["digest"])
        self._same_epoch = settings["same_epoch"]
        if table is not None:
            table.check_rows(self._digest)
        elif settings["table"]["source"] is None:
            raise ConfigError(
                f"The table of this run ({self._digest.uri}) was in memory. Make it again and pass it: "
                "fp.rows(run, step, table=table)."
            )
        self._table = Table.reopen(settings["table"]) if table is None else table

        order = settings["order"]
        names = ("seed", "shuffle", "drop_last", "streams", "window", "window_rows")
        self._order = Order(order["global_batch_size"], **{name: order[name] for name in names})
        self._counts = np.array([group.num_rows for group in self._table.row_groups], dtype=np.int64)

    def num_batches(self, ranks: int) -> int:
        """The number of batches of an epoch."""
        return self._epoch(0).num_batches(ranks)

    def rows(self, rank: int, ranks: int, epoch: int, index: int, batch: int, loader: int) -> Iterator[Row]:
        """Yield the rows of a rank's share of batch `index`, which is a part of batch `batch` of the run."""
        numbers = self._epoch(epoch).rows(index, rank, ranks)
        for address in self._table.addresses(numbers):
            yield Row(rank, batch, loader, self._digest.uri, self._digest.version, **vars(address))

    def _epoch(self, epoch: int) -> Epoch:
        return Epoch(self._counts, self._order, 0 if self._same_epoch else epoch)
