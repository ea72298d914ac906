"""Prefetching of windows: the windows that a rank's batches need are loaded ahead of time, in reader threads.

A rank has one window of each of its streams open, and loads a few more ahead. A window is dropped when no later batch needs
it. So memory is bounded by the open windows and the windows ahead, whatever the size of the table.

Images are dropped row by row as they are handed out. So their next windows are loaded one after another as memory becomes
free. They take little more memory than the open windows when full. Over a network, which takes longer, they take a quarter
more.

At the beginning, each batch looks twice as far ahead as the batch before it. So the cores decode the first batches before
they load more.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from footplate.data.order.plan import WindowSlice
from footplate.data.order.row_order import RowOrder
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.row_group_reader import RowGroupReader
from footplate.data.pipeline.windows import ReadSpec, Window, load_window
from footplate.data.table import Table
from footplate.distributed.world import World

_LOOK_AHEAD_BATCHES = 256
# Where rows are dropped one by one: the share of a window by which its successor is loaded early.
_EARLY = 0.25


class WindowPrefetcher:
    """Loads the windows that a rank's batches need, ahead of time and in the order of need.

    Args:
        table: the table.
        spec: the columns to read.
        epoch: the order of rows.
        world: rank and world size of this process.
        start: the first batch that will be asked for.
        pool: the reader threads.
        buffers: memory for windows.
    """

    def __init__(
        self,
        table: Table,
        spec: ReadSpec,
        epoch: RowOrder,
        world: World,
        start: int,
        pool: ThreadPoolExecutor,
        buffers: Buffers,
    ) -> None:
        self._table, self._spec, self._epoch = table, spec, epoch
        self._world = world
        self._pool = pool
        self._buffers = buffers
        self._batches = epoch.num_batches(world.size)
        # The windows of all batches before this one have been requested.
        self._requested = start
        # The slices of the batches that were requested and not taken yet.
        self._slices: deque[list[WindowSlice]] = deque()
        self._windows: dict[int, Future[Window]] = {}
        # The rows of each window that were not handed out yet.
        self._left: dict[int, int] = {}
        # The windows that a batch has taken rows from. A later batch may need them again, even if the next one doesn't.
        self._begun: set[int] = set()
        # How many batches to look ahead.
        starts_slowly = spec.images and not table.is_remote
        self._reach = 0 if starts_slowly else _LOOK_AHEAD_BATCHES
        # For each stream whose next window continues a row group: its reader, and the window that is read before.
        self._open: dict[int, tuple[RowGroupReader, Future[Window]]] = {}

    def take(self, batch: int) -> tuple[list[WindowSlice], dict[int, Window]]:
        """Return the slices of the next batch and their windows, and wait for these. Call this for each batch in turn."""
        for number in [number for number in self._windows if self._epoch.last_batch(number) < batch]:
            del self._windows[number], self._left[number]
            self._begun.discard(number)

        if not self._slices:
            self._request(self._next_slices())
        slices = self._slices.popleft()
        needed = {part.window for part in slices}
        self._begun |= needed
        for part in slices:
            self._left[part.window] -= part.stop - part.start

        # Look ahead while there is memory. The windows that no batch has finished remain open.
        remaining = {number for number in self._begun if self._left[number]} or needed
        while self._requested < self._batches and self._requested - batch < self._reach:
            following = self._next_slices()
            if not self._load_ahead(following, remaining):
                break
            self._request(following)
        self._reach = min(max(1, 2 * self._reach), _LOOK_AHEAD_BATCHES)
        return slices, {number: self._windows[number].result() for number in needed}

    def _next_slices(self) -> list[WindowSlice]:
        return self._epoch.window_slices(self._requested, self._world.rank, self._world.size)

    def _load_ahead(self, slices: list[WindowSlice], remaining: set[int]) -> bool:
        """Start to load the windows of some slices. Return False if there is no memory for all of them."""
        for part in slices:
            if not self._has_room(remaining, part.window):
                return False
            self._load(part.window)
        return True

    def _has_room(self, remaining: set[int], window: int) -> bool:
        """Return True if a window may be loaded (or is already) while the windows `remaining` are handed out."""
        if window in self._windows:
            return True
        if not self._spec.images:
            return len(self._windows) < len(remaining) + max(1, len(remaining) // 2)
        held_rows, new_rows = sum(self._left.values()), self._epoch.window_rows(window)
        streams = {self._epoch.window_stream(number) for number in remaining}
        open_rows = sum(map(self._epoch.largest_window, streams))
        early_rows = _EARLY * (open_rows if self._table.is_remote else new_rows)
        return held_rows + new_rows <= max(open_rows, new_rows) + early_rows

    def _request(self, slices: list[WindowSlice]) -> None:
        self._requested += 1
        self._slices.append(slices)
        for part in slices:
            self._load(part.window)

    def _load(self, window: int) -> None:
        """Start to load a window, unless it is loading already."""
        if window in self._windows:
            return
        self._left[window] = self._epoch.window_rows(window)

        # A window that continues a row group shares the reader of the window before it, and must wait for that window.
        stream = self._epoch.window_stream(window)
        opened = self._open.pop(stream, None)
        if opened is None or not self._epoch.continues_row_group(window):
            reader, previous = RowGroupReader(self._table, self._spec.names, bool(self._spec.images)), None
        else:
            reader, previous = opened

        loading = self._pool.submit(_load_after, previous, reader, self._spec, self._epoch, window, self._buffers)
        self._windows[window] = loading
        if self._epoch.continues_row_group(window + 1):
            self._open[stream] = reader, loading


def _load_after(
    previous: Future[Window] | None,
    reader: RowGroupReader,
    spec: ReadSpec,
    epoch: RowOrder,
    number: int,
    buffers: Buffers,
) -> Window:
    """Load a window after `previous`, which shares its reader. The pool starts windows in order, so this can't deadlock."""
    if previous is not None:
        previous.result()
    return load_window(reader, spec, epoch, number, buffers)
