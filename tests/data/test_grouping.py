"""The rows of a batch have similar lengths. The order stays a partition of the table, the same for any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.data.order.grouping import GroupedEpoch
from footplate.data.order.plan import Epoch, Order
from footplate.data.order.stream_sizes import choose_megabatch

ROWS_PER_GROUP = 200

# The arguments of a `GroupedEpoch`.
Arguments = tuple[np.ndarray, Order, int, np.ndarray, int]


@st.composite
def orders(draw: st.DrawFn) -> tuple[Arguments, int]:
    """An order of small row groups in streams and windows, and a number of ranks."""
    rows = np.array(draw(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)))
    world = draw(st.integers(1, min(9, int(rows.sum()))))
    order = Order(
        batch_size=draw(st.integers(world, 64)),
        seed=draw(st.integers(0, 2**40)),
        shuffle=True,
        streams=draw(st.sampled_from([1, 2, 4, 8, 64])),
        window=draw(st.integers(1, 4)),
        window_rows=draw(st.sampled_from([0, 1, 7, 30])),
    )
    longest = draw(st.sampled_from([1, 5, 500]))
    lengths = np.random.default_rng(draw(st.integers(0, 9))).integers(0, longest, rows.sum(), np.int32)
    return (rows, order, draw(st.integers(0, 2)), lengths, draw(st.sampled_from([1, 3, 50]))), world


def large(lengths: np.ndarray, batch_size: int, epoch: int = 1) -> GroupedEpoch:
    """The order of a table with the streams of a large one."""
    rows = np.full(len(lengths) // ROWS_PER_GROUP, ROWS_PER_GROUP)
    return GroupedEpoch(rows, Order(batch_size, 3, True, streams=16), epoch, lengths, 50)


def documents(count: int) -> np.ndarray:
    """Lengths of documents, most of them short and a few long."""
    return np.random.default_rng(0).lognormal(5, 0.7, count).astype(np.int32) + 1


def global_batch(epoch: Epoch, batch: int, world: int = 1) -> list[tuple[int, int]]:
    ranks = [epoch.rows(batch, rank, world) for rank in range(world)]
    return [(group, row) for rows in ranks for group, row in rows.tolist()]


def lengths_of(epoch: GroupedEpoch, rows: np.ndarray) -> np.ndarray:
    return epoch._lengths[epoch._first_row[rows[:, 0]] + rows[:, 1]]


def padding(lengths: list[np.ndarray]) -> float:
    """The share of padding in some batches."""
    return 1 - sum(part.sum() for part in lengths) / sum(len(part) * part.max() for part in lengths)


@given(orders())
@settings(max_examples=50, deadline=None)
def test_the_ranks_hand_out_every_row_exactly_once(drawn: tuple[Arguments, int]) -> None:
    arguments, world = drawn
    epoch = GroupedEpoch(*arguments)
    handed_out = [row for batch in range(epoch.num_batches(world)) for row in global_batch(epoch, batch, world)]
    assert len(handed_out) == len(set(handed_out)) == epoch.num_rows


@given(orders())
@settings(max_examples=50, deadline=None)
def test_batches_and_shares_are_as_many_and_as_large_as_without_grouping(drawn: tuple[Arguments, int]) -> None:
    arguments, world = drawn
    grouped, plain = GroupedEpoch(*arguments), Epoch(*arguments[:3])
    assert grouped.num_batches(world) == plain.num_batches(world)
    for batch in range(grouped.num_batches(world)):
        sizes = [len(grouped.rows(batch, rank, world)) for rank in range(world)]
        assert sizes == [plain.rank_rows(batch, rank, world) for rank in range(world)]


@given(orders(), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_global_batch_is_the_same_list_of_rows_for_any_number_of_ranks(
    drawn: tuple[Arguments, int], other: int
) -> None:
    arguments, world = drawn
    epoch = GroupedEpoch(*arguments)
    other = min(other, epoch.num_rows, epoch.order.batch_size)
    for batch in range(min(epoch.num_batches(world), epoch.num_batches(other)) - 1):
        assert global_batch(epoch, batch, world) == global_batch(epoch, batch, other)


@given(orders(), st.data())
@settings(max_examples=50, deadline=None)
def test_any_batch_is_known_without_the_batches_before_it(drawn: tuple[Arguments, int], data: st.DataObject) -> None:
    arguments, world = drawn
    epoch = GroupedEpoch(*arguments)
    batches = [global_batch(epoch, batch, world) for batch in range(epoch.num_batches(world))]
    batch = data.draw(st.integers(0, len(batches) - 1))
    assert global_batch(GroupedEpoch(*arguments), batch, world) == batches[batch]


@given(orders())
@settings(max_examples=50, deadline=None)
def test_the_batches_of_a_megabatch_divide_its_sorted_lengths(drawn: tuple[Arguments, int]) -> None:
    epoch = GroupedEpoch(*drawn[0])
    assert np.diff(epoch._edges).max() <= drawn[0][-1]
    for first, stop in pairwise(epoch._edges.tolist()):
        batches = sorted(sorted(lengths_of(epoch, epoch.rows(batch)).tolist()) for batch in range(first, stop))
        in_order = [length for batch in batches for length in batch]
        assert in_order == sorted(in_order)


@given(orders())
@settings(max_examples=50, deadline=None)
def test_a_megabatch_has_the_rows_that_its_batches_have_without_grouping(drawn: tuple[Arguments, int]) -> None:
    rows, order, _, lengths, megabatch = drawn[0]
    # Epoch 0 begins with the row group of the longest row.
    grouped, plain = GroupedEpoch(rows, order, 1, lengths, megabatch), Epoch(rows, order, 1)
    for first, stop in pairwise(grouped._edges.tolist()):
        expected, handed_out = (
            {row for batch in range(first, stop) for row in global_batch(epoch, batch)} for epoch in (plain, grouped)
        )
        assert handed_out == expected
    if grouped.tail:
        assert global_batch(grouped, grouped.full_batches) == global_batch(plain, plain.full_batches)


@given(orders())
@settings(max_examples=50, deadline=None)
def test_a_batch_takes_one_slice_of_a_window_which_is_not_needed_after_its_last_batch(
    drawn: tuple[Arguments, int],
) -> None:
    arguments, world = drawn
    epoch = GroupedEpoch(*arguments)
    for batch in range(epoch.full_batches - 1):
        for rank in range(world):
            windows = [part.window for part in epoch.window_slices(batch, rank, world)]
            assert len(set(windows)) == len(windows)
            assert all(epoch.last_batch(window) >= batch for window in windows)


@given(orders())
@settings(max_examples=50, deadline=None)
def test_the_first_batch_of_epoch_0_has_the_longest_row(drawn: tuple[Arguments, int]) -> None:
    rows, order, _, lengths, megabatch = drawn[0]
    # Row groups are read whole, and streams are longer than a row group.
    order = replace(order, window_rows=0, streams=1)
    epoch = GroupedEpoch(rows, order, 0, lengths, megabatch)
    assert lengths_of(epoch, epoch.rows(0)).max() == lengths.max()


def test_seed_and_epoch_change_the_batches() -> None:
    lengths = documents(20 * ROWS_PER_GROUP)
    rows = np.full(20, ROWS_PER_GROUP)
    batches = {
        tuple(global_batch(GroupedEpoch(rows, Order(16, seed, True), epoch, lengths, 10), 5))
        for seed in (1, 2)
        for epoch in (1, 2)
    }
    assert len(batches) == 4


def test_batches_of_a_megabatch_are_in_random_order() -> None:
    lengths = documents(50 * ROWS_PER_GROUP)
    epoch = large(lengths, 32)
    means = [lengths_of(epoch, epoch.rows(batch)).mean() for batch in range(epoch.full_batches)]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


@pytest.mark.parametrize("sorted_by_length", [False, True])
def test_little_of_a_batch_is_padding_on_every_rank_also_if_row_groups_differ(sorted_by_length: bool) -> None:
    lengths = documents(80 * ROWS_PER_GROUP)
    grouped = large(np.sort(lengths) if sorted_by_length else lengths, 64)
    plain = Epoch(np.full(80, ROWS_PER_GROUP), grouped.order, 1)
    before, after = (
        [
            lengths_of(grouped, epoch.rows(batch, rank, 4))
            for batch in range(0, grouped.full_batches, 3)
            for rank in range(4)
        ]
        for epoch in (plain, grouped)
    )
    assert padding(before) > 0.4
    assert padding(after) < 0.1


@pytest.mark.parametrize(
    ("sorted_by_length", "shuffled", "each_stream", "all_streams"),
    [(False, 0.72, 0.30, 0.10), (True, 0.72, 0.72, 0.05)],
)
def test_sorting_all_streams_together_leaves_less_padding_than_sorting_each_stream(
    sorted_by_length: bool, shuffled: float, each_stream: float, all_streams: float
) -> None:
    lengths = documents(160 * ROWS_PER_GROUP)
    rows, order = np.full(160, ROWS_PER_GROUP), Order(32, 3, True, streams=32)
    plain = Epoch(rows, order, 1)
    grouped = GroupedEpoch(rows, order, 1, np.sort(lengths) if sorted_by_length else lengths, 50)
    before, after = (
        [lengths_of(grouped, epoch.rows(batch)) for batch in range(plain.full_batches)] for epoch in (plain, grouped)
    )
    # A batch has one row of each stream, so a column of 50 batches is a part of one stream.
    columns = [np.sort(np.stack(before[first : first + 50]), axis=0) for first in range(0, plain.full_batches, 50)]
    alone = [batch for megabatch in columns for batch in megabatch]
    assert padding(before) == pytest.approx(shuffled, abs=0.01)
    assert padding(alone) == pytest.approx(each_stream, abs=0.01)
    assert padding(after) == pytest.approx(all_streams, abs=0.01)


def test_no_rank_waits_for_the_long_rows_of_another_rank() -> None:
    epoch = large(documents(80 * ROWS_PER_GROUP), 64)
    longest = np.array(
        [
            [lengths_of(epoch, epoch.rows(batch, rank, 4)).max() for rank in range(4)]
            for batch in range(0, epoch.full_batches, 3)
        ]
    )
    assert 1 - longest.mean() / longest.max(axis=1).mean() < 0.05


@pytest.mark.parametrize(
    ("row_bytes", "rows", "batch_size", "megabatch"),
    [
        (2_000, 100_000, 32, 50),
        (2_000, 1_000_000, 4096, 16),  # 128 MiB of rows
        (1_000_000, 1_000_000, 512, 8),  # large batches are grouped, too
        (2_000, 1000, 32, 7),  # a small table has at least four megabatches
        (2_000, 40, 32, 1),
    ],
)
def test_a_megabatch_is_bounded_by_its_batches_its_size_and_the_table(
    row_bytes: int, rows: int, batch_size: int, megabatch: int
) -> None:
    assert choose_megabatch([row_bytes * rows], rows, batch_size) == megabatch
