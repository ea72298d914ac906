"""Making a batch: columns put together at once, images decoded and rows transformed in small tasks.

`begin` is called by the feeder thread and returns quickly; `finish` is called where the batch is taken, and waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from footplate.core.errors import DataError
from footplate.data.order.plan import WindowSlice
from footplate.data.pipeline import row_transform
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.decoded_cache import CachedImages
from footplate.data.pipeline.encoded_images import EncodedImages
from footplate.data.pipeline.images import BadImage, decode, decode_into
from footplate.data.pipeline.recipe import Recipe
from footplate.data.pipeline.row_workers import RowError, Workers
from footplate.data.pipeline.windows import Window, slices_of
from footplate.data.table import Table

_ROWS_PER_TASK = 32

Bad = tuple[int, str]  # a row of a batch, and why it can't be used
Views = Sequence[np.ndarray | None]  # encoded images; empty where a complete cache makes them needless


@dataclass
class Making:
    """A batch in the making.

    Attributes:
        values: what is there already, or will be written into by the tasks.
        pieces: where its rows come from.
        windows: that they lie in.
        bad: rows known to be bad.
        tasks: the first row and the result of each task.
    """

    values: dict[str, Any]
    pieces: list[WindowSlice]
    windows: dict[int, Window]
    bad: list[Bad]
    tasks: list[tuple[int, Future[Any]]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows, bad ones included."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def places(self) -> np.ndarray:
        """Row group and row of each row, (rows, 2)."""
        return np.concatenate([self.windows[piece.window].places(piece.start, piece.stop) for piece in self.pieces])


class Maker:
    """Turns pieces of windows into batches.

    Args:
        table: where rows come from.
        recipe: what they become.
        epoch: its number, for the row generators.
        decoders: the threads that decode and transform.
        caches: the decoded caches of image columns.
        buffers: where batches find memory.
        workers: the processes that transform; None when the decoders do.
    """

    def __init__(
        self,
        table: Table,
        recipe: Recipe,
        epoch: int,
        decoders: ThreadPoolExecutor,
        caches: Mapping[str, CachedImages],
        buffers: Buffers,
        workers: Workers | None,
    ) -> None:
        self._table, self._recipe, self._epoch = table, recipe, epoch
        self._decoders, self._caches = decoders, caches
        self._buffers, self._workers = buffers, workers
        self._first_row = np.concatenate([[0], np.cumsum([group.num_rows for group in table.row_groups])])
        self._with_rng = recipe.transform is not None and row_transform.takes_rng(recipe.transform)

    def begin(self, pieces: list[WindowSlice], windows: dict[int, Window]) -> Making:
        """Put a batch's columns together and hand its images and rows to the decoders."""
        making = Making({}, pieces, windows, _null_rows(pieces, windows))
        for columns in self._recipe.content.columns:
            making.values.update(columns.collate(slices_of(columns.names[0], pieces, windows), self._buffers))
        if self._recipe.transform is None and not self._recipe.content.images:
            return making
        places = making.places()
        numbers = self._first_row[places[:, 0]] + places[:, 1]  # of each row in the table, (rows,)
        encoded = {name: _views(name, pieces, windows) for name in self._recipe.content.images}
        if self._recipe.transform is None:
            for name, views in encoded.items():
                images = making.values[name] = self._buffers.tensor((len(places), *self._recipe.shapes[name]))
                self._submit(making, self._fill, name, views, numbers, images.numpy())
        else:
            plain = row_transform.unbatch(making.values, len(places), self._recipe.content.ragged)
            making.values = {}
            self._submit(making, self._transform, plain, encoded, places, numbers)
        return making

    def finish(self, making: Making) -> tuple[dict[str, Any], int]:
        """Wait for a batch's tasks; returns it, and how many bad rows were left out.

        Raises:
            DataError: a bad row (unless they are skipped), or a batch of nothing else.
        """
        bad = dict(making.bad)
        transformed: list[row_transform.Row | None] = []
        for start, task in making.tasks:
            results, failed = task.result()
            transformed += results
            bad.update({start + number: reason for number, reason in failed})
        if bad and not self._recipe.content.skip:
            number, reason = min(bad.items())
            raise DataError(
                f"The image of {self._where(making, number)} can't be decoded: {reason}. Mend or delete the row, or "
                'pass on_error="skip" to leave such rows out and count them.'
            )
        if self._recipe.transform is None and not bad:
            return _in_order(making.values, self._table.columns), 0
        good = [number for number in range(making.num_rows) if number not in bad]
        if not good:
            raise DataError(
                f"Not one row of a batch can be used (the first is {self._where(making, 0)}: {bad[0]}), so there is no "
                "batch to hand out."
            )
        if self._recipe.transform is not None:
            kept = [row for number in good if (row := transformed[number]) is not None]
            return row_transform.collate(kept, self._recipe.content.ragged), len(bad)
        values = {name: _pick(value, good) for name, value in making.values.items()}
        return _in_order(values, self._table.columns), len(bad)

    def _submit(self, making: Making, task: Any, *arguments: Any) -> None:
        """Cut sequences of a batch's rows into small tasks; a name is passed on as it is, a dict item by item."""
        for start in range(0, making.num_rows, _ROWS_PER_TASK):
            span = slice(start, start + _ROWS_PER_TASK)
            cut = [argument if isinstance(argument, str) else _cut(argument, span) for argument in arguments]
            making.tasks.append((start, self._decoders.submit(task, *cut)))

    def _fill(self, name: str, views: Views, numbers: np.ndarray, out: np.ndarray) -> tuple[list[Any], list[Bad]]:
        """Decode some images of a column into `out`."""
        if name in self._caches:
            return [], self._caches[name].fill(views, numbers, out)
        return [], decode_into(views, self._recipe.formats[name], out)

    def _transform(
        self, plain: list[row_transform.Row], encoded: dict[str, Views], places: np.ndarray, numbers: np.ndarray
    ) -> tuple[list[row_transform.Row | None], list[Bad]]:
        """Decode and transform some rows; None for those that can't be decoded."""
        decoded: dict[int, row_transform.Row] = {}
        bad: list[Bad] = []
        for at, row in enumerate(plain):
            try:
                images = {name: self._image(name, views[at : at + 1], numbers[at]) for name, views in encoded.items()}
            except BadImage as error:
                bad.append((at, str(error)))
                continue
            decoded[at] = {name: {**row, **images}[name] for name in self._table.columns}
        good = list(decoded)
        transformed = self._transform_rows(list(decoded.values()), places[good], numbers[good].tolist())
        for row, place in zip(transformed, places[good], strict=True):
            if not isinstance(row, dict):
                raise DataError(
                    f"transform= returned a {type(row).__name__} for the row {self._table.where(*place.tolist())}: it has "
                    "to return a dict."
                )
        found = dict(zip(good, transformed, strict=True))
        return [found.get(at) for at in range(len(plain))], bad

    def _image(self, name: str, view: Views, number: np.integer) -> torch.Tensor:
        """One image as a transform gets it: (channels, height, width), red first."""
        if name in self._caches:
            out = np.empty((1, *self._recipe.shapes[name]), np.uint8)
            for _, reason in self._caches[name].fill(view, np.array([number]), out):
                raise BadImage(reason)
            return torch.from_numpy(out[0])
        image = decode(view[0], self._recipe.formats[name])
        return torch.from_numpy(image[None] if image.ndim == 2 else image[:, :, ::-1].transpose(2, 0, 1).copy())

    def _transform_rows(
        self, decoded: list[row_transform.Row], places: np.ndarray, numbers: list[int]
    ) -> list[row_transform.Row]:
        if self._workers is None:
            return [self._transform_row(*one) for one in zip(decoded, places, numbers, strict=True)]
        try:
            return self._workers.run(decoded, numbers, self._epoch)
        except RowError as failed:
            self._note(failed.error, places[failed.at])
            raise failed.error from None

    def _transform_row(self, row: row_transform.Row, place: np.ndarray, number: int) -> row_transform.Row:
        transform = self._recipe.transform
        assert transform is not None
        try:
            if self._with_rng:
                return transform(row, rng=row_transform.row_generator(self._recipe.seed, self._epoch, number))
            return transform(row)
        except Exception as error:
            self._note(error, place)
            raise

    def _note(self, error: BaseException, place: np.ndarray) -> None:
        error.add_note(f"This was in transform=, for the row {self._table.where(*place.tolist())}.")

    def _where(self, making: Making, number: int) -> str:
        return self._table.where(*making.places()[number].tolist())


def _null_rows(pieces: list[WindowSlice], windows: dict[int, Window]) -> list[Bad]:
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


def _views(name: str, pieces: list[WindowSlice], windows: dict[int, Window]) -> Views:
    blocks: list[tuple[EncodedImages | None, int, int]] = [
        (windows[piece.window].blocks.get(name), piece.start, piece.stop) for piece in pieces
    ]
    return [view for block, start, stop in blocks if block is not None for view in block.take(start, stop)]


def _cut(argument: Any, span: slice) -> Any:
    return {name: value[span] for name, value in argument.items()} if isinstance(argument, dict) else argument[span]


def _pick(values: Any, chosen: list[int]) -> Any:
    return values[chosen] if isinstance(values, torch.Tensor) else [values[row] for row in chosen]


def _in_order(values: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    first = [name for column in columns for name in (column, f"{column}_length") if name in values]
    return {name: values[name] for name in first}
