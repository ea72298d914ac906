"""Building a batch: columns are collated at once, images are decoded and rows transformed in small tasks.

The feeder thread calls `begin`, which returns quickly. The consumer calls `finish`, which waits for the tasks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from footplate.core.errors import DataError
from footplate.data.order.plan import WindowSlice
from footplate.data.pipeline.batch_spec import BatchSpec
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.decoded_cache import CachedImages
from footplate.data.pipeline.encoded_images import EncodedImages
from footplate.data.pipeline.images import BadImage, decode, decode_into
from footplate.data.pipeline.row_transform import Row, collate, row_generator, takes_rng, unbatch
from footplate.data.pipeline.row_workers import RowError, RowWorkers
from footplate.data.pipeline.windows import Window, block_slices
from footplate.data.table import Table

_ROWS_PER_TASK = 32

# A row of a batch, and the reason why it can't be used.
BadRow = tuple[int, str]
# Encoded images; empty if a complete cache makes them unnecessary.
Encoded = Sequence[np.ndarray | None]


@dataclass
class PendingBatch:
    """A batch whose tasks may still run.

    Attributes:
        values: the values of the batch. Tasks may still write into them.
        slices: the slices of windows that its rows are in.
        windows: the windows.
        bad: rows known to be bad.
        tasks: the first row and the result of each task.
    """

    values: dict[str, Any]
    slices: list[WindowSlice]
    windows: dict[int, Window]
    bad: list[BadRow]
    tasks: list[tuple[int, Future[Any]]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """The number of rows, bad rows included."""
        return sum(part.stop - part.start for part in self.slices)

    def addresses(self) -> np.ndarray:
        """Return the row group of each row, and its number there, (rows, 2)."""
        return np.concatenate([self.windows[part.window].addresses(part.start, part.stop) for part in self.slices])


class Busy:
    """The time that tasks take, of all passes over a loader.

    Attributes:
        wall_s: seconds in tasks, of all threads together.
        cpu_s: seconds in which these threads computed, and held no lock that another thread had.
    """

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Busy], tuple[()]]:
        # Another process, and a copy, count for themselves.
        return Busy, ()

    def timed(self, task: Callable[..., Any], *arguments: Any) -> Any:
        """Run a task, and count its time."""
        began, computed = time.perf_counter(), time.thread_time()
        try:
            return task(*arguments)
        finally:
            with self._lock:
                self.wall_s += time.perf_counter() - began
                self.cpu_s += time.thread_time() - computed


class BatchBuilder:
    """Builds batches from slices of windows.

    Args:
        table: the table.
        spec: how its rows become batches.
        epoch: the number of the epoch, for the row generators.
        decoders: the threads that decode and transform.
        caches: the decoded caches of image columns.
        buffers: memory for batches.
        workers: the processes that transform; None if the decoders do.
        busy: counts the time of tasks.
    """

    def __init__(
        self,
        table: Table,
        spec: BatchSpec,
        epoch: int,
        decoders: ThreadPoolExecutor,
        caches: Mapping[str, CachedImages],
        buffers: Buffers,
        workers: RowWorkers | None,
        busy: Busy,
    ) -> None:
        self._table, self._spec, self._epoch = table, spec, epoch
        self._decoders, self._caches = decoders, caches
        self._buffers, self._workers, self._busy = buffers, workers, busy
        # (groups + 1,): the number in the table of each row group's first row
        self._first_row = np.concatenate([[0], np.cumsum(table.group_rows)])
        self._with_rng = spec.transform is not None and takes_rng(spec.transform)

    def begin(self, slices: list[WindowSlice], windows: dict[int, Window]) -> PendingBatch:
        """Collate a batch's columns, and hand its images and rows to the decoders.

        Without slices, the batch is empty: a table of a mixture may have no row in it.
        """
        batch = PendingBatch({}, slices, windows, _null_rows(slices, windows))
        if not slices:
            return batch
        for columns in self._spec.read.columns:
            batch.values.update(columns.collate(block_slices(columns.names[0], slices, windows), self._buffers))
        if self._spec.transform is None and not self._spec.read.images:
            return batch

        addresses = batch.addresses()
        # numbers: (rows,), the number of each row in the table
        numbers = self._first_row[addresses[:, 0]] + addresses[:, 1]
        encoded = {name: _take_encoded(name, slices, windows) for name in self._spec.read.images}
        if self._spec.transform is None:
            for name, column in encoded.items():
                images = batch.values[name] = self._buffers.tensor((len(addresses), *self._spec.shapes[name]))
                self._submit(batch, self._fill, name, column, numbers, images.numpy())
        else:
            rows = unbatch(batch.values, len(addresses), self._spec.read.ragged)
            batch.values = {}
            self._submit(batch, self._transform, rows, encoded, addresses, numbers)
        return batch

    def finish(self, batch: PendingBatch) -> tuple[dict[str, Any], int]:
        """Wait for a batch's tasks, and return its values and how many bad rows were left out.

        Raises:
            DataError: a bad row (unless they are skipped), or a batch in which every row is bad.
        """
        bad = dict(batch.bad)
        transformed: list[Row | None] = []
        for start, task in batch.tasks:
            results, bad_rows = task.result()
            transformed += results
            bad.update({start + number: reason for number, reason in bad_rows})

        if bad and not self._spec.read.skip:
            number, reason = min(bad.items())
            raise DataError(
                f"The image of {self._where(batch, number)} can't be decoded: {reason}. Repair or delete the row, or "
                'pass on_error="skip" to leave such rows out and count them.'
            )
        if self._spec.transform is None and not bad:
            return _in_order(batch.values, self._table.columns), 0

        good = [number for number in range(batch.num_rows) if number not in bad]
        if not good:
            raise DataError(
                f"Not one row of a batch can be used (the first is {self._where(batch, 0)}: {bad[0]}), so there is no "
                "batch to hand out. Repair the rows, leave them out with filter=, or use a larger batch_size."
            )
        if self._spec.transform is not None:
            kept = [row for number in good if (row := transformed[number]) is not None]
            return collate(kept, self._spec.read.ragged), len(bad)
        values = {name: _pick(value, good) for name, value in batch.values.items()}
        return _in_order(values, self._table.columns), len(bad)

    def _submit(self, batch: PendingBatch, task: Any, *arguments: Any) -> None:
        """Cut the rows of a batch into small tasks.

        Each argument is cut with the rows: a sequence by its items, a dict by the items of its values. A name isn't cut.
        """
        for start in range(0, batch.num_rows, _ROWS_PER_TASK):
            span = slice(start, start + _ROWS_PER_TASK)
            cut = [argument if isinstance(argument, str) else _cut(argument, span) for argument in arguments]
            batch.tasks.append((start, self._decoders.submit(self._busy.timed, task, *cut)))

    def _fill(
        self, name: str, encoded: Encoded, numbers: np.ndarray, out: np.ndarray
    ) -> tuple[list[Any], list[BadRow]]:
        """Decode some images of a column into `out`."""
        if name in self._caches:
            return [], self._caches[name].fill(encoded, numbers, out)
        return [], decode_into(encoded, self._spec.formats[name], out)

    def _transform(
        self, rows: list[Row], encoded: dict[str, Encoded], addresses: np.ndarray, numbers: np.ndarray
    ) -> tuple[list[Row | None], list[BadRow]]:
        """Decode and transform some rows. The result is None for a row that can't be decoded."""
        decoded: dict[int, Row] = {}
        bad: list[BadRow] = []
        for at, row in enumerate(rows):
            try:
                images = {name: self._image(name, column[at : at + 1], numbers[at]) for name, column in encoded.items()}
            except BadImage as error:
                bad.append((at, str(error)))
                continue
            decoded[at] = _in_order({**row, **images}, self._table.columns)

        good = list(decoded)
        transformed = self._transform_rows(list(decoded.values()), addresses[good], numbers[good].tolist())
        for row, address in zip(transformed, addresses[good], strict=True):
            if not isinstance(row, dict):
                raise DataError(
                    f"transform= returned a {type(row).__name__} for the row {self._table.where(*address.tolist())}. It "
                    "must return a dict."
                )
        results = dict(zip(good, transformed, strict=True))
        return [results.get(at) for at in range(len(rows))], bad

    def _image(self, name: str, encoded: Encoded, number: np.integer) -> torch.Tensor:
        """Decode one image as a transform gets it: (channels, height, width), red first."""
        if name in self._caches:
            out = np.empty((1, *self._spec.shapes[name]), np.uint8)
            for _, reason in self._caches[name].fill(encoded, np.array([number]), out):
                raise BadImage(reason)
            return torch.from_numpy(out[0])
        image = decode(encoded[0], self._spec.formats[name])
        return torch.from_numpy(image[None] if image.ndim == 2 else image[:, :, ::-1].transpose(2, 0, 1).copy())

    def _transform_rows(self, rows: list[Row], addresses: np.ndarray, numbers: list[int]) -> list[Row]:
        if self._workers is None:
            return [self._transform_row(*arguments) for arguments in zip(rows, addresses, numbers, strict=True)]
        try:
            return self._workers.run(rows, numbers, self._epoch)
        except RowError as failure:
            self._note(failure.error, addresses[failure.at])
            raise failure.error from None

    def _transform_row(self, row: Row, address: np.ndarray, number: int) -> Row:
        transform = self._spec.transform
        assert transform is not None
        try:
            if self._with_rng:
                return transform(row, rng=row_generator(self._spec.seed, self._epoch, number))
            return transform(row)
        except Exception as error:
            self._note(error, address)
            raise

    def _note(self, error: BaseException, address: np.ndarray) -> None:
        error.add_note(f"This was in transform=, for the row {self._table.where(*address.tolist())}.")

    def _where(self, batch: PendingBatch, number: int) -> str:
        return self._table.where(*batch.addresses()[number].tolist())


def _null_rows(slices: list[WindowSlice], windows: dict[int, Window]) -> list[BadRow]:
    null_rows: list[BadRow] = []
    first = 0
    for part in slices:
        bad = windows[part.window].bad
        if bad is not None:
            null_rows += [
                (first + int(at), "a number in it is null") for at in np.flatnonzero(bad[part.start : part.stop])
            ]
        first += part.stop - part.start
    return null_rows


def _take_encoded(name: str, slices: list[WindowSlice], windows: dict[int, Window]) -> Encoded:
    """Take the encoded images of a batch out of their windows. They can be taken once."""
    blocks: list[tuple[EncodedImages | None, int, int]] = [
        (windows[part.window].blocks.get(name), part.start, part.stop) for part in slices
    ]
    return [image for block, start, stop in blocks if block is not None for image in block.take(start, stop)]


def _cut(argument: Any, span: slice) -> Any:
    return {name: value[span] for name, value in argument.items()} if isinstance(argument, dict) else argument[span]


def _pick(values: Any, rows: list[int]) -> Any:
    return values[rows] if isinstance(values, torch.Tensor) else [values[row] for row in rows]


def _in_order(values: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    """Put the columns into the order of the table. Other values, such as ids of packed documents, follow."""
    names = [name for column in columns for name in (column, f"{column}_length") if name in values]
    return {name: values[name] for name in (*names, *(name for name in values if name not in names))}
