from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.plan import StopRule, TuningPlan
from footplate.jobs.tuning.stopping import FACTOR, FEWEST_AT_RUNG, next_to_continue, why_pause, why_stop

NAN = float("nan")


def a_plan(rule: StopRule, goal: str = "MAXIMIZE") -> TuningPlan:
    return TuningPlan(goal, "accuracy", (), 100, 4, 0, "", rule, 0)


def a_trial(values: Sequence[float], state: TrialState = TrialState.ACTIVE, number: int = 9) -> Trial:
    series = tuple((10.0 * (index + 1), value) for index, value in enumerate(values))
    return Trial("t", number, f"t_trial_{number}", state, {}, series)


def finished(*series: Sequence[float]) -> list[Trial]:
    return [a_trial(values, TrialState.SUCCEEDED, number) for number, values in enumerate(series, 1)]


OTHERS = finished([0.1, 0.5, 0.6], [0.2, 0.6, 0.7], [0.3, 0.7, 0.8])


def test_without_a_rule_no_trial_is_stopped_or_paused():
    assert why_stop(a_plan(""), a_trial([NAN]), OTHERS) == ""
    assert why_pause(a_plan(""), a_trial([0.0]), OTHERS) == ""


def test_the_median_rule_pauses_no_trial_and_the_others_stop_none():
    assert why_pause(a_plan("median"), a_trial([0.0]), OTHERS) == ""
    assert why_stop(a_plan("asha"), a_trial([0.0]), OTHERS) == ""
    assert why_stop(a_plan("hyperband"), a_trial([0.0]), OTHERS) == ""


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


@pytest.mark.parametrize("rule", ["median", "asha", "hyperband"])
def test_a_trial_that_diverges_is_stopped_at_once(rule: StopRule):
    assert why_stop(a_plan(rule), a_trial([0.9, NAN]), []) == "accuracy is nan at step 20"


def test_successive_halving_keeps_the_best_third_at_each_rung():
    others = [a_trial([value], number=number) for number, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.5])]
    assert why_pause(a_plan("asha"), a_trial([0.45]), others) == ""
    why = why_pause(a_plan("asha"), a_trial([0.35]), others)
    assert why == "at step 10, measurement 1, its accuracy 0.35 is number 3 of 6"
    # Between two rungs, it is judged by the last rung that it reached.
    assert why_pause(a_plan("asha"), a_trial([0.45, 0.0]), others) == ""


def test_of_two_trials_at_a_rung_the_worse_one_is_paused_and_a_trial_alone_goes_on():
    assert why_pause(a_plan("asha"), a_trial([0.1]), []) == ""
    assert why_pause(a_plan("asha"), a_trial([0.2]), [a_trial([0.1], number=1)]) == ""
    why = why_pause(a_plan("asha"), a_trial([0.1]), [a_trial([0.2], number=1)])
    assert why == "at step 10, measurement 1, its accuracy 0.1 is number 2 of 2"


def test_a_third_measurement_is_compared_with_third_measurements():
    others = [a_trial([0.0, 0.0, value], number=number) for number, value in enumerate([0.7, 0.8, 0.9])]
    assert why_pause(a_plan("asha"), a_trial([0.5, 0.5, 0.95]), others) == ""
    assert "measurement 3, its accuracy 0.6 is number 4 of 4" in why_pause(
        a_plan("asha"), a_trial([0.5, 0.5, 0.6]), others
    )


def test_a_paused_trial_continues_when_enough_worse_trials_have_reached_its_rung():
    plan = a_plan("asha")
    trials = [
        a_trial([0.9], number=1),
        a_trial([0.8], TrialState.PAUSED, 2),
        a_trial([0.7], TrialState.PAUSED, 3),
        *(a_trial([0.1], number=number) for number in (4, 5)),
    ]
    assert next_to_continue(plan, trials) is None
    assert next_to_continue(plan, [*trials, a_trial([0.2], number=6)]) == trials[1]


def test_a_paused_trial_that_came_to_the_next_rung_before_the_others_stays_paused():
    others = [a_trial([0.9, 0.9], number=1), a_trial([0.5], number=2)]
    paused = a_trial([0.3, 0.3, 0.3], TrialState.PAUSED, 3)
    assert next_to_continue(a_plan("asha"), [*others, paused]) is None
    assert "measurement 1, its accuracy 0.3 is number 3 of 3" in why_pause(a_plan("asha"), paused, others)


def test_the_paused_trial_that_came_farthest_continues_first():
    near, far = a_trial([0.9], TrialState.PAUSED, 1), a_trial([0.5, 0.5, 0.5], TrialState.PAUSED, 7)
    worse = [a_trial([0.1], number=number) for number in range(2, 6)]
    assert next_to_continue(a_plan("asha"), [near, *worse, far]) == far
    # Without a rule, all trials that were cancelled with their tuning continue.
    assert next_to_continue(a_plan(""), [a_trial([], TrialState.PAUSED, 2), a_trial([], TrialState.PAUSED, 1)]) == (
        a_trial([], TrialState.PAUSED, 1)
    )


def test_hyperband_compares_trials_of_one_bracket_from_the_first_rung_of_that_bracket():
    plan = a_plan("hyperband")
    first_rungs = []
    for number in range(1, 12):
        # Eleven trials further is the same bracket again.
        others = [a_trial([1.0] * 9, number=number + 11 * ahead) for ahead in (1, 2, 3)]
        bad = [a_trial([0.0] * count, number=number) for count in range(1, 10)]
        first_rungs.append(next(len(trial.measurements) for trial in bad if why_pause(plan, trial, others)))
    assert {rung: first_rungs.count(rung) for rung in (1, 3, 9)} == {1: 6, 3: 3, 9: 2}
    first, second = (first_rungs.index(rung) + 1 for rung in (1, 3))
    others = [a_trial([1.0] * 9, number=second + 11 * ahead) for ahead in (1, 2, 3)]
    assert why_pause(plan, a_trial([0.0] * 9, number=first), others) == ""


RULES = st.sampled_from(["asha", "hyperband"])
GOALS = st.sampled_from(["MAXIMIZE", "MINIMIZE"])
VALUES = st.lists(st.integers(0, 10_000), min_size=1, max_size=30, unique=True)


@given(
    st.sampled_from(["median", "asha", "hyperband"]), GOALS,
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), max_size=8), st.integers(1, 9),
)  # fmt: skip
def test_the_best_trial_is_never_stopped_or_paused(rule: StopRule, goal: str, series: list[list[float]], length: int):
    best = a_trial([2.0 if goal == "MAXIMIZE" else -1.0] * length)
    assert why_stop(a_plan(rule, goal), best, finished(*series)) == ""
    assert why_pause(a_plan(rule, goal), best, finished(*series)) == ""


@given(GOALS, VALUES)
def test_a_third_of_those_that_reached_a_rung_go_on_and_these_are_the_best(goal: str, values: list[int]):
    trials = [a_trial([value], number=number) for number, value in enumerate(values, 1)]
    kept = [
        trial.measurements[0][1]
        for trial in trials
        if not why_pause(a_plan("asha", goal), trial, [other for other in trials if other != trial])
    ]
    best = sorted(values, reverse=goal == "MAXIMIZE")
    count = len(values) if len(values) < FEWEST_AT_RUNG else max(1, len(values) // FACTOR)
    assert sorted(kept) == sorted(best[:count])


@given(RULES, GOALS, VALUES, st.integers(0, 10_000), st.randoms())
def test_the_order_of_trials_and_a_worse_newcomer_change_nothing_for_a_trial_that_goes_on(
    rule: StopRule, goal: str, values: list[int], worse: int, random
):
    plan = a_plan(rule, goal)
    trial, *others = [a_trial([value] * 9, number=number) for number, value in enumerate(values, 1)]
    why = why_pause(plan, trial, others)
    shuffled = random.sample(others, len(others))
    assert why_pause(plan, trial, shuffled) == why
    least = -1 - worse if goal == "MAXIMIZE" else 10_001 + worse
    newcomer = a_trial([least] * 9, number=len(values) + 1)
    if rule == "asha" and not why and len(values) >= FEWEST_AT_RUNG:
        assert why_pause(plan, trial, [*others, newcomer]) == ""
