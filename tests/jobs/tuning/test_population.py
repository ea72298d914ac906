"""Population-based training: which trial gives way, and what replaces it."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from footplate.jobs.record import Fork, Trial, TrialState
from footplate.jobs.tuning.plan import TuningPlan
from footplate.jobs.tuning.population import explore, lineage, parents, to_replace, whole_series, why_exploit
from footplate.jobs.tuning.space import LOG, Parameter

PARAMETERS = (
    Parameter("lr", "DOUBLE", 1e-4, 1.0, scale=LOG),
    Parameter("layers", "INTEGER", 1, 8),
    Parameter("size", "DISCRETE", values=(16.0, 32.0, 64.0)),
    Parameter("kind", "CATEGORICAL", values=("a", "b")),
)


def plan(interval: int = 1, max_trials: int = 40, seed: int = 0) -> TuningPlan:
    return TuningPlan(
        "MAXIMIZE", "accuracy", PARAMETERS, max_trials, 8, 0, "RANDOM_SEARCH", "pbt", seed, interval=interval
    )


def trial(number: int, *values: float, state: TrialState = TrialState.ACTIVE, fork: Fork | None = None) -> Trial:
    """A trial with a value at each step after that of its fork."""
    first = 1 if fork is None else int(fork.step) + 1
    measurements = tuple((float(step), value) for step, value in enumerate(values, first))
    parameters = {"lr": number / 10, "layers": 2, "size": 32.0, "kind": "a"}
    return Trial("t", number, f"t_trial_{number}", state, parameters, measurements, fork=fork)


def giving_way(trials: list[Trial], of: TuningPlan | None = None) -> list[int]:
    running = [each for each in trials if each.state == TrialState.ACTIVE]
    return [each.number for each in running if why_exploit(of or plan(), each, trials)]


def is_better(value: float, other: float) -> bool:
    return math.isfinite(value) and (not math.isfinite(other) or value > other)


VALUES = st.lists(st.floats(0, 1) | st.just(float("nan")), max_size=6)


@given(st.lists(VALUES, max_size=12), st.integers(1, 3))
def test_only_the_worst_quarter_of_those_that_got_as_far_gives_way(values: list[list[float]], interval: int):
    trials = [trial(number, *series) for number, series in enumerate(values, 1)]
    for each in trials:
        if not why_exploit(plan(interval), each, trials):
            continue
        # It was compared at one of these numbers of measurements.
        counts = range(interval, len(each.measurements) + 1, interval)
        rows = [
            [other.measurements[count - 1][1] for other in trials if len(other.measurements) >= count]
            for count in counts
        ]
        assert any(
            len(row) >= 4
            and sum(is_better(value, each.measurements[count - 1][1]) for value in row) >= len(row) - len(row) // 4
            for count, row in zip(counts, rows, strict=True)
        )
        assert parents(plan(interval), each, trials)


def test_it_needs_four_trials_and_is_compared_where_these_have_been():
    three = [trial(1, 0.9), trial(2, 0.8), trial(3, 0.1)]
    assert giving_way(three) == []
    four = [*three, trial(4, 0.7)]
    assert giving_way(four) == [3]
    assert why_exploit(plan(), four[2], four) == "at step 1, measurement 1, its accuracy 0.1 is number 4 of 4"
    # It is farther than the others.
    assert giving_way([trial(1, 0.9), trial(2, 0.8), trial(3, 0.1, 0.2, 0.3), trial(4, 0.7)]) == [3]
    # It has caught up.
    ahead = [trial(1, 0.9, 0.2), trial(2, 0.8, 0.9), trial(3, 0.1, 0.8), trial(4, 0.7, 0.7)]
    assert giving_way(ahead) == [1]


def test_trials_are_compared_at_each_interval_only():
    trials = [trial(1, 0.9, 0.9), trial(2, 0.8, 0.8), trial(3, 0.1, 0.1), trial(4, 0.7, 0.7)]
    assert giving_way(trials, plan(interval=2)) == [3]
    assert giving_way([replace(each, measurements=each.measurements[:1]) for each in trials], plan(interval=2)) == []


def test_equal_trials_go_on():
    assert giving_way([trial(number, 0.5) for number in range(1, 9)]) == []


def test_a_trial_goes_on_if_no_better_one_runs_or_no_more_trials_may_begin():
    trials = [trial(1, 0.9), trial(2, 0.8), trial(3, 0.1), trial(4, 0.7)]
    assert giving_way(trials, plan(max_trials=4)) == []
    assert giving_way([trial(1, 0.9, state=TrialState.SUCCEEDED), *trials[1:]]) == []
    assert giving_way(trials, plan(max_trials=5)) == [3]
    # The last trial that may begin is spoken for.
    eight = [*trials, trial(5, 0.95), trial(6, 0.05, state=TrialState.STOPPING), trial(7, 0.5), trial(8, 0.6)]
    assert [each.number for each in to_replace(plan(), eight)] == [6]
    assert giving_way(eight, plan(max_trials=9)) == []
    assert giving_way(eight, plan(max_trials=10)) == [3]


def test_a_trial_is_replaced_once():
    trials = [trial(1, 0.9), trial(2, 0.8), trial(3, 0.1, state=TrialState.STOPPED_EARLY), trial(4, 0.7)]
    assert [each.number for each in to_replace(plan(), trials)] == [3]
    assert to_replace(plan(), [*trials, trial(5, fork=Fork(1, 1.0, 3))]) == []
    # A trial that diverged before it could be compared isn't replaced.
    assert to_replace(plan(interval=2), trials) == []


def test_a_fork_inherits_what_its_parent_measured_before_it_began():
    trials = [
        trial(1, 0.5, 0.6, 0.7),
        trial(2, 0.4, 0.5, 0.65),
        trial(3, 0.1, state=TrialState.STOPPED_EARLY),
        trial(4, 0.3, 0.5, 0.6),
        trial(5, 0.2, fork=Fork(1, 2.0, 3)),
        trial(6, fork=Fork(5, 3.0, 4)),
    ]
    by_number = {each.number: each for each in trials}
    assert [value for _, value in whole_series(trials[4], by_number)] == [0.5, 0.6, 0.2]
    assert [value for _, value in whole_series(trials[5], by_number)] == [0.5, 0.6, 0.2]
    assert [each.number for each in lineage(trials[5], by_number)] == [1, 5, 6]
    # It is compared with the others at its third measurement, and not by what it inherits.
    assert giving_way(trials) == [5]
    assert giving_way([*trials[:4], replace(trials[4], measurements=())]) == []


NUMBERS = st.integers(1, 1000)


@given(NUMBERS, NUMBERS, st.floats(1e-4, 1.0), st.integers(1, 8), st.sampled_from([16.0, 32.0, 64.0]))
def test_a_fork_explores_near_its_parent_inside_the_space(seed: int, number: int, lr: float, layers: int, size: float):
    parent = {"lr": lr, "layers": layers, "size": size, "kind": "b"}
    drawn = explore(plan(seed=seed), number, parent)
    assert drawn == explore(plan(seed=seed), number, parent)
    assert 1e-4 <= float(drawn["lr"]) <= 1.0
    assert drawn["layers"] in range(1, 9)
    assert drawn["size"] in (16.0, 32.0, 64.0)
    assert drawn["kind"] in ("a", "b")


def test_three_of_four_hyperparameters_are_perturbed_and_the_others_drawn_again():
    parent = {"lr": 0.1, "layers": 4, "size": 32.0, "kind": "a"}
    forks = [explore(plan(), number, parent) for number in range(2_000)]
    perturbed = sum(abs(float(fork["lr"]) / 0.1 - factor) < 1e-9 for fork in forks for factor in (0.8, 1.2))
    assert 0.71 < perturbed / len(forks) < 0.79
    # A small whole number moves, too.
    assert sum(fork["layers"] == 4 for fork in forks) / len(forks) < 0.06
