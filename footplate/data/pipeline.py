"""The threads between a table and the one who asks for batches.

    readers (2) ──windows──► feeder (1) ──decode tasks──► decoders (num_threads) ──► batches, in order

The feeder keeps up to `prefetch` batches in the making: it waits for the windows of the next batch, puts its columns
together, and hands its images to the decoders in small tasks that write straight into the batch's memory. The consumer
takes batches in order, waiting for the tasks of each. Whatever fails, fails where the batch is taken. `close` ends all
threads; nothing is left running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from footplate.data import rows
from footplate.data.columns import BytesBlock
from footplate.data.images import BadImage, decode, decode_into
from footplate.data.plan import Epoch, Piece
from footplate.data.recipe import Recipe
from footplate.data.table import Table
from footplate.data.window import Schedule, Window, slices_of
from footplate.errors import DataError

_READERS = 2
_ROWS_PER_TASK = 32

Bad = tuple[int, str]  # a row of a batch, and why it can't be used


@dataclass
class Making:
    """A batch in the making."""

    values: dict[str, Any]
    places: np.ndarray  # (rows, 2): row group and row of each row
    bad: list[Bad]
    tasks: list[tuple[int, Future[Any]]] = field(default_factory=list)


class Pipeline:
    """The batches of one rank in one epoch, from `start` on.

    Args:
        table: where rows come from.
        recipe: what they become.
        epoch: in which order.
        start: the first batch.
        rank: of this process.
        world: how many ranks.
        threads: how many threads decode and transform.
        prefetch: how many batches may be in the making.
    """

    def __init__(
        self,
        table: Table,
        recipe: Recipe,
        epoch: Epoch,
        start: int,
        rank: int,
        world: int,
        threads: int,
        prefetch: int,
    ) -> None:
        self._table, self._recipe, self._epoch = table, recipe, epoch
        self._batches = range(start, epoch.num_batches(world))
        self._stopped = False
        self._room = threading.Semaphore(prefetch)
        self._made: SimpleQueue[Making | BaseException] = SimpleQueue()
        self._readers = ThreadPoolExecutor(_READERS, "footplate-read")
        self._decoders = ThreadPoolExecutor(threads, "footplate-decode")
        self._schedule = Schedule(table, recipe.content, epoch, rank, world, start, self._readers)
        self._first_row = np.concatenate([[0], np.cumsum([group.num_rows for group in table.row_groups])])
        self._feeder = threading.Thread(target=self._feed, name="footplate-feed", daemon=True)
        self._feeder.start()

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each batch, and how many bad rows were left out of it."""
        for _ in self._batches:
            made = self._made.get()
            if isinstance(made, BaseException):
                raise made
            self._room.release()
            yield self._finish(made)

    def close(self) -> None:
        """Stop all threads and wait for them."""
        self._stopped = True
        self._room.release()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        if self._feeder is not threading.current_thread():
            self._feeder.join()
        self._readers.shutdown()
        self._decoders.shutdown()

    def _feed(self) -> None:
        try:
            for batch in self._batches:
                self._room.acquire()
                if self._stopped:
                    return
                self._made.put(self._begin(*self._schedule.take(batch)))
        except BaseException as error:
            self._made.put(error)

    def _begin(self, pieces: list[Piece], windows: dict[int, Window]) -> Making:
        """Put a batch's columns together and start decoding its images."""
        recipe = self._recipe
        places = np.concatenate(
            [
                np.stack([getattr(windows[p.window], name)[p.start : p.stop] for name in ("group", "row")], 1)
                for p in pieces
            ]
        )
        making = Making({}, places, _null_rows(pieces, windows))
        for column in recipe.content.columns:
            making.values.update(column.collate(slices_of(column.name, pieces, windows)))
        encoded = {
            name: _views(slices_of(name, pieces, windows)) for name in recipe.content.images
        }  # bytes of each image
        spans = [(at, min(at + _ROWS_PER_TASK, len(places))) for at in range(0, len(places), _ROWS_PER_TASK)]
        if recipe.transform is not None:
            plain = rows.unbatch(making.values, len(places))
            making.values = {}
            for start, stop in spans:
                images = {name: views[start:stop] for name, views in encoded.items()}
                task = self._decoders.submit(self._transform, plain[start:stop], images, places[start:stop])
                making.tasks.append((start, task))
            return making
        for name, views in encoded.items():
            format = recipe.formats[name]
            size = format.size or recipe.example_size
            assert size is not None
            images = torch.empty((len(views), format.channels, *size), dtype=torch.uint8)
            making.values[name] = images
            out = images.numpy()
            for start, stop in spans:
                task = self._decoders.submit(decode_into, views[start:stop], format, out[start:stop])
                making.tasks.append((start, task))
        return making

    def _transform(
        self, plain: list[rows.Row], images: dict[str, list[np.ndarray | None]], places: np.ndarray
    ) -> tuple[list[rows.Row | None], list[Bad]]:
        """Decode and transform some rows; None for those that can't be decoded."""
        recipe = self._recipe
        assert recipe.transform is not None
        with_rng = rows.takes_rng(recipe.transform)
        found: list[rows.Row | None] = []
        bad: list[Bad] = []
        for number, row in enumerate(plain):
            try:
                for name, views in images.items():
                    row[name] = _as_tensor(decode(views[number], recipe.formats[name]))
            except BadImage as error:
                found.append(None)
                bad.append((number, str(error)))
                continue
            group, place = places[number].tolist()
            row = {name: row[name] for name in self._table.columns if name in row}
            try:
                if with_rng:
                    rng = rows.row_generator(recipe.seed, self._epoch.epoch, int(self._first_row[group]) + place)
                    found.append(recipe.transform(row, rng=rng))
                else:
                    found.append(recipe.transform(row))
            except Exception as error:
                error.add_note(f"This was in transform=, for the row {self._table.where(group, place)}.")
                raise
        return found, bad

    def _finish(self, making: Making) -> tuple[dict[str, Any], int]:
        """Wait for a batch's tasks, and deal with its bad rows."""
        bad = dict(making.bad)
        transformed: list[rows.Row | None] = []
        for start, task in making.tasks:
            result = task.result()
            if self._recipe.transform is not None:
                transformed += result[0]
                result = result[1]
            bad.update({start + number: reason for number, reason in result})
        if bad and not self._recipe.content.skip:
            number, reason = min(bad.items())
            raise DataError(
                f"The image of {self._where(making, number)} can't be decoded: {reason}. Mend or delete the row, or "
                'pass on_error="skip" to leave such rows out and count them.'
            )
        good = [number for number in range(len(making.places)) if number not in bad]
        if not good:
            raise DataError(
                f"Not one row of a batch can be used (the first is {self._where(making, 0)}: {bad[0]}), so there is no "
                "batch to hand out."
            )
        if self._recipe.transform is not None:
            return rows.collate([row for number in good if (row := transformed[number]) is not None]), len(bad)
        values = making.values if not bad else {name: _pick(value, good) for name, value in making.values.items()}
        return _in_order(values, self._table.columns), len(bad)

    def _where(self, making: Making, number: int) -> str:
        return self._table.where(*making.places[number].tolist())


def _null_rows(pieces: list[Piece], windows: dict[int, Window]) -> list[Bad]:
    found: list[Bad] = []
    first = 0
    for piece in pieces:
        bad = windows[piece.window].bad
        if bad is not None:
            found += [
                (first + int(at), "a number in it is null") for at in np.flatnonzero(bad[piece.start : piece.stop])
            ]
        first += piece.stop - piece.start
    return found


def _views(slices: list[tuple[BytesBlock, int, int]]) -> list[np.ndarray | None]:
    return [view for block, start, stop in slices for view in block.views(start, stop)]


def _as_tensor(image: np.ndarray) -> torch.Tensor:
    """(channels, height, width), red first, of one decoded image."""
    return torch.from_numpy(image[None] if image.ndim == 2 else image[:, :, ::-1].transpose(2, 0, 1).copy())


def _pick(values: Any, rows: list[int]) -> Any:
    return values[rows] if isinstance(values, torch.Tensor) else [values[row] for row in rows]


def _in_order(values: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    first = [name for column in columns for name in (column, f"{column}_length") if name in values]
    return {name: values[name] for name in first}
