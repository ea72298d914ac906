"""The search for the largest batch."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.planning.largest_batch import guess, ladder, largest

patient = settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no defect


@patient
@given(st.integers(1, 2**20), st.integers(1, 2**20))
def test_enough_tries_find_the_largest_rung(limit, start):
    batch_size = largest(lambda size: size <= limit, start, tries=50)
    assert batch_size == max(rung for rung in ladder(2**20) if rung <= limit)


@patient
@given(st.integers(0, 2**20), st.integers(1, 2**20), st.integers(1, 6))
def test_no_more_tries_than_allowed_and_nothing_that_does_not_fit(limit, start, tries):
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    batch_size = largest(fits, start, tries)
    assert len(asked) == len(set(asked)) <= tries
    assert batch_size is None or batch_size <= limit


def test_nothing_fits():
    assert largest(lambda _: False, 4) is None


@patient
@given(st.integers(1, 1000), st.floats(0, 1e9), st.floats(1, 1e9), st.floats(1, 1e12))
def test_a_guess_is_the_largest_rung_by_proportion(size, fixed, growing, limit):
    guessed = guess(size, fixed, growing, limit)
    fitting = [rung for rung in ladder(2**20) if fixed + growing * rung / size <= limit]
    assert guessed == (max(fitting) if fitting else None)
