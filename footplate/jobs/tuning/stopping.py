"""Which trials don't run to their end: pure functions of the measurements of all trials.

    median      a trial is stopped if its best measurement so far is worse than the median of the other trials' means up to
                the same step. Only trials that ran to their end count. Vizier has the same rule
    asha        asynchronous successive halving. A trial has rungs at 1, 3, 9, 27, … measurements. At a rung, it goes on
                while it is among the best third of all trials that have reached the rung. Otherwise it is paused
    hyperband   asha in three brackets, whose first rungs are at 1, 3 and 9 measurements. A trial is compared with those of
                its bracket. So a metric whose first values mislead can't pause all good trials early
    pbt         a trial in the worst quarter gives way to a fork of a better one (`population.py`)

A trial that is stopped never goes on. A trial that is paused saves and ends, and goes on from its checkpoint when it is
among the best third after all, since more trials have reached its rung (`next_to_continue`).

A trial goes on while too few trials can be compared: fewer than `FEWEST` with the median rule, fewer than
`FEWEST_AT_RUNG` with asha and hyperband. A trial of asha is judged at the highest rung that enough trials have reached. So
a trial that reaches its next rung while it saves doesn't escape the cut of the one before.

With all rules, a trial is stopped when its metric becomes NaN or infinite.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.measurements import Measurement, is_finite
from footplate.jobs.tuning.plan import TuningPlan

# With the median rule, a trial is compared with at least this many trials.
FEWEST = 3
# With asha and hyperband, at least this many trials are compared, the trial itself included. A paused trial may go on
# later, so two are enough. With three, the first two trials of a machine that runs two at once would run to their ends.
FEWEST_AT_RUNG = 2
FACTOR = 3
# The brackets of consecutive trials, over and over. Hyperband gives each bracket about the same amount of training, so
# those with early rungs have more trials: 6, 3 and 2 (of 9, 4.5 and 3).
_BRACKETS = (0, 1, 0, 2, 0, 1, 0, 0, 1, 0, 2)


def why_stop(plan: TuningPlan, trial: Trial, others: Sequence[Trial]) -> str:
    """Explain why a running trial is stopped for good; empty if it isn't.

    Args:
        plan: the tuning.
        trial: the trial, with its measurements so far.
        others: the other trials, with theirs.
    """
    if not plan.stop_early or not trial.measurements:
        return ""
    step, value = trial.measurements[-1]
    if not is_finite(trial.measurements[-1]):
        return f"{plan.metric} is {value} at step {step:g}"
    return _median(plan, trial, others) if plan.stop_early == "median" else ""


def why_pause(plan: TuningPlan, trial: Trial, others: Sequence[Trial]) -> str:
    """Explain why a trial is paused, or stays so; empty if it goes on.

    Args:
        plan: the tuning.
        trial: the trial, with its measurements so far.
        others: the other trials, with theirs.
    """
    if plan.stop_early not in ("asha", "hyperband"):
        return ""
    bracket = _bracket_of(plan, trial)
    same = [trial, *(other for other in others if _bracket_of(plan, other) == bracket)]
    for rung in _rungs_of(trial, bracket):
        reached = [each.measurements[rung - 1] for each in same if len(each.measurements) >= rung]
        if len(reached) >= FEWEST_AT_RUNG:
            return _why_cut(plan, trial, rung, reached)
    return ""


def _rungs_of(trial: Trial, bracket: int) -> list[int]:
    """The rungs that a trial has reached, the highest first."""
    rungs = []
    rung = FACTOR**bracket
    while rung <= len(trial.measurements):
        rungs.append(rung)
        rung *= FACTOR
    return rungs[::-1]


def _why_cut(plan: TuningPlan, trial: Trial, rung: int, reached: Sequence[Measurement]) -> str:
    """Explain why a trial isn't among the best third at a rung; empty if it is."""
    values = sorted((value for _, value in filter(is_finite, reached)), reverse=plan.maximizes)
    step, value = trial.measurements[rung - 1]
    if not is_finite((step, value)):
        return ""
    place = values.index(value) + 1
    if place <= max(1, len(reached) // FACTOR):
        return ""
    return f"at step {step:g}, measurement {rung}, its {plan.metric} {value:.6g} is number {place} of {len(reached)}"


def next_to_continue(plan: TuningPlan, trials: Sequence[Trial]) -> Trial | None:
    """The paused trial that goes on next: of those that may, the one that has come farthest; None if none may.

    Args:
        plan: the tuning.
        trials: all of its trials, with their measurements so far.
    """
    may = [
        trial
        for trial in trials
        if trial.state == TrialState.PAUSED
        and not why_pause(plan, trial, [other for other in trials if other.number != trial.number])
    ]
    return min(may, key=lambda trial: (-len(trial.measurements), trial.number), default=None)


def _bracket_of(plan: TuningPlan, trial: Trial) -> int:
    return _BRACKETS[(trial.number - 1) % len(_BRACKETS)] if plan.stop_early == "hyperband" else 0


def _median(plan: TuningPlan, trial: Trial, others: Sequence[Trial]) -> str:
    last = trial.measurements[-1][0]
    means = [
        statistics.fmean(values)
        for other in others
        if other.state == TrialState.SUCCEEDED and (values := _values(other.measurements, last))
    ]
    if len(means) < FEWEST:
        return ""
    values = _values(trial.measurements, last)
    best, median = (max if plan.maximizes else min)(values), statistics.median(means)
    if not plan.is_better(median, best):
        return ""
    return (
        f"at step {last:g} its best {plan.metric} is {best:.6g}, and the median of {len(means)} trials is {median:.6g}"
    )


def _values(measurements: Sequence[Measurement], last: float) -> list[float]:
    """The finite values up to a step."""
    return [each[1] for each in measurements if each[0] <= last and is_finite(each)]
