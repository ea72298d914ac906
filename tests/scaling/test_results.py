"""Results derived from a study's figures: medians, efficiency, Amdahl's serial share, and the limit of useful devices."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.scaling.results import (
    Size,
    Spread,
    Training,
    base_of,
    serial_share,
    spread,
    stops_paying,
    summarise,
)

seconds = st.floats(0.01, 1e4)
shares = st.floats(0, 1)


def by_amdahl(share: float, k: int) -> float:
    return 1 / (share + (1 - share) / k)


def trained(times: dict[int, float], samples: int | None = 1000) -> tuple[Size, ...]:
    """The sizes of a study with one training each."""
    trainings = [Training(np, 0, wall_s=time + 1, seconds=time, samples=samples) for np, time in times.items()]
    return summarise(trainings, dict.fromkeys(times, 1.0))


@given(st.lists(seconds, min_size=1, max_size=9))
def test_quartiles_enclose_the_median_and_lie_among_the_values(values):
    quartiles = spread(values)
    assert min(values) <= quartiles.low <= quartiles.median <= quartiles.high <= max(values)


def test_what_is_not_known_has_no_spread_and_does_not_count():
    assert spread([None, None]) is None
    assert spread([None, 2.0]) == Spread(2.0, 2.0, 2.0)


@given(shares, st.sets(st.sampled_from([2, 3, 4, 8, 16, 64]), min_size=1))
def test_the_serial_share_of_a_training_that_obeys_amdahls_law_is_found_again(share, sizes):
    assert math.isclose(serial_share({k: by_amdahl(share, k) for k in sizes}), share, abs_tol=1e-9)


@given(st.dictionaries(st.integers(1, 64).map(float), st.floats(0.01, 100), max_size=5))
def test_a_serial_share_is_a_share_and_needs_a_second_size(speedups):
    share = serial_share(speedups)
    assert (share is None) == (not any(k > 1 for k in speedups))
    assert share is None or 0 <= share <= 1


@given(shares, shares)
def test_less_speed_means_a_larger_serial_share(one, other):
    if by_amdahl(one, 4) >= by_amdahl(other, 4):
        assert serial_share({4: by_amdahl(one, 4)}) <= serial_share({4: by_amdahl(other, 4)}) + 1e-9


@given(seconds, st.integers(2, 64))
def test_twice_as_many_that_are_twice_as_fast_have_efficiency_1(time, np):
    base, size = trained({1: time, np: time / np})
    assert (base.speedup, base.efficiency) == (1, 1)
    assert math.isclose(size.speedup, np)
    assert math.isclose(size.efficiency, 1)


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8]), seconds, min_size=1), st.floats(0.1, 10))
def test_efficiency_does_not_depend_on_how_fast_the_machine_is(times, by):
    for one, other in zip(trained(times), trained({np: by * time for np, time in times.items()}), strict=True):
        assert math.isclose(one.efficiency, other.efficiency, rel_tol=1e-9)


def test_efficiency_goes_by_throughput_so_that_one_that_stops_early_is_not_taken_for_fast():
    trainings = [Training(1, 0, seconds=10, samples=1000), Training(2, 0, seconds=2, samples=400)]
    assert summarise(trainings, {1: 1.0, 2: 2.0})[1].efficiency == 1.0  # 200 a second, not 5 times as fast


def test_where_nobody_counts_samples_efficiency_goes_by_time():
    assert trained({1: 10.0, 2: 6.25}, samples=None)[1].efficiency == 0.8


def test_the_base_is_the_smallest_size_that_succeeded():
    trainings = [Training(1, 0, failure="MemoryError"), Training(2, 0, seconds=4.0), Training(4, 0, seconds=2.0)]
    sizes = summarise(trainings, {1: 1.0, 2: 2.0, 4: 4.0})
    assert base_of(sizes) is sizes[1]
    assert (sizes[0].done, sizes[0].failures, sizes[0].efficiency) == (0, ("MemoryError",), None)
    assert sizes[2].efficiency == 1.0


def test_a_repeat_that_failed_is_told_beside_those_that_did_not():
    trainings = [Training(1, 0, seconds=4.0), Training(1, 1, failure="lost"), Training(1, 2, failure="lost")]
    (size,) = summarise(trainings, {1: 1.0})
    assert (size.done, size.failures, size.seconds.median) == (1, ("lost",), 4.0)


@given(st.lists(st.floats(0.05, 1.2), min_size=1, max_size=4))
def test_it_stops_paying_at_the_first_size_below_one_half_or_no_faster_than_the_one_before(efficiencies):
    times = {1: 8.0, **{2**n: 8.0 / (2**n * efficiency) for n, efficiency in enumerate(efficiencies, 1)}}
    sizes = trained(times)
    end = stops_paying(sizes)
    worth = [size.np for size in sizes if end is None or size.np < end.np]
    assert all(times[more] < times[fewer] for fewer, more in pairwise(worth))
    assert all(size.efficiency >= 0.5 for size in sizes if size.np in worth)
    if end is not None:
        before = max(np for np in times if np < end.np)
        assert end.efficiency < 0.5 or end.speedup <= trained(times)[worth.index(before)].speedup


def test_phases_are_medians_and_a_step_is_what_a_batch_takes():
    trainings = [
        Training(1, n, seconds=10, batches=20, phases={"step": step, "data": 1.0, "validation": 0.0, "other": 0.0})
        for n, step in enumerate([4.0, 6.0, 9.0])
    ]
    (size,) = summarise(trainings, {1: 1.0})
    assert size.phases["step"] == 6.0
    assert size.step_s == pytest.approx(0.3)
    assert sum(size.shares.values()) == pytest.approx(1)
