from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.plan import GRID, RANDOM, EarlierTrial, TuningPlan
from footplate.jobs.tuning.proposals import propose
from footplate.jobs.tuning.space import LOG, Parameter, Value

SPACE = (
    Parameter("lr", "DOUBLE", 1e-5, 1.0, scale=LOG),
    Parameter("layers", "INTEGER", 1, 5),
    Parameter("kind", "CATEGORICAL", values=("a", "b", "c")),
    Parameter("width", "DISCRETE", values=(16.0, 32.5, 64.0)),
)
SMALL = (Parameter("layers", "INTEGER", 1, 3), Parameter("kind", "CATEGORICAL", values=("a", "b")))


def a_plan(algorithm: str = "", space: Sequence[Parameter] = SPACE, seed: int = 7) -> TuningPlan:
    return TuningPlan("MINIMIZE", "loss", tuple(space), 100, 4, 0, algorithm, "", seed)


def a_trial(
    number: int, parameters: dict[str, Value], state: TrialState = TrialState.SUCCEEDED, value: float = 0.0
) -> Trial:
    ended = None if state in (TrialState.ACTIVE, TrialState.STOPPING) else 1.0
    return Trial("t", number, f"t_trial_{number}", state, parameters, (), value if ended else None, 1.0, 0.0, ended)


def loss(parameters: dict[str, Value]) -> float:
    """A loss whose smallest value is at lr=0.01, layers=2, kind=b."""
    rate = (math.log10(float(parameters["lr"])) + 2) ** 2
    return rate + abs(int(parameters["layers"]) - 2) + (0.0 if parameters["kind"] == "b" else 1.0)


@pytest.mark.parametrize("algorithm", ["", RANDOM])
def test_the_next_trial_follows_from_the_seed_and_the_results(algorithm: str):
    def history(seed: int) -> list[Trial]:
        plan, trials = a_plan(algorithm, seed=seed), []
        for number in range(1, 15):
            proposed = propose(plan, number, trials)
            assert proposed is not None
            trials.append(a_trial(number, proposed, value=loss(proposed)))
        return trials

    trials = history(7)
    assert history(7) == trials
    assert history(8) != trials
    plan = a_plan(algorithm)
    # A supervisor that begins now reads all earlier trials from the store, and proposes the same as the one before it.
    for number in range(1, 15):
        restored = [replace(trial, parameters=dict(trial.parameters)) for trial in trials[: number - 1]]
        assert propose(plan, number, restored) == trials[number - 1].parameters
    # Without the last result, the search knows less.
    if not algorithm:
        assert propose(plan, 15, trials) != propose(plan, 15, trials[:-4])


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.lists(st.sampled_from(list(TrialState)), max_size=25))
def test_a_proposal_is_in_the_space_whatever_has_become_of_the_other_trials(seed: int, states: list[TrialState]):
    plan, trials = a_plan(seed=seed), []
    for number, state in enumerate(states, 1):
        drawn = propose(a_plan(RANDOM, seed=seed), number, trials)
        assert drawn is not None
        trials.append(a_trial(number, drawn, state, value=random.Random(number).random()))
    proposed = propose(plan, len(trials) + 1, trials)
    assert proposed is not None
    assert list(proposed) == ["lr", "layers", "kind", "width"]
    assert 1e-5 <= float(proposed["lr"]) <= 1.0
    assert proposed["layers"] in range(1, 6)
    assert proposed["kind"] in ("a", "b", "c")
    assert proposed["width"] in (16.0, 32.5, 64.0)


@pytest.mark.parametrize("algorithm", ["", RANDOM, GRID])
def test_each_combination_is_tried_once_and_then_the_space_is_exhausted(algorithm: str):
    plan, trials = a_plan(algorithm, SMALL), []
    while (proposed := propose(plan, len(trials) + 1, trials)) is not None:
        trials.append(
            a_trial(len(trials) + 1, proposed, TrialState.ACTIVE if len(trials) % 2 else TrialState.SUCCEEDED)
        )
    assert len({tuple(trial.parameters.items()) for trial in trials}) == len(trials) == 6


def test_a_grid_is_searched_in_order():
    plan, trials = a_plan(GRID, SMALL), []
    for number in range(1, 4):
        proposed = propose(plan, number, trials)
        assert proposed is not None
        trials.append(a_trial(number, proposed, TrialState.FAILED))
    assert [tuple(trial.parameters.values()) for trial in trials] == [(1, "a"), (1, "b"), (2, "a")]


def test_trials_of_an_earlier_tuning_count_as_results():
    earlier = EarlierTrial("old_trial_1", "SUCCEEDED", {"layers": 1, "kind": "a"}, 0.5)
    plan = replace(a_plan(GRID, SMALL), earlier=(earlier,))
    assert propose(plan, 1, []) == {"layers": 1, "kind": "b"}


def test_the_search_finds_better_parameters_than_chance():
    def best(algorithm: str, seed: int) -> float:
        plan, trials = a_plan(algorithm, seed=seed), []
        for number in range(1, 41):
            proposed = propose(plan, number, trials)
            assert proposed is not None
            trials.append(a_trial(number, proposed, value=loss(proposed)))
        return min(trial.value for trial in trials if trial.value is not None)

    assert sum(best("", seed) for seed in range(3)) < sum(best(RANDOM, seed) for seed in range(3)) / 2


def test_parallel_trials_differ_from_those_that_run_now():
    plan, trials = a_plan(), []
    for number in range(1, 13):
        proposed = propose(plan, number, trials)
        assert proposed is not None
        trials.append(a_trial(number, proposed, value=loss(proposed)))
    running: list[Trial] = []
    for number in range(13, 17):
        proposed = propose(plan, number, [*trials, *running])
        assert proposed is not None
        running.append(a_trial(number, proposed, TrialState.ACTIVE))
    assert len({trial.parameters["lr"] for trial in running}) == 4


def test_parameters_that_diverge_are_avoided():
    def proposals(state: TrialState) -> list[float]:
        space = (Parameter("lr", "DOUBLE", 0.0, 1.0),)
        at = [index / 20 for index in range(20)]
        trials = [
            a_trial(number, {"lr": rate}, state if rate > 0.5 else TrialState.SUCCEEDED, value=1.0)
            for number, rate in enumerate(at, 1)
        ]
        trials = [replace(trial, value=None) if trial.state == TrialState.INFEASIBLE else trial for trial in trials]
        proposed = [propose(a_plan(space=space, seed=seed), 21, trials) for seed in range(10)]
        return [float(each["lr"]) for each in proposed if each is not None]

    assert sum(rate > 0.5 for rate in proposals(TrialState.INFEASIBLE)) < 3
