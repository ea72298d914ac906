"""Petastorm's loaders: batches of a reader's rows, transformed in threads or kept in memory.

    BatchLoader               batches of a `Loader`, transformed in threads a few batches ahead
    DataLoader                the same over a reader, under Petastorm's name; also called BatchedDataLoader
    InMemBatchedDataLoader    reads its rows once, and makes the batches of every epoch from memory

All of them are context managers, and have the `set_epoch`, `state_dict` and `load_state_dict` that the trainer resumes a
loader with.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from footplate.compat.petastorm.arguments import check_epochs, check_settings, is_integer
from footplate.compat.petastorm.rows import collate_rows, transform_row
from footplate.compat.petastorm.source import decode_rows
from footplate.compat.petastorm.transforms import TransformSpec, transform_batch
from footplate.compat.petastorm.unischema import Unischema
from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.core.threads import shut_down
from footplate.data.loader import Loader

if TYPE_CHECKING:
    from footplate.compat.petastorm.readers import Reader

log = logging.getLogger(__name__)

_ROWS_PER_READ = 1024


class BatchLoader:
    """Iterates over batches for a number of epochs, or without end; also a context manager.

    With `num_epochs=1`, `set_epoch`, `state_dict` and `load_state_dict` are those of the `Loader` that it reads from, so
    the trainer resumes it exactly. With another `num_epochs`, a state also has the number of the pass over the rows;
    resuming gives the rest of that pass and the passes after it.

    Args:
        loader: reads the rows.
        num_epochs: the number of passes over the rows; None has no end.
        workers: the number of threads of the transform.
        spec: the transform; None for none.
        dtype: the type of floating-point columns, "float32" or "float64"; None keeps their types.
        schema: the Unischema of a table of encoded rows; None for a plain table.
        collate: makes a batch of a list of decoded rows.

    Examples:
        >>> from footplate.compat.petastorm import BatchLoader, make_spark_converter
        >>> loader = make_spark_converter("flowers.parquet").make_torch_dataloader(batch_size=4, num_epochs=2)
        >>> isinstance(loader, BatchLoader), len(loader)
        (True, 4)
    """

    def __init__(
        self,
        loader: Loader,
        num_epochs: int | None,
        workers: int,
        spec: TransformSpec | None,
        dtype: str | None,
        schema: Unischema | None = None,
        collate: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        check_epochs(num_epochs)
        self._loader, self._num_epochs, self._workers = loader, num_epochs, workers
        self._spec, self._dtype = spec, dtype
        self._schema, self._collate = schema, collate or collate_rows
        self._state: dict[str, Any] | None = None
        # Passes over the rows that are done before the next iteration.
        self._passes = 0
        self._epoch = 0
        self._restored_epoch: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no thread runs between two iterations."""

    def __len__(self) -> int:
        if self._num_epochs is None:
            raise TypeError("With num_epochs=None there is no end of batches, so there is no len(); pass num_epochs=1.")
        return len(self._loader) * self._num_epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        passes, self._passes = self._passes, 0
        while self._num_epochs is None or passes < self._num_epochs:
            yield from self._one_epoch(passes)
            passes += 1

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch from its first batch, unless a state of this epoch was just restored.

        With `num_epochs=n`, its passes have the orders `epoch * n` and following; without end, `epoch` and following.
        """
        restored, self._restored_epoch = self._restored_epoch, None
        if self._num_epochs != 1 and restored == epoch:
            return
        self._state, self._passes, self._epoch = None, 0, epoch
        self._loader.set_epoch(epoch * (self._num_epochs or 1))

    def state_dict(self) -> dict[str, Any]:
        """The state of the `Loader`, with the epoch and pass that this loader is in."""
        return self._state or self._with_position(self._loader.state_dict(), self._passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            CheckpointError: the state was made with another `num_epochs`, or by another loader.
        """
        _check_num_epochs(state_dict, self._num_epochs)
        self._loader.load_state_dict(state_dict)
        self._state = None
        self._passes = state_dict.get("pass", 0)
        self._epoch = self._restored_epoch = state_dict.get("outer_epoch", state_dict["epoch"])
        # The `Loader` keeps the position of this pass, so a pass that had ended neither begins again nor is skipped.
        if self._num_epochs != 1:
            self._loader.set_epoch(state_dict["epoch"])

    def _with_position(self, state: dict[str, Any], passes: int) -> dict[str, Any]:
        if self._num_epochs == 1:
            return state
        return {**state, "num_epochs": self._num_epochs, "outer_epoch": self._epoch, "pass": passes}

    def _one_epoch(self, passes: int) -> Iterator[dict[str, Any]]:
        """Transform batches in threads, a few ahead and in order. The state is that of the batch handed out last."""
        waiting: deque[tuple[Future[dict[str, Any]], dict[str, Any]]] = deque()
        ragged = self._loader.padded_columns
        pool = ThreadPoolExecutor(self._workers, "footplate-transform")
        try:
            for batch in self._loader:
                future = pool.submit(self._transform, batch, ragged)
                waiting.append((future, self._with_position(self._loader.state_dict(), passes)))
                if len(waiting) > self._workers + 1:
                    yield self._hand_out(*waiting.popleft())
            while waiting:
                yield self._hand_out(*waiting.popleft())
        finally:
            shut_down(pool)
        self._state = None

    def _transform(self, batch: dict[str, Any], ragged: Sequence[str]) -> Any:
        if self._schema is None:
            return transform_batch(self._spec, self._dtype, batch, ragged)
        rows = decode_rows(self._schema, batch)
        return self._collate(rows if self._spec is None else [transform_row(self._spec, row) for row in rows])

    def _hand_out(self, future: Future[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
        batch = future.result()
        self._state = state
        return batch


class DataLoader(BatchLoader):
    """Petastorm's loader over a reader.

    Args:
        reader: from `make_reader` or `make_batch_reader`.
        batch_size: the number of rows of a batch.
        collate_fn: makes a batch of a list of rows, each a dict, for a reader of a table with a Unischema. Other readers
            refuse it: their batches are dicts of tensors.
        transform_fn: refused: use the reader's `transform_spec`.
        shuffling_queue_capacity: the number of rows that Petastorm mixes with each other. Any number above 0 is what the
            reader does already, which mixes all rows.
        **petastorm_settings: Petastorm's other settings of its shuffling queue, which have no effect.

    Raises:
        ConfigError: a setting that would change the batches, or rows to be mixed of a reader that keeps their order.

    Examples:
        >>> from footplate.compat.petastorm import DataLoader, make_batch_reader
        >>> with DataLoader(make_batch_reader("flowers.parquet"), batch_size=4) as loader:
        ...     [batch["x"].shape for batch in loader]
        [torch.Size([4, 4]), torch.Size([4, 4])]
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        collate_fn: Any = None,
        transform_fn: Any = None,
        shuffling_queue_capacity: int = 0,
        **petastorm_settings: Any,
    ) -> None:
        if shuffling_queue_capacity and not reader.loader.shuffle:
            raise ConfigError(
                f"DataLoader(shuffling_queue_capacity={shuffling_queue_capacity!r}) of a reader with "
                "shuffle_row_groups=False is not supported: rows are mixed over the whole table, or not at all. Make the "
                "reader with shuffle_row_groups=True."
            )
        refused = {"transform_fn": transform_fn, "collate_fn": None if reader.schema else collate_fn}
        check_settings("DataLoader", {**refused, **petastorm_settings})
        super().__init__(
            reader.loader_of(batch_size), reader.num_epochs, reader.workers, reader.transform_spec, reader.dtype,
            reader.schema, collate_fn,
        )  # fmt: skip


BatchedDataLoader = DataLoader
"""Petastorm's other name for `DataLoader`."""


class InMemBatchedDataLoader:
    """Petastorm's loader that reads the rows of a reader once, and makes the batches of every epoch from memory.

    The rows are read, decoded and transformed when the loader is made; the reader is stopped then. Each shard keeps its own
    rows for all epochs. All shards have the same number of batches, so the last batch of an epoch may have one row more
    than `batch_size`.

    Args:
        reader: from `make_reader` or `make_batch_reader`, with `num_epochs=1`.
        batch_size: the number of rows of a batch.
        num_epochs: the number of passes over the rows; None has no end.
        transform_fn: refused: use the reader's `transform_spec`.
        rows_capacity: the number of rows that are kept at most. Further rows of the reader are left out, with a warning.
        shuffle: mix the rows again in each pass; False, the default, keeps the order in which the reader gives them.
        seed: of the order.

    Raises:
        ConfigError: a reader of several epochs, or a setting that would change the batches.
        DataError: a column whose values have several shapes.

    Examples:
        >>> from footplate.compat.petastorm import InMemBatchedDataLoader, make_batch_reader
        >>> reader = make_batch_reader("flowers.parquet")
        >>> with InMemBatchedDataLoader(reader, batch_size=4, num_epochs=3, shuffle=True) as loader:
        ...     len(list(loader))
        6
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        num_epochs: int | None = 1,
        transform_fn: Any = None,
        rows_capacity: int = 1024,
        shuffle: bool = False,
        seed: int = 0,
        **petastorm_settings: Any,
    ) -> None:
        check_settings("InMemBatchedDataLoader", {"transform_fn": transform_fn, **petastorm_settings})
        check_epochs(num_epochs)
        if reader.num_epochs != 1:
            raise ConfigError(
                f"InMemBatchedDataLoader: its reader has num_epochs={reader.num_epochs}, and rows are read once. Make the "
                "reader with num_epochs=1, and give num_epochs to the loader."
            )
        for name, value in (("batch_size", batch_size), ("rows_capacity", rows_capacity)):
            if not is_integer(value) or value < 1:
                raise ConfigError(f"InMemBatchedDataLoader({name}={value!r}): expected a number from 1.")

        self._columns, self._rows = _read_columns(reader, rows_capacity)
        self._batches = _batches_of_every_shard(reader, batch_size, rows_capacity)
        self._batch_size, self._num_epochs, self._shuffle, self._seed = batch_size, num_epochs, shuffle, seed
        self._epoch, self._pass, self._batch = 0, 0, 0
        self._restored_epoch: int | None = None
        reader.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the reader was stopped when its rows had been read."""

    def __len__(self) -> int:
        if self._num_epochs is None:
            raise TypeError("With num_epochs=None there is no end of batches, so there is no len(); pass num_epochs=1.")
        return self._batches * self._num_epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._num_epochs is None or self._pass < self._num_epochs:
            order = self._order()
            while self._batch < self._batches:
                start = self._batch * self._batch_size
                is_last = self._batch == self._batches - 1
                rows = order[start:] if is_last else order[start : start + self._batch_size]
                self._batch += 1
                yield {name: _take(values, rows) for name, values in self._columns.items()}
            self._pass, self._batch = self._pass + 1, 0
        self._pass = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch from its first batch, unless a state of this epoch was just restored."""
        restored, self._restored_epoch = self._restored_epoch, None
        if restored != epoch:
            self._epoch, self._pass, self._batch = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the pass over the rows in it, and the number of batches of this pass handed out."""
        return {"epoch": self._epoch, "pass": self._pass, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position.

        Raises:
            CheckpointError: the state is of other rows, or of batches of another size or order.
        """
        _check_num_epochs(state_dict, self._num_epochs)
        for name, value in self._identity().items():
            if state_dict.get(name) != value:
                raise CheckpointError(
                    f"The checkpoint was made with {name}={state_dict.get(name)}, not {value}, so its position means other "
                    "rows. Resume with the same table and settings."
                )
        self._epoch = self._restored_epoch = state_dict["epoch"]
        self._pass, self._batch = state_dict["pass"], state_dict["batch"]

    def _identity(self) -> dict[str, Any]:
        return {
            "num_epochs": self._num_epochs, "rows": self._rows, "batch_size": self._batch_size,
            "shuffle": self._shuffle, "seed": self._seed,
        }  # fmt: skip

    def _order(self) -> np.ndarray:
        """The order of the rows in the present pass, a function of seed, epoch and pass."""
        if not self._shuffle:
            return np.arange(self._rows)
        pass_number = self._epoch * (self._num_epochs or 1) + self._pass
        return np.random.default_rng([self._seed, pass_number]).permutation(self._rows)


def _read_columns(reader: Reader, capacity: int) -> tuple[dict[str, Any], int]:
    """Read the rows of a reader into columns: tensors, or lists for text and Decimals. Return them and their number."""
    shard_rows = math.ceil(reader.table.num_rows / reader.loader.world.size)
    pieces: list[dict[str, Any]] = []
    rows = 0
    for piece in DataLoader(reader, batch_size=max(1, min(_ROWS_PER_READ, capacity, shard_rows))):
        pieces.append(piece)
        rows += len(next(iter(piece.values())))
        if rows >= capacity:
            break
    if shard_rows > capacity:
        log.warning(
            "InMemBatchedDataLoader(rows_capacity=%d): the reader has about %d rows, and the rows beyond the capacity are "
            "left out. Raise rows_capacity to keep them.",
            capacity,
            shard_rows,
        )
    rows = min(rows, capacity)
    ragged = () if reader.transform_spec is not None or reader.schema is not None else reader.loader.padded_columns
    columns = {name: _join(name, [piece[name] for piece in pieces], name in ragged) for name in pieces[0]}
    return {name: values[:rows] for name, values in columns.items()}, rows


def _join(name: str, pieces: list[Any], ragged: bool) -> Any:
    """A column of several batches as one column.

    Raises:
        DataError: the batches have values of several shapes.
    """
    if not all(isinstance(piece, torch.Tensor) for piece in pieces):
        return [value for piece in pieces for value in piece]

    # A column of lists of different lengths was padded in each batch to the longest list of that batch.
    if ragged:
        width = max(piece.shape[1] for piece in pieces)
        pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
    if len({piece.shape[1:] for piece in pieces}) > 1:
        raise DataError(f"Column {name!r} has values of several shapes. Pad them in a transform_spec.")
    return torch.cat(pieces)


def _take(values: Any, rows: np.ndarray) -> Any:
    return values[torch.from_numpy(rows)] if isinstance(values, torch.Tensor) else [values[row] for row in rows]


def _batches_of_every_shard(reader: Reader, batch_size: int, capacity: int) -> int:
    """The number of batches of a pass, the same on every shard, although one shard may have a row more than another."""
    world_size = reader.loader.world.size
    if capacity < math.ceil(reader.table.num_rows / world_size):
        return math.ceil(capacity / batch_size)
    return len(reader.loader_of(batch_size))


def _check_num_epochs(state_dict: dict[str, Any], num_epochs: int | None) -> None:
    """Raise CheckpointError if a state was made with another `num_epochs`."""
    made_with = state_dict.get("num_epochs", 1)
    if made_with != num_epochs:
        raise CheckpointError(
            f"The checkpoint was made with num_epochs={made_with}, not {num_epochs}, so its position means other rows. Use "
            f"num_epochs={made_with} to resume."
        )
