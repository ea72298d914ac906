"""Population-based training (Jaderberg et al., 2017): pure functions of the plan and the trials so far.

    trial 1  ──●──●──●──●──►               at every `interval` measurements (●), a trial is compared
    trial 2  ──●──●──●──●──►
    trial 3  ──●──●──●──●──►
    trial 4  ──●──✕                        exploit: a trial in the worst quarter stops …
    trial 5        └──●──●──►              … and another one begins from a copy of a checkpoint of one in the best quarter,
                                           explore: with perturbed hyperparameters

The population are the trials that run at once, `maxParallelTrials`. The first ones are proposed as in any search. A trial
that replaces another one is a *fork* of its parent. It inherits the parent's measurements up to the step of the checkpoint,
and is compared as if it had trained from the first step. So the numbers of measurements of all trials mean the same.

A trial is compared at the highest number of measurements that enough trials have reached. It is stopped only while another
one can be forked: while a trial of the best quarter runs, and `maxTrials` allows one more.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.measurements import Measurement, is_finite
from footplate.jobs.tuning.plan import TuningPlan
from footplate.jobs.tuning.proposals import seed_of
from footplate.jobs.tuning.space import Parameter, Value, value_at

# A trial in the worst quarter takes over from one in the best quarter, so a quarter must be at least one trial.
QUARTER = 4
# A hyperparameter is drawn again with this probability, and perturbed otherwise.
RESAMPLE = 0.25
FACTORS = (0.8, 1.2)


def whole_series(trial: Trial, trials: Mapping[int, Trial]) -> tuple[Measurement, ...]:
    """The measurements of a trial, after those that it inherits.

    Args:
        trial: the trial.
        trials: all trials, by number.
    """
    return (*_inherited(trial, trials), *trial.measurements)


def lineage(trial: Trial, trials: Mapping[int, Trial]) -> list[Trial]:
    """The trials that lead to a trial, the first ancestor first, itself last. A deleted ancestor ends it."""
    line = [trial]
    while line[0].fork is not None and (parent := trials.get(line[0].fork.parent)) is not None:
        line.insert(0, parent)
    return line


def why_exploit(plan: TuningPlan, trial: Trial, trials: Sequence[Trial]) -> str:
    """Explain why a trial gives way to a fork of a better one; empty if it goes on.

    Args:
        plan: the tuning.
        trial: a running trial.
        trials: all trials, with their measurements so far.
    """
    if len(trials) + len(to_replace(plan, trials)) >= plan.max_trials or not parents(plan, trial, trials):
        return ""
    ranked = _ranked(plan, trial, trials)
    place = ranked.index(trial.number) + 1
    if place <= len(ranked) - len(ranked) // QUARTER:
        return ""
    series = whole_series(trial, _by_number(trials))
    count = _compared_at(plan, trial, trials)
    step, value = series[count - 1]
    return f"at step {step:g}, measurement {count}, its {plan.metric} {value:.6g} is number {place} of {len(ranked)}"


def to_replace(plan: TuningPlan, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that gave way, or give way now, and that no fork replaces yet, by number."""
    replaced = {trial.fork.replaces for trial in trials if trial.fork is not None}
    return [
        trial
        for trial in trials
        if trial.state in (TrialState.STOPPING, TrialState.STOPPED_EARLY)
        and trial.number not in replaced
        and _compared_at(plan, trial, trials)
    ]


def parents(plan: TuningPlan, trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """The running trials of the best quarter, where a trial is compared, the best first."""
    by_number, count = _by_number(trials), _compared_at(plan, trial, trials)
    ranked = _ranked(plan, trial, trials)
    best = [by_number[number] for number in ranked[: len(ranked) // QUARTER]]
    return [
        other
        for other in best
        if other.number != trial.number
        and other.state == TrialState.ACTIVE
        and is_finite(whole_series(other, by_number)[count - 1])
    ]


def choose_parent(plan: TuningPlan, number: int, candidates: Sequence[Trial]) -> Trial:
    """Choose the parent of the trial with a number."""
    return random.Random(seed_of(plan.seed, number, -1)).choice(candidates)


def explore(plan: TuningPlan, number: int, parent: Mapping[str, Value]) -> dict[str, Value]:
    """The hyperparameters of a fork: those of its parent, each perturbed, or drawn again.

    Args:
        plan: the tuning.
        number: the number of the fork.
        parent: the hyperparameters of its parent.
    """
    draws = random.Random(seed_of(plan.seed, number, 0))
    return {
        parameter.name: value_at(parameter, draws.random())
        if draws.random() < RESAMPLE
        else _perturbed(parameter, parent[parameter.name], draws)
        for parameter in plan.parameters
    }


def _perturbed(parameter: Parameter, value: Value, draws: random.Random) -> Value:
    """A number 20% smaller or larger, or a neighbour among the values of a list. A word stays."""
    factor = draws.choice(FACTORS)
    if parameter.type == "CATEGORICAL":
        return value
    if parameter.type == "DISCRETE":
        index = parameter.values.index(value) + (1 if factor > 1 else -1)
        return parameter.values[min(max(index, 0), len(parameter.values) - 1)]
    number = float(value) * factor
    if parameter.type == "INTEGER":
        # At least one more or less.
        nearest = round(number)
        number = nearest if nearest != value else nearest + (1 if factor > 1 else -1)
        return min(max(int(number), int(parameter.low)), int(parameter.high))
    return min(max(number, parameter.low), parameter.high)


def _by_number(trials: Sequence[Trial]) -> dict[int, Trial]:
    return {trial.number: trial for trial in trials}


def _inherited(trial: Trial, trials: Mapping[int, Trial]) -> tuple[Measurement, ...]:
    parent = None if trial.fork is None else trials.get(trial.fork.parent)
    if trial.fork is None or parent is None:
        return ()
    return tuple(each for each in whole_series(parent, trials) if each[0] <= trial.fork.step)


def _reached(count: int, trials: Sequence[Trial]) -> list[Trial]:
    """The trials that have made a measurement of their own at a number of measurements."""
    by_number = _by_number(trials)
    return [
        trial for trial in trials if len(_inherited(trial, by_number)) < count <= len(whole_series(trial, by_number))
    ]


def _compared_at(plan: TuningPlan, trial: Trial, trials: Sequence[Trial]) -> int:
    """The number of measurements at which a trial is compared; 0 if there is none yet."""
    by_number = _by_number(trials)
    last, first = len(whole_series(trial, by_number)), len(_inherited(trial, by_number))
    for count in range(last - last % plan.interval, first, -plan.interval):
        if len(_reached(count, trials)) >= QUARTER:
            return count
    return 0


def _ranked(plan: TuningPlan, trial: Trial, trials: Sequence[Trial]) -> list[int]:
    """The numbers of the trials with which a trial is compared, the best first. Of equal ones it comes first itself."""
    by_number, count = _by_number(trials), _compared_at(plan, trial, trials)
    if not count:
        return []

    def key(other: Trial) -> tuple[bool, float, bool, int]:
        measurement = whole_series(other, by_number)[count - 1]
        value = measurement[1] if is_finite(measurement) else 0.0
        return (not is_finite(measurement), -value if plan.maximizes else value, other is not trial, other.number)

    return [other.number for other in sorted(_reached(count, trials), key=key)]
