from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.plan import StopRule, TuningPlan
from footplate.jobs.tuning.stopping import why_stop

NAN = float("nan")


def a_plan(rule: StopRule, goal: str = "MAXIMIZE") -> TuningPlan:
    return TuningPlan(goal, "accuracy", (), 100, 4, 0, "", rule, 0)


def a_trial(values: Sequence[float], state: TrialState = TrialState.ACTIVE, number: int = 9) -> Trial:
    series = tuple((10.0 * (index + 1), value) for index, value in enumerate(values))
    return Trial("t", number, f"t_trial_{number}", state, {}, series)


def finished(*series: Sequence[float]) -> list[Trial]:
    return [a_trial(values, TrialState.SUCCEEDED, number) for number, values in enumerate(series, 1)]


OTHERS = finished([0.1, 0.5, 0.6], [0.2, 0.6, 0.7], [0.3, 0.7, 0.8])


def test_without_a_rule_no_trial_is_stopped():
    assert why_stop(a_plan(""), a_trial([NAN]), OTHERS) == ""


def test_a_trial_worse_than_the_median_is_stopped():
    why = why_stop(a_plan("median"), a_trial([0.1, 0.3]), OTHERS)
    assert why == "at step 20 its best accuracy is 0.3, and the median of 3 trials is 0.4"
    assert why_stop(a_plan("median"), a_trial([0.1, 0.4]), OTHERS) == ""
    assert why_stop(a_plan("median", "MINIMIZE"), a_trial([0.5, 0.45]), OTHERS) != ""


def test_one_bad_measurement_after_a_good_one_stops_no_trial():
    assert why_stop(a_plan("median"), a_trial([0.5, 0.0]), OTHERS) == ""


def test_only_trials_that_ran_to_their_end_are_compared_and_at_least_three():
    plan, trial = a_plan("median"), a_trial([0.0, 0.0])
    assert why_stop(plan, trial, OTHERS[:2]) == ""
    running = [a_trial([0.9, 0.9], TrialState.ACTIVE), a_trial([0.9, 0.9], TrialState.STOPPED_EARLY)]
    assert why_stop(plan, trial, [*OTHERS[:2], *running]) == ""


@pytest.mark.parametrize("rule", ["median", "asha"])
def test_a_trial_that_diverges_is_stopped_at_once(rule: StopRule):
    assert why_stop(a_plan(rule), a_trial([0.9, NAN]), []) == "accuracy is nan at step 20"


def test_successive_halving_keeps_the_best_third_at_each_rung():
    others = [a_trial([value], number=number) for number, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.5])]
    assert why_stop(a_plan("asha"), a_trial([0.45]), others) == ""
    why = why_stop(a_plan("asha"), a_trial([0.35]), others)
    assert why == "at step 10, measurement 1, its accuracy 0.35 is number 3 of 6"
    # Between two rungs, it is judged by the last rung that it reached.
    assert why_stop(a_plan("asha"), a_trial([0.45, 0.0]), others) == ""


def test_a_third_measurement_is_compared_with_third_measurements():
    others = [a_trial([0.0, 0.0, value], number=number) for number, value in enumerate([0.7, 0.8, 0.9])]
    assert why_stop(a_plan("asha"), a_trial([0.5, 0.5, 0.95]), others) == ""
    assert "measurement 3, its accuracy 0.6 is number 4 of 4" in why_stop(
        a_plan("asha"), a_trial([0.5, 0.5, 0.6]), others
    )


@given(
    st.sampled_from(["median", "asha"]), st.sampled_from(["MAXIMIZE", "MINIMIZE"]),
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), max_size=8), st.integers(1, 9),
)  # fmt: skip
def test_the_best_trial_is_never_stopped(rule: StopRule, goal: str, series: list[list[float]], length: int):
    best = a_trial([2.0 if goal == "MAXIMIZE" else -1.0] * length)
    assert why_stop(a_plan(rule, goal), best, finished(*series)) == ""
