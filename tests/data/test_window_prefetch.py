"""Windows are loaded ahead of time, and few of them are in memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from footplate.data import Table
from footplate.data.order.grouping import GroupedEpoch
from footplate.data.order.plan import Epoch, Order
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.columns import columns_for
from footplate.data.pipeline.window_prefetch import WindowPrefetcher
from footplate.data.pipeline.windows import ReadSpec
from footplate.distributed.world import World

from .conftest import image_rows

STREAMS, ROWS_PER_GROUP = 4, 10


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """400 rows in row groups of ten."""
    pq.write_table(image_rows(0, 400).select(["image", "id"]), tmp_path / "t.parquet", row_group_size=ROWS_PER_GROUP)
    return Table(str(tmp_path / "t.parquet"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def schedule(
    table: Table, images: tuple[str, ...], pool: ThreadPoolExecutor, window_rows: int = 0
) -> tuple[WindowPrefetcher, Epoch]:
    columns = columns_for([pa.field("id", pa.int64())])
    epoch = Epoch(np.full(40, ROWS_PER_GROUP), Order(8, shuffle=True, streams=STREAMS, window_rows=window_rows), 0)
    return WindowPrefetcher(table, ReadSpec(columns, images, False), epoch, World(), 0, pool, Buffers()), epoch


@pytest.mark.parametrize("window_rows", [0, 5])
def test_of_images_little_more_is_held_than_the_open_windows(
    table: Table, pool: ThreadPoolExecutor, window_rows: int
) -> None:
    prefetcher, epoch = schedule(table, ("image",), pool, window_rows)
    rows = window_rows or ROWS_PER_GROUP
    taken, held = [], []
    for batch in range(epoch.num_batches()):
        pieces, windows = prefetcher.take(batch)
        held.append(sum(prefetcher._left.values()))
        for piece in pieces:
            images = windows[piece.window].blocks["image"].take(piece.start, piece.stop)
            assert all(image is not None for image in images)
            taken += windows[piece.window].blocks["id"][0, piece.start : piece.stop].tolist()
    assert sorted(taken) == list(range(400))
    assert max(held) <= (STREAMS + 0.25) * rows
    assert np.mean(held[:40]) > 0.8 * STREAMS * rows, "the next windows are loaded late"


def test_nothing_is_read_ahead_beside_the_first_batches_of_images(table: Table, pool: ThreadPoolExecutor) -> None:
    prefetcher, _ = schedule(table, ("image",), pool)
    loaded = [prefetcher.take(batch) and len(prefetcher._windows) for batch in range(3)]
    assert loaded == [STREAMS] * 3
    prefetcher.take(3)
    assert len(prefetcher._windows) > STREAMS


def test_of_columns_half_as_many_windows_as_are_open_are_loaded_ahead(table: Table, pool: ThreadPoolExecutor) -> None:
    prefetcher, epoch = schedule(table, (), pool)
    loaded = []
    for batch in range(epoch.num_batches()):
        prefetcher.take(batch)
        loaded.append(len(prefetcher._windows))
    assert max(loaded) == STREAMS + STREAMS // 2


def test_windows_of_grouped_rows_are_loaded_ahead_although_a_batch_needs_few_of_the_open_ones(
    table: Table, pool: ThreadPoolExecutor
) -> None:
    lengths = np.random.default_rng(0).integers(0, 100, 400, np.int32)
    epoch = GroupedEpoch(np.full(40, ROWS_PER_GROUP), Order(8, shuffle=True, streams=STREAMS), 1, lengths, 10)
    spec = ReadSpec(columns_for([pa.field("id", pa.int64())]), (), False)
    prefetcher = WindowPrefetcher(table, spec, epoch, World(0, 4), 0, pool, Buffers())
    late, loaded, taken = [], [], []
    for batch in range(epoch.num_batches()):
        requested = set(prefetcher._windows)
        slices, windows = prefetcher.take(batch)
        late.append(not windows.keys() <= requested)
        loaded.append(len(prefetcher._windows))
        for part in slices:
            taken += windows[part.window].blocks["id"][0, part.start : part.stop].tolist()
    assert sorted(taken) == sorted(row[0] * 10 + row[1] for b in range(50) for row in epoch.rows(b, 0, 4).tolist())
    assert sum(late[10:]) <= 2, "batches wait for windows that nobody has requested"
    # A megabatch has 20 rows of each stream.
    assert max(loaded) <= 3 * 2 * STREAMS
