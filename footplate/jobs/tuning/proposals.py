"""The parameters of the next trial: a pure function of the plan, the trial's number, and the trials so far.

    propose(plan, number, trials)  ->  parameters, or None if all combinations were tried

The algorithm keeps no state between two trials. It is made again for each, with a seed that follows from the plan's seed
and the trial's number. So a supervisor that was killed proposes the same trial as one that wasn't.

    GRID_SEARCH     all combinations, in order
    RANDOM_SEARCH   positions drawn evenly from the unit cube (`space.py`)
    otherwise       Optuna's TPE in the unit cube. It knows the results of finished trials, takes trials that run now for
                    unpromising (constant liar), so that parallel trials differ, and an INFEASIBLE trial for the worst

A combination is tried once, since a training that is repeated with the same parameters tells nothing new. If a draw repeats
a combination, another is drawn.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from footplate.core.optional import require
from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.plan import GRID, RANDOM, EarlierTrial, TuningPlan
from footplate.jobs.tuning.space import Parameter, Value, combinations, nth_combination, position_of, value_at

# Draws for one trial, before one of the remaining combinations is chosen.
_DRAWS = 20
# More combinations than this aren't listed.
_LISTED = 100_000

Known = EarlierTrial | Trial


def propose(plan: TuningPlan, number: int, trials: Sequence[Trial]) -> dict[str, Value] | None:
    """Choose the parameters of a trial.

    Args:
        plan: the tuning.
        number: the trial's number, from 1.
        trials: its other trials.

    Returns:
        Name → value; None if every combination was tried.

    Raises:
        MissingExtra: Optuna isn't installed, and the algorithm needs it.
    """
    known: list[Known] = [*plan.earlier, *trials]
    tried = {_key(trial.parameters) for trial in known}
    count = combinations(plan.parameters)
    if count is not None and len(tried) >= count:
        return None
    if plan.algorithm == GRID:
        return next(each for each in _all(plan.parameters, count) if _key(each) not in tried)
    proposed: dict[str, Value] = {}
    for draw in range(_DRAWS):
        seed = seed_of(plan.seed, number, draw)
        proposed = _random(plan, seed) if plan.algorithm == RANDOM else _tpe(plan, known, seed)
        if _key(proposed) not in tried:
            return proposed
    if count is None or count > _LISTED:
        return proposed
    left = [each for each in _all(plan.parameters, count) if _key(each) not in tried]
    return random.Random(seed_of(plan.seed, number, _DRAWS)).choice(left)


def check_algorithm(plan: TuningPlan) -> None:
    """Check that the algorithm of a plan can be used.

    Raises:
        MissingExtra: Optuna isn't installed, and the algorithm needs it.
    """
    if plan.algorithm not in (GRID, RANDOM):
        _optuna()


def _random(plan: TuningPlan, seed: int) -> dict[str, Value]:
    draws = random.Random(seed)
    return {parameter.name: value_at(parameter, draws.random()) for parameter in plan.parameters}


def _tpe(plan: TuningPlan, known: Sequence[Known], seed: int) -> dict[str, Value]:
    optuna = _optuna()
    distributions = {parameter.name: _distribution(optuna, parameter) for parameter in plan.parameters}
    with warnings.catch_warnings():
        # Older versions call these arguments experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize" if plan.maximizes else "minimize")
    study.add_trials(_frozen(optuna, plan, trial, distributions) for trial in known)
    drawn = study.ask(distributions).params
    return {
        parameter.name: drawn[parameter.name]
        if parameter.type == "CATEGORICAL"
        else value_at(parameter, drawn[parameter.name])
        for parameter in plan.parameters
    }


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    if parameter.type == "CATEGORICAL":
        return optuna.distributions.CategoricalDistribution(parameter.values)
    return optuna.distributions.FloatDistribution(0.0, 1.0)


def _frozen(optuna: Any, plan: TuningPlan, trial: Known, distributions: dict[str, Any]) -> Any:
    """A trial as Optuna keeps it."""
    states = optuna.trial.TrialState
    positions = {
        parameter.name: trial.parameters[parameter.name]
        if parameter.type == "CATEGORICAL"
        else position_of(parameter, trial.parameters[parameter.name])
        for parameter in plan.parameters
    }
    intermediate: dict[int, float] = {}
    value, state = None, states.FAIL
    if trial.state == TrialState.SUCCEEDED:
        value, state = trial.value, states.COMPLETE
    elif trial.state in (TrialState.STOPPED_EARLY, TrialState.INFEASIBLE):
        state = states.PRUNED
        if isinstance(trial, Trial) and trial.value is not None:
            intermediate = {int(trial.step or 0): trial.value}
    elif isinstance(trial, Trial) and trial.state == TrialState.PAUSED and trial.measurements:
        step, last = trial.measurements[-1]
        state, intermediate = states.PRUNED, {int(step): last}
    elif trial.state in (TrialState.ACTIVE, TrialState.STOPPING, TrialState.PAUSING, TrialState.PAUSED):
        state = states.RUNNING
    return optuna.trial.create_trial(
        state=state, value=value, params=positions, distributions=distributions, intermediate_values=intermediate
    )


def _optuna() -> Any:
    optuna = require("optuna", "tune", "Hyperparameter tuning, other than GRID_SEARCH and RANDOM_SEARCH,")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _all(parameters: Sequence[Parameter], count: int | None) -> Iterator[dict[str, Value]]:
    assert count is not None
    return (nth_combination(parameters, index) for index in range(count))


def _key(parameters: dict[str, Value]) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(parameters.items()))


def seed_of(seed: int, number: int, draw: int) -> int:
    """A seed of 32 bits. Seeds of neighbouring trials have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}/{draw}".encode()).digest()[:4])
