from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from footplate.jobs.tuning.space import (
    LOG,
    REVERSE_LOG,
    Parameter,
    combinations,
    nth_combination,
    position_of,
    to_argument,
    to_text,
    value_at,
)

POSITIONS = st.floats(0.0, 1.0)
POSITIVE = st.floats(1e-300, 1e300)
NUMBERS = st.floats(-1e300, 1e300)
WHOLE = st.integers(-(10**9), 10**9)


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    kind, scale = draw(st.sampled_from(["DOUBLE", "INTEGER", "DISCRETE", "CATEGORICAL"])), draw(SCALES)
    if kind == "DISCRETE":
        return Parameter("p", kind, values=tuple(sorted(draw(st.sets(NUMBERS, min_size=1, max_size=9)))), scale=scale)
    if kind == "CATEGORICAL":
        return Parameter("p", kind, values=tuple(draw(st.lists(st.text(), min_size=1, max_size=9, unique=True))))
    if scale in (LOG, REVERSE_LOG):
        ends = draw(st.tuples(POSITIVE, POSITIVE) if kind == "DOUBLE" else st.tuples(*[st.integers(1, 10**9)] * 2))
    else:
        ends = draw(st.tuples(NUMBERS, NUMBERS) if kind == "DOUBLE" else st.tuples(WHOLE, WHOLE))
    return Parameter("p", kind, float(min(ends)), float(max(ends)), scale=scale)


SCALES = st.sampled_from(["", "NONE", "UNIT_LINEAR_SCALE", LOG, REVERSE_LOG])


@given(parameters(), POSITIONS)
def test_a_value_is_always_one_that_the_parameter_may_have(parameter: Parameter, position: float):
    value = value_at(parameter, position)
    if parameter.values:
        assert value in parameter.values
    else:
        assert isinstance(value, int if parameter.type == "INTEGER" else float)
        assert parameter.low <= value <= parameter.high


@given(parameters(), POSITIONS)
def test_a_value_and_its_position_belong_together(parameter: Parameter, position: float):
    value = value_at(parameter, position)
    again = position_of(parameter, value)
    assert 0.0 <= again <= 1.0
    if parameter.type == "DOUBLE":
        span = parameter.high - parameter.low
        assert math.isclose(value_at(parameter, again), value, rel_tol=1e-6, abs_tol=span * 1e-9)
    else:
        assert value_at(parameter, again) == value


@given(parameters(), POSITIONS, POSITIONS)
def test_a_larger_position_has_no_smaller_value(parameter: Parameter, one: float, other: float):
    if parameter.type != "CATEGORICAL":
        assert value_at(parameter, min(one, other)) <= value_at(parameter, max(one, other))


@given(parameters())
def test_all_values_are_within_reach(parameter: Parameter):
    if (count := parameter.count) is not None and count < 1_000:
        values = [parameter.nth(index) for index in range(count)]
        assert [value_at(parameter, position_of(parameter, value)) for value in values] == values
    elif parameter.type == "DOUBLE":
        tolerance = {"rel_tol": 1e-9, "abs_tol": (parameter.high - parameter.low) * 1e-9}
        assert math.isclose(value_at(parameter, 0.0), parameter.low, **tolerance)
        assert math.isclose(value_at(parameter, 1.0), parameter.high, **tolerance)


@given(NUMBERS | WHOLE)
@example(2.0**53)
@example(-0.0)
def test_a_program_reads_the_number_that_was_chosen(value: float):
    assert float(to_text(value)) == value


@pytest.mark.parametrize(
    ("value", "argument"),
    [(0.001, "--p=0.001"), (16.0, "--p=16"), (16.5, "--p=16.5"), (3, "--p=3"), ("a b", "--p=a b"), (1e-7, "--p=1e-07")],
)
def test_arguments(value: float | str, argument: str):
    assert to_argument("p", value) == argument


def test_a_scale_spreads_the_values():
    ends = {"low": 1e-4, "high": 1.0}
    middle = {scale: value_at(Parameter("p", "DOUBLE", **ends, scale=scale), 0.5) for scale in ("", LOG, REVERSE_LOG)}
    assert middle[""] == pytest.approx(0.50005)
    assert middle[LOG] == pytest.approx(0.01)
    assert middle[REVERSE_LOG] == pytest.approx(1.0 + 1e-4 - 0.01)


def test_whole_numbers_have_equal_shares():
    parameter = Parameter("p", "INTEGER", 1, 4)
    values = [value_at(parameter, index / 1000) for index in range(1000)]
    assert [values.count(value) for value in (1, 2, 3, 4)] == [250, 250, 250, 250]


def test_combinations_are_counted_and_each_is_another():
    space = [Parameter("a", "INTEGER", 1, 3), Parameter("b", "CATEGORICAL", values=("x", "y"))]
    assert combinations(space) == 6
    assert len({tuple(nth_combination(space, index).values()) for index in range(6)}) == 6
    assert combinations([*space, Parameter("c", "DOUBLE", 0.0, 1.0)]) is None
    assert combinations([*space, Parameter("c", "DOUBLE", 1.0, 1.0)]) == 6
