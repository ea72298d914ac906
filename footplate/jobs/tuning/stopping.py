"""Early stopping: rules that end a trial whose measurements are worse than those of other trials. All are pure functions.

    median   `enableTrialEarlyStopping`. A trial ends if its best value so far is worse than the median of the other
             trials' means up to the same step. Only trials that ran to their end count. Vizier has the same rule
    asha     asynchronous successive halving. A trial has rungs at 1, 3, 9, 27, … measurements. At a rung, it goes on if it
             is among the best third of all trials that have reached the rung

Both let a trial go on while fewer than `FEWEST` trials can be compared. With both, a trial ends when its metric becomes NaN
or infinite.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from footplate.jobs.record import Trial, TrialState
from footplate.jobs.tuning.measurements import Measurement, is_finite
from footplate.jobs.tuning.plan import TuningPlan

# A trial is compared with at least this many trials; with asha, it is one of them.
FEWEST = 3
FACTOR = 3


def why_stop(plan: TuningPlan, trial: Trial, others: Sequence[Trial]) -> str:
    """Explain why a running trial is stopped early; empty if it goes on.

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
    return (_median if plan.stop_early == "median" else _asha)(plan, trial, others)


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


def _asha(plan: TuningPlan, trial: Trial, others: Sequence[Trial]) -> str:
    rung = 1
    while rung * FACTOR <= len(trial.measurements):
        rung *= FACTOR
    reached = [each.measurements[rung - 1] for each in (trial, *others) if len(each.measurements) >= rung]
    values = sorted((value for _, value in filter(is_finite, reached)), reverse=plan.maximizes)
    step, value = trial.measurements[rung - 1]
    if len(reached) < FEWEST or not is_finite((step, value)):
        return ""
    place = values.index(value) + 1
    if place <= max(1, len(reached) // FACTOR):
        return ""
    return f"at step {step:g}, measurement {rung}, its {plan.metric} {value:.6g} is number {place} of {len(reached)}"


def _values(measurements: Sequence[Measurement], last: float) -> list[float]:
    """The finite values up to a step."""
    return [each[1] for each in measurements if each[0] <= last and is_finite(each)]
