"""The loader: batches of a table for one rank, and a position of a few integers.

    loader = Loader(table, batch_size=64, shuffle=True, seed=1, image_size=224)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:                        # {"image": uint8 (64, 3, 224, 224), "label": int64 (64,)}
            ...
            state = loader.state_dict()             # the position after this batch

After `loader.load_state_dict(state)`, the next `iter(loader)` continues after that batch, at once and exactly, also with
another number of ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal

from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data.argument_checks import check_count
from footplate.data.batch_loader import BatchLoader, available_cores
from footplate.data.lengths import RowLengths
from footplate.data.order.grouping import GroupedEpoch
from footplate.data.order.plan import Epoch, Order
from footplate.data.order.stream_sizes import choose_megabatch, choose_streams, choose_window_rows
from footplate.data.packing.table import PackedTable
from footplate.data.pipeline.batch_pipeline import BatchPipeline
from footplate.data.pipeline.batch_spec import BatchSpec, make_batch_spec
from footplate.data.pipeline.decoded_cache import CachedImages, DecodedCache
from footplate.data.pipeline.images import ImageMode, parse_size
from footplate.data.pipeline.row_transform import Transform, takes_rng
from footplate.data.pipeline.row_workers import RowWorkers
from footplate.data.table import Table
from footplate.distributed.consistency import digest
from footplate.distributed.world import World

# With prefetch="auto": rows of pending batches for each thread, and bytes of pending batches, encoded and decoded.
_PENDING_ROWS = 64
_PENDING_BYTES = 64 * 2**20
# What the state of a loader says that doesn't group by length.
_NOT_GROUPED = {"group_by_length": None, "megabatch": 0, "lengths": ""}


class Loader(BatchLoader):
    """Batches of a table, as dicts of column to tensor. `footplate.data.pipeline.columns` shows what each type becomes.

    The order is a pure function of the table, the seed, the epoch and the global batch (`footplate.data.order.plan`). With
    `group_by_length`, it also depends on the lengths of the rows (`footplate.data.order.grouping`).

    Args:
        table: the rows.
        batch_size: rows of this rank's batch. A global batch has `batch_size * world.size` rows.
        shuffle: True for a new order each epoch; False for the table's order.
        seed: seed of the order, and of the generators that `transform` gets; not negative.
        drop_last: leave out the rows that don't fill a global batch. Otherwise they are the last, smaller batch.
        group_by_length: a column. The rows of a batch then have similar lengths in it, so that little of a batch is
            padding. Its values are lists, strings, bytes, or integers that are lengths. It needs `shuffle`.
        world: rank and world size of this process. By default they are read from the environment when first needed.
        image_size: pixels, or (height, width). Images are scaled to cover this size, and cropped to its centre. Without it,
            they keep their size, which must be the same for all.
        image_mode: "RGB", "L" (grey), or "auto": one channel if the table's first image is grey, else three. "bytes" leaves
            images encoded.
        transform: a function of a row, or of (row, rng). See `footplate.data.pipeline.row_transform`.
        on_error: what to do with a row that has an undecodable image or a null number. "raise" is an error, "skip" leaves
            the row out and counts it in `skipped`.
        num_threads: how many threads decode. "auto" uses the cores of this process, shared among the node's ranks.
        prefetch: how many batches are made ahead. "auto" uses as many as keep the threads busy.
        num_workers: how many processes call `transform`, for a transform that is slow and holds Python's lock. With 0, the
            threads call it. The results are the same. See `footplate.data.pipeline.row_workers`.
        pin_memory: put the tensors of batches into page-locked memory. Copies from it to a CUDA device don't block the
            host. It has no effect without a CUDA device, and for transformed rows. With None, the trainer decides: yes
            on CUDA. Without a trainer, None means no.
        cache: a local directory that keeps decoded images from the first epoch on, which needs `image_size`
            (`footplate.data.pipeline.decoded_cache`); and the lengths of rows for `group_by_length`.

    Raises:
        DataError: an empty table, nulls without a meaning, images that can't be decoded, or a column of an unsupported
            type.
        ConfigError: an invalid argument.

    Examples:
        >>> loader = fp.Loader(fp.Table("flowers.parquet"), batch_size=4, shuffle=True, seed=1)
        >>> [batch["label"].shape for batch in loader]
        [torch.Size([4]), torch.Size([4])]
    """

    def __init__(
        self,
        table: Table,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        group_by_length: str | None = None,
        world: World | None = None,
        image_size: int | Sequence[int] | None = None,
        image_mode: ImageMode = "auto",
        transform: Transform | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        num_threads: int | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        num_workers: int = 0,
        pin_memory: bool | None = None,
        cache: DecodedCache | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(batch_size, world, pin_memory, num_threads, prefetch)
        _check(table, seed, transform, on_error)
        self.table = table
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.group_by_length = group_by_length
        self._num_workers = check_count("num_workers", num_workers, least=0)
        if num_workers and transform is None:
            raise ConfigError(
                f"num_workers={num_workers}: worker processes call transform=, and there is no transform. Decoding uses "
                "threads: set num_threads= instead."
            )

        self._spec = make_batch_spec(table, parse_size(image_size), image_mode, transform, on_error == "skip", seed)
        self._rows = table.group_rows
        group_bytes = [group.nbytes for group in table.row_groups if group.num_rows]
        self._streams, self._window = choose_streams(group_bytes, table.in_memory) if shuffle else (1, 1)
        in_pieces = bool(self._spec.read.images) and not table.in_memory
        self._window_rows = choose_window_rows(group_bytes, table.num_rows, self._streams) if in_pieces else 0

        cache = DecodedCache(cache) if isinstance(cache, (str, os.PathLike)) else cache
        if cache is not None and image_size is None and group_by_length is None:
            raise ConfigError("cache= keeps images of one size: give image_size= too.")
        self._cache = None if image_size is None else cache
        self._lengths: RowLengths | None = None
        if group_by_length is not None:
            _check_grouping(table, group_by_length, shuffle)
            self._lengths = RowLengths(table, group_by_length, None if cache is None else cache.directory)
        self._megabatch = 0
        self._caches: dict[str, CachedImages] | None = None
        self._workers: RowWorkers | None = None

    @property
    def padded_columns(self) -> list[str]:
        """The columns of padded lists. A batch also has their lengths."""
        return self._spec.read.ragged

    @property
    def threads(self) -> int:
        """How many threads decode and transform rows."""
        return max(self._num_threads or available_cores(self.world), self._num_workers)

    @property
    def decodes(self) -> list[str]:
        """The image columns that it decodes, in the first epoch at least."""
        return list(self._spec.formats)

    @property
    def transforms(self) -> bool:
        """True if rows go through a `transform`."""
        return self._spec.transform is not None

    @property
    def content(self) -> str:
        """Text that must be the same on every rank. Each node may have copies of the files."""
        table = self.table
        order = "shuffled" if self.shuffle else "in order"
        plan = (self._rows.tolist(), self.drop_last, self._streams, self._window, self._window_rows, self._grouping())
        grouped = "" if self.group_by_length is None else f", grouped by the length of {self.group_by_length!r}"
        return (
            f"{table.num_rows} rows of {table.digest.shared}, {order} by seed {self.seed}{grouped}, "
            f"{self.global_batch_size} over all ranks at a time [{digest(plan)}]"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out. Batches that were made ahead don't count."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "batch_size": self.batch_size,
            "global_batch_size": self.global_batch_size,
            "streams": self._streams,
            "window": self._window,
            "window_rows": self._window_rows,
            **self._grouping(),
            "table": self.table.digest.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a loader of the same table, seed and batch size.

        With another number of ranks, the global batch stays the same, so a rank's share of it changes.

        Raises:
            CheckpointError: the state is of another table, seed or batch size, or of rows with other lengths.
        """
        # States of earlier versions are of loaders that don't group.
        state_dict = {**_NOT_GROUPED, **state_dict}
        missing = self.state_dict().keys() - state_dict.keys()
        if missing:
            raise CheckpointError(
                f"This is no state of a Loader: it has no {', '.join(sorted(missing))}. If it is from an earlier version "
                "of Footplate, resume with that version, since its order of rows is another."
            )

        self.table.digest.check_resumed(state_dict["table"])
        self._check_settings(state_dict, ("seed", "shuffle", "drop_last", "group_by_length"))
        if state_dict["lengths"] != self._grouping()["lengths"]:
            raise CheckpointError(
                f"The checkpoint was made with other lengths in the column {self.group_by_length!r} of {self.table.uri}, "
                "so its position means other rows. The files, or the lengths in cache=, have changed: give the files of "
                "that run and an empty cache= to resume, or begin a new run."
            )

        self._megabatch = state_dict["megabatch"]
        self._streams, self._window = state_dict["streams"], state_dict["window"]
        self._window_rows = state_dict["window_rows"]
        self._continue_at(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_caches": None, "_workers": None}

    def _plan(self, epoch: int) -> Epoch:
        windows = self._streams, self._window, self._window_rows
        order = Order(self.global_batch_size, self.seed, self.shuffle, self.drop_last, *windows)
        if self._lengths is None:
            return Epoch(self._rows, order, epoch)
        return GroupedEpoch(self._rows, order, epoch, self._lengths.values, self._megabatch or self._choose_megabatch())

    def _grouping(self) -> dict[str, Any]:
        """Return what the order depends on beside the settings of other loaders, for a checkpoint."""
        if self._lengths is None:
            return _NOT_GROUPED
        return {
            "group_by_length": self.group_by_length,
            "megabatch": self._megabatch or self._choose_megabatch(),
            "lengths": self._lengths.digest,
        }

    def _choose_megabatch(self) -> int:
        group_bytes = [group.nbytes for group in self.table.row_groups if group.num_rows]
        return choose_megabatch(group_bytes, self.table.num_rows, self.global_batch_size)

    def _open(self, plan: Epoch, start: int) -> BatchPipeline:
        threads = self.threads
        rows_of_rank = max(1, self.global_batch_size // self.world.size)
        prefetch = self._prefetch or choose_prefetch(self.table, self._spec, rows_of_rank, threads)
        caches, workers = self._open_caches(), self._open_workers()
        return BatchPipeline(
            self.table,
            self._spec,
            plan,
            start,
            self.world,
            threads,
            prefetch,
            caches,
            workers,
            bool(self.pin_memory),
            self.busy,
        )

    def _open_caches(self) -> dict[str, CachedImages]:
        if self._caches is None:
            spec, digest, rows = self._spec, self.table.digest, self.table.num_rows
            self._caches = {
                name: self._cache.open(digest, name, format, spec.shapes[name][1:], rows)
                for name, format in spec.formats.items()
                if self._cache is not None
            }
        return self._caches

    def _open_workers(self) -> RowWorkers | None:
        """Return the worker processes, which stay from epoch to epoch."""
        if not self._num_workers:
            return None
        if self._workers is None or not self._workers.is_alive:
            assert self._spec.transform is not None
            self._workers = RowWorkers(self._spec.transform, self.seed, self._num_workers)
        return self._workers


def choose_prefetch(table: Table, spec: BatchSpec, rows: int, threads: int) -> int:
    """Return how many batches to make ahead: enough to keep the threads busy, within a limit of memory.

    Args:
        table: the rows.
        spec: what a batch holds.
        rows: the number of rows of a batch.
        threads: how many threads decode and transform.
    """
    encoded = sum(group.nbytes for group in table.row_groups) / table.num_rows
    decoded = sum(math.prod(shape) for shape in spec.shapes.values())
    if isinstance(table, PackedTable):
        decoded += table.sequence_bytes
    fitting = _PENDING_BYTES / (rows * (1 + encoded + decoded))
    return int(min(64, max(3, min(fitting, 1 + threads * _PENDING_ROWS // rows))))


def _check_grouping(table: Table, column: str, shuffle: bool) -> None:
    """Refuse to group rows whose order or lengths are fixed, and a flag such as that of Hugging Face's `Trainer`."""
    if not isinstance(column, str):
        raise ConfigError(
            f"group_by_length={column!r}: expected the name of a column: one of {', '.join(table.columns)}, or no argument."
        )
    if not shuffle:
        raise ConfigError(
            f"group_by_length={column!r} changes the order of the rows, and shuffle=False keeps it: pass shuffle=True to "
            "train, or leave group_by_length= out to evaluate."
        )
    if isinstance(table, PackedTable):
        raise ConfigError(
            f"group_by_length={column!r}: the rows of a packed table all have {table.packing.sequence_length} tokens. "
            "Leave group_by_length= out, or give the table of documents, not packed."
        )


def _check(table: Table, seed: int, transform: Transform | None, on_error: str) -> None:
    """Refuse invalid arguments of a loader, and a table without rows."""
    check_count("seed", seed, least=0)
    if on_error not in ("raise", "skip"):
        raise ConfigError(f'on_error={on_error!r}: expected "raise" or "skip".')
    if transform is not None:
        takes_rng(transform)
    if table.num_rows == 0:
        filtered = ", or its filter leaves none." if len(table.files) else "."
        raise DataError(f"{table.uri}: the table has no rows{filtered} Give a table with rows, or another filter.")
