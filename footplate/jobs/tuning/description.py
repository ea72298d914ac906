"""A tuning as plain values, for the command line and the server.

The form is AI Platform's `TrainingOutput`, with the goal, the seed and the best trial added.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from footplate.jobs.record import Job, Trial, TrialState
from footplate.jobs.store.jobs import Store
from footplate.jobs.tuning.plan import TuningPlan, best_of


def training_output(store: Store, job: Job) -> dict[str, Any] | None:
    """The results of a tuning, the best trial first; None for another job.

    Args:
        store: the store of the job.
        job: the job.
    """
    values = job.plan.get("tuning")
    if values is None:
        return None
    plan, trials = TuningPlan.from_dict(values), store.trials.of(job.name)
    best = best_of(plan, trials)
    return {
        "isHyperparameterTuningJob": True,
        "hyperparameterMetricTag": plan.metric,
        "goal": plan.goal,
        "seed": plan.seed,
        "completedTrialCount": sum(trial.has_ended for trial in trials),
        "maxTrials": plan.max_trials,
        "bestTrial": None
        if best is None
        else {"jobId": best.job, "objectiveValue": best.value, "hyperparameters": best.parameters},
        "trials": [_trial(store, trial) for trial in plan.ranked(trials)],
    }


def _trial(store: Store, trial: Trial) -> dict[str, Any]:
    # An active trial is in the state of its job.
    running = store.state(trial.job) if trial.state == TrialState.ACTIVE else None
    final = {"trainingStep": trial.step, "objectiveValue": trial.value} if trial.value is not None else None
    return {
        "trialId": str(trial.number),
        "jobId": trial.job,
        "state": str(running or trial.state),
        "hyperparameters": trial.parameters,
        "finalMetric": final,
        "isTrialStoppedEarly": trial.state == TrialState.STOPPED_EARLY,
        "startTime": _time(trial.created),
        "endTime": _time(trial.ended),
        "cause": trial.cause,
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
