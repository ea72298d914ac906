"""The order is a partition of the table, the same for any number of ranks, and can begin at any batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.core.errors import DataError
from footplate.data.order.plan import Epoch, Order
from footplate.data.order.stream_sizes import choose_streams, choose_window_rows


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Epoch, int]:
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda rows: sum(rows) > 0))
    world = draw(st.integers(1, min(9, sum(rows))))
    order = Order(
        batch_size=draw(st.integers(world, 64)),
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.booleans()),
        streams=draw(st.sampled_from([1, 2, 4, 8, 64])),
        window=draw(st.integers(1, 4)),
        window_rows=draw(st.sampled_from([0, 1, 7, 30])),
    )
    return Epoch(np.array(rows), order, draw(st.integers(0, 5))), world


def all_rows(epoch: Epoch) -> set[tuple[int, int]]:
    parts = [part for window in range(epoch.num_windows) for part in epoch.group_slices(window)]
    return {(part.group, row) for part in parts for row in range(part.start, part.stop)}


def global_batch(epoch: Epoch, batch: int, world: int) -> np.ndarray:
    return np.concatenate([epoch.rows(batch, rank, world) for rank in range(world)])


@given(epochs())
@settings(max_examples=150, deadline=None)
def test_the_ranks_hand_out_every_row_exactly_once(drawn: tuple[Epoch, int]) -> None:
    epoch, world = drawn
    seen = [tuple(row) for b in range(epoch.num_batches(world)) for row in global_batch(epoch, b, world).tolist()]
    assert len(seen) == epoch.num_rows
    assert set(seen) == all_rows(epoch)


@given(epochs())
@settings(max_examples=150, deadline=None)
def test_rank_sizes_differ_by_one_row_at_most_and_no_rank_is_left_without(drawn: tuple[Epoch, int]) -> None:
    epoch, world = drawn
    for batch in range(epoch.num_batches(world)):
        sizes = [len(epoch.rows(batch, rank, world)) for rank in range(world)]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert sizes == [epoch.rank_rows(batch, rank, world) for rank in range(world)]
        if batch < epoch.num_batches(world) - 1:
            assert sum(sizes) == epoch.order.batch_size


@given(epochs(), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_a_global_batch_is_the_same_list_of_rows_for_any_number_of_ranks(drawn: tuple[Epoch, int], other: int) -> None:
    epoch, world = drawn
    other = min(other, epoch.num_rows, epoch.order.batch_size)
    for batch in range(min(epoch.num_batches(world), epoch.num_batches(other)) - 1):
        assert np.array_equal(global_batch(epoch, batch, world), global_batch(epoch, batch, other))


@given(epochs(), st.integers(1, 9), st.data())
@settings(max_examples=150, deadline=None)
def test_another_number_of_ranks_may_take_over_at_any_batch(
    drawn: tuple[Epoch, int], other: int, data: st.DataObject
) -> None:
    epoch, world = drawn
    other = min(other, epoch.num_rows, epoch.order.batch_size)
    at = data.draw(st.integers(0, epoch.num_batches(world)))
    before = [global_batch(epoch, batch, world) for batch in range(at)]
    position = epoch.position_after(at - 1, world) if at else 0
    after = [global_batch(epoch, batch, other) for batch in range(position, epoch.num_batches(other))]
    seen = [tuple(row) for batch in before + after for row in batch.tolist()]
    assert len(set(seen)) == len(seen)
    passed_over = epoch.num_rows - len(seen)
    assert passed_over == 0 or (at == epoch.full_batches and passed_over == epoch.tail < other)


@given(epochs())
@settings(max_examples=60, deadline=None)
def test_a_window_is_not_needed_after_its_last_batch(drawn: tuple[Epoch, int]) -> None:
    epoch, world = drawn
    for batch in range(epoch.num_batches(world)):
        for piece in epoch.window_slices(batch, 0, world):
            assert epoch.last_batch(piece.window) >= batch


def test_unshuffled_rows_come_in_the_order_of_the_table() -> None:
    epoch = Epoch(np.array([3, 0, 4]), Order(batch_size=2, streams=4), epoch=7)
    rows = np.concatenate([epoch.rows(batch) for batch in range(epoch.num_batches())])
    assert rows.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [2, 2], [2, 3]]


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    def first(seed: int, epoch: int) -> list[list[int]]:
        return Epoch(np.array([50] * 20), Order(32, seed, True, streams=4), epoch).rows(0).tolist()

    assert first(1, 1) == first(1, 1)
    assert first(1, 1) != first(2, 1)
    assert first(1, 1) != first(1, 2)


def test_drop_last_leaves_out_the_rows_that_fill_no_batch() -> None:
    epoch = Epoch(np.array([10, 11]), Order(4, shuffle=True, drop_last=True), 0)
    assert [epoch.batch_rows(batch) for batch in range(epoch.num_batches())] == [4] * 5


def test_a_tail_of_fewer_rows_than_ranks_joins_the_batch_before_it() -> None:
    epoch = Epoch(np.array([10]), Order(8), 0)
    assert [epoch.batch_rows(b, 1) for b in range(epoch.num_batches(1))] == [8, 2]
    assert [epoch.batch_rows(b, 4) for b in range(epoch.num_batches(4))] == [10]


def opened(epoch: Epoch, rank: int, world: int) -> int:
    """Count the row groups that a rank opens. If a window ends in a row group, the next window continues it."""
    batches = range(epoch.num_batches(world))
    windows = {piece.window for batch in batches for piece in epoch.window_slices(batch, rank, world)}
    return sum(
        len(epoch.group_slices(window)) - (epoch.continues_row_group(window) and window - 1 in windows)
        for window in windows
    )


@pytest.mark.parametrize("world", [1, 2, 8, 64])
@pytest.mark.parametrize("bit_by_bit", [False, True])
def test_reading_costs_at_most_a_tenth_more_than_the_table(world: int, bit_by_bit: bool) -> None:
    group_bytes = [4 * 2**20] * 700
    streams, window = choose_streams(group_bytes)
    most = choose_window_rows(group_bytes, 700 * 157, streams) if bit_by_bit else 0
    epoch = Epoch(np.full(700, 157), Order(512, 3, True, streams=streams, window=window, window_rows=most), 0)
    assert streams == 64
    assert sum(opened(epoch, rank, world) for rank in range(world)) / 700 <= 1.1


@given(epochs())
@settings(max_examples=100, deadline=None)
def test_a_window_goes_on_exactly_where_the_one_before_it_left_a_row_group(drawn: tuple[Epoch, int]) -> None:
    epoch, _ = drawn
    for window in range(1, epoch.num_windows):
        before, first = epoch.group_slices(window - 1)[-1], epoch.group_slices(window)[0]
        inside = (first.group, first.start) == (before.group, before.stop)
        same_stream = epoch.window_stream(window) == epoch.window_stream(window - 1)
        assert epoch.continues_row_group(window) == (inside and same_stream)


def test_large_row_groups_make_several_windows_and_the_first_batch_needs_only_small_ones() -> None:
    epoch = Epoch(np.full(40, 1000), Order(64, 1, True, streams=4, window_rows=600), 0)
    sizes = [[epoch.window_rows(w) for w in range(epoch.num_windows) if epoch.window_stream(w) == s] for s in range(4)]
    assert all(of_stream[:3] == [64, 128, 256] for of_stream in sizes)
    assert {size for of_stream in sizes for size in of_stream[3:]} == {500, 552}
    assert [epoch.largest_window(stream) for stream in range(4)] == [552] * 4
    assert sum(epoch.window_rows(piece.window) for piece in epoch.window_slices(0)) == 4 * 64


def test_windows_of_a_table_in_small_row_groups_are_not_cut_but_for_the_first() -> None:
    epoch = Epoch(np.full(70, 10), Order(2, 1, True, streams=1, window=4, window_rows=1000), 0)
    sizes = [epoch.window_rows(window) for window in range(epoch.num_windows)]
    assert sizes == [8, 16, 16, *[40] * 16, 20]


def test_windows_are_cut_to_bound_what_a_rank_holds_as_long_as_there_are_few_of_them() -> None:
    mib, rows = 2**20, 20_000
    assert choose_window_rows([128 * mib] * 20, rows, streams=2) * 128 * 20 / rows == pytest.approx(24, rel=0.01)  # MiB
    assert choose_window_rows([4 * mib] * 700, 700_000, streams=64) >= 1000, "a row group of 4 MiB stays whole"


@pytest.mark.parametrize("window_rows", [0, 60])
@pytest.mark.parametrize(("streams", "at_most"), [(64, 1 / 55), (8, 1 / 7)])
def test_two_rows_of_a_batch_seldom_come_from_the_same_row_group(
    streams: int, at_most: float, window_rows: int
) -> None:
    epoch = Epoch(np.full(700, 157), Order(512, 3, True, streams=streams, window=1, window_rows=window_rows), 0)
    chances = []
    for batch in range(0, epoch.full_batches, 10):
        counts = np.bincount(epoch.rows(batch)[:, 0])
        chances.append((counts * (counts - 1)).sum() / (512 * 511))
    assert np.mean(chances) < at_most


def test_a_small_table_is_permuted_truly() -> None:
    streams, window = choose_streams([2**20] * 40)
    epoch = Epoch(np.full(40, 100), Order(100, 3, True, streams=streams, window=window), 0)
    line = np.concatenate([epoch.rows(batch) for batch in range(40)])
    places = line[:, 0] * 100 + line[:, 1]
    assert abs(np.corrcoef(places, np.arange(4000))[0, 1]) < 0.05
    distinct = [len(set(epoch.rows(batch)[:, 0].tolist())) for batch in range(40)]
    assert abs(np.mean(distinct) - 40 * (1 - (1 - 1 / 40) ** 100)) < 1


@pytest.mark.parametrize(
    ("rows", "order", "world", "says"),
    [
        ([0], Order(4), 1, "no rows"),
        ([3], Order(8), 4, "3 rows for 4 ranks"),
        ([3], Order(8, drop_last=True), 1, "drop_last=True leaves them out"),
        ([30], Order(2), 3, "can't be shared by 3 ranks"),
    ],
)
def test_a_plan_without_batches_says_why(rows: list[int], order: Order, world: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Epoch(np.array(rows), order, 0).num_batches(world)
