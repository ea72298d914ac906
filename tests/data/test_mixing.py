"""Tables are mixed by their weights, in the same rows on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.core.errors import ConfigError, DataError
from footplate.data.order.mixed_epoch import MixedEpoch, MixedOrder
from footplate.data.order.mixing import Mixing, Mode, Phase, parse_weights

NAMES = ["a", "b", "c"]


@st.composite
def schedules(draw: st.DrawFn) -> list[Phase]:
    """One to three phases of three tables. In the last one, every table has a weight."""
    starts = sorted(draw(st.sets(st.integers(1, 12), max_size=2)))
    phases = {start: draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)) for start in (0, *starts)}
    phases[max(phases)] = draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    return parse_weights({start: dict(zip(NAMES, values, strict=True)) for start, values in phases.items()}, NAMES)


@st.composite
def epochs(draw: st.DrawFn) -> MixedEpoch:
    """Tables of few rows in small row groups, in a few streams and windows."""
    counts = [np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)), np.int64) for _ in NAMES]
    streams = [(draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))) for _ in NAMES]
    order = MixedOrder(
        draw(schedules()),
        draw(st.integers(4, 20)),
        "max_size_cycle",
        draw(st.integers(0, 3)),
        draw(st.booleans()),
        streams,
    )
    return MixedEpoch(counts, NAMES, order, draw(st.integers(0, 2)))


def rows(epoch: MixedEpoch, batch: int, rank: int = 0, world: int = 1) -> list[tuple[int, ...]]:
    """The table, row group and row of each row of a rank's batch."""
    return [
        (number, *row) for number, table in enumerate(epoch.tables) for row in table.rows(batch, rank, world).tolist()
    ]


@given(schedules(), st.integers(1, 40), st.integers(0, 30))
def test_every_place_has_one_table(phases: list[Phase], batch_size: int, batch: int) -> None:
    mixing = Mixing(phases, batch_size)
    for place in range(batch_size):
        before, after = mixing.rows_before(batch, place), mixing.rows_before(batch, place + 1)
        (table,) = np.flatnonzero(after - before)
        assert after.sum() == batch * batch_size + place + 1
        assert mixing.batch_of(int(table), int(before[table])) == batch
    assert (mixing.rows_before(batch, batch_size) == mixing.rows_before(batch + 1)).all()


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.integers(1, 64), st.integers(1, 5000))
def test_a_table_has_its_weight_of_any_number_of_batches(values: list[int], batch_size: int, batches: int) -> None:
    weights = np.array(values) / sum(values)
    given_rows = Mixing([Phase(0, tuple(weights))], batch_size).rows_before(batches)
    # A pattern of 10,000 places rounds the weights.
    rounding = 1 + batches * batch_size / 10_000
    assert np.abs(given_rows - weights * batches * batch_size).max() <= len(values) / 2 + rounding


@given(epochs(), st.integers(1, 4))
@settings(deadline=None)
def test_ranks_share_the_rows_of_a_batch_evenly(epoch: MixedEpoch, world: int) -> None:
    for batch in range(min(epoch.num_batches(), 6)):
        shares = [rows(epoch, batch, rank, world) for rank in range(world)]
        assert sorted(row for share in shares for row in share) == sorted(rows(epoch, batch))
        assert [len(share) for share in shares] == [epoch.rank_rows(batch, rank, world) for rank in range(world)]


@given(epochs())
@settings(deadline=None)
def test_a_table_is_read_once_before_it_begins_again(epoch: MixedEpoch) -> None:
    everything = [row for batch in range(epoch.num_batches()) for row in rows(epoch, batch)]
    for number in range(len(NAMES)):
        of_table = [row for row in everything if row[0] == number]
        passes = len(of_table) // epoch.tables[number].num_rows
        assert {of_table.count(row) for row in of_table} <= {passes, passes + 1}


@given(epochs())
@settings(deadline=None)
def test_an_epoch_ends_when_the_last_table_has_been_read_once(epoch: MixedEpoch) -> None:
    batches = [rows(epoch, batch) for batch in range(epoch.num_batches())]
    seen = {row for batch in batches for row in batch}
    before = {row for batch in batches[:-1] for row in batch}
    for number, table in enumerate(epoch.tables):
        assert len({row for row in seen if row[0] == number}) == table.num_rows
    assert before < seen


@given(epochs())
@settings(deadline=None)
def test_a_window_is_not_needed_after_its_last_batch(epoch: MixedEpoch) -> None:
    for table in epoch.tables:
        for batch in range(epoch.num_batches()):
            assert all(table.last_batch(part.window) >= batch for part in table.window_slices(batch))


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 4), ("max_size_cycle", 10)])
def test_modes_end_with_the_first_or_the_last_table(mode: Mode, batches: int) -> None:
    # Half of a batch of ten is of each table.
    order = MixedOrder(parse_weights({"a": 1, "b": 1}, ["a", "b"]), 10, mode, 0, True, [(1, 1), (1, 1)])
    assert MixedEpoch([np.array([24]), np.array([50])], ["a", "b"], order, 0).num_batches() == batches


def test_a_batch_mixes_within_its_places() -> None:
    (phase,) = parse_weights({"a": 5, "b": 3, "c": 2}, NAMES)
    assert "".join(NAMES[table] for table in phase.pattern[:20]) == "abcaabacbaabcaabacba"


def test_a_table_without_weight_has_no_rows_in_its_phase() -> None:
    mixing = Mixing(parse_weights({0: {"a": 1, "b": 1}, 3: {"a": 1, "b": 0}, 5: {"a": 0, "b": 1}}, ["a", "b"]), 8)
    per_batch = [(mixing.rows_before(batch + 1) - mixing.rows_before(batch)).tolist() for batch in range(7)]
    assert per_batch == [[4, 4]] * 3 + [[8, 0]] * 2 + [[0, 8]] * 2


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, "expected a weight for each of the tables a, b, c"),
        ({"a": 1, "b": 1}, "weights: expected a weight for each of the tables a, b, c; got 'a', 'b'"),
        ({"a": 1, "b": -1, "c": 1}, "expected numbers of at least 0, not all 0"),
        ({"a": 0, "b": 0, "c": 0}, "not all 0"),
        ({"a": 1, "b": 1, "c": 1e-5}, "the weight of 'c' is 5e-06 of all, and the smallest is 1 / 10000"),
        ({1: {"a": 1, "b": 1, "c": 1}}, "begin at batches 1. Expected integers, of which the first is 0"),
        ({0: {"a": 1, "b": 1, "c": 1}, 9: 3}, r"weights\[9\]: expected a weight for each"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_weights(weights, NAMES)


def test_an_epoch_without_end_or_batches_is_refused() -> None:
    phases = parse_weights({0: {"a": 1, "b": 1}, 3: {"a": 1, "b": 0}}, ["a", "b"])
    counts, names = [np.array([20]), np.array([20])], ["a", "b"]
    with pytest.raises(ConfigError, match=r"table 'b' has 20 rows, and its weight becomes 0.*never end"):
        MixedEpoch(counts, names, MixedOrder(phases, 4, "max_size_cycle", 0, False, [(1, 1)] * 2), 0)
    assert MixedEpoch(counts, names, MixedOrder(phases, 4, "min_size", 0, False, [(1, 1)] * 2), 0).num_batches() == 6
    with pytest.raises(DataError, match=r"Table 'a' has 20 rows, and a global batch of 80 takes 40 of it"):
        MixedEpoch(counts, names, MixedOrder(phases, 80, "min_size", 0, False, [(1, 1)] * 2), 0)
    with pytest.raises(DataError, match="can't be shared by 5 ranks"):
        MixedEpoch(counts, names, MixedOrder(phases, 4, "min_size", 0, False, [(1, 1)] * 2), 0).num_batches(5)
