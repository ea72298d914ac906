"""The results of a tuning: its trials, the best first, for a program, a notebook, the command line and the server.

The plain values are in the form of AI Platform's `TrainingOutput`, with the goal, the seed and the best trial added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from footplate.jobs.record import Job, Trial, TrialState
from footplate.jobs.states import State
from footplate.jobs.store.jobs import Store
from footplate.jobs.tuning.plan import EarlierTrial, TuningPlan, best_of
from footplate.jobs.tuning.population import lineage
from footplate.jobs.tuning.trial_jobs import fork_checkpoint, trial_job_dir


@dataclass(frozen=True)
class Tuning:
    """A tuning and its trials, as they were when `Jobs.tuning` read them.

    Attributes:
        job: the job of the tuning.
        plan: its goal, parameters and limits.
        trials: the trials that have begun. Those with a final result come first, the best before the others.
        running: the states of the jobs of active trials, by the name of the job.

    Examples:
        >>> from footplate.jobs.operations import Jobs
        >>> jobs = Jobs.from_env()
        >>> tuning = jobs.tuning("rates")
        >>> [(trial.parameters["lr"], trial.value) for trial in tuning.trials]
        [(0.1, 0.25), (0.5, 0.75)]
        >>> tuning.best.job
        'rates_trial_2'
    """

    job: Job
    plan: TuningPlan
    trials: tuple[Trial, ...]
    running: Mapping[str, State]

    @property
    def best(self) -> EarlierTrial | None:
        """The job, parameters and value of the best trial, those of a continued tuning included; None without a result."""
        return best_of(self.plan, self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Convert the results to plain values."""
        best = self.best
        return {
            "isHyperparameterTuningJob": True,
            "hyperparameterMetricTag": self.plan.metric,
            "goal": self.plan.goal,
            "seed": self.plan.seed,
            "startCheckpoint": self.plan.checkpoint or None,
            "completedTrialCount": sum(trial.has_ended for trial in self.trials),
            "maxTrials": self.plan.max_trials,
            "bestTrial": None if best is None else self._best(best),
            "trials": [self._trial(trial) for trial in self.trials],
        }

    def _best(self, best: EarlierTrial) -> dict[str, Any]:
        own = next((trial for trial in self.trials if trial.job == best.job), None)
        line = [] if own is None else lineage(own, {trial.number: trial for trial in self.trials})
        start = self.plan.checkpoint or None
        if own is not None and own.fork is not None:
            start = str(fork_checkpoint(trial_job_dir(self.job.plan["job_dir"], own.number)))
        return {
            "jobId": best.job,
            "objectiveValue": best.value,
            "hyperparameters": best.parameters,
            "startCheckpoint": start,
            # The hyperparameters that led to it, and the steps from which each of them counted.
            "lineage": [
                {
                    "trialId": str(trial.number),
                    "fromStep": 0.0 if trial.fork is None else trial.fork.step,
                    "hyperparameters": trial.parameters,
                }
                for trial in line
            ],
        }

    def _trial(self, trial: Trial) -> dict[str, Any]:
        final = {"trainingStep": trial.step, "objectiveValue": trial.value} if trial.value is not None else None
        return {
            "trialId": str(trial.number),
            "jobId": trial.job,
            # An active trial is in the state of its job.
            "state": str(self.running.get(trial.job, trial.state)),
            "hyperparameters": trial.parameters,
            "finalMetric": final,
            "isTrialStoppedEarly": trial.state == TrialState.STOPPED_EARLY,
            "startTime": _time(trial.created),
            "endTime": _time(trial.ended),
            "parentTrialId": None if trial.fork is None else str(trial.fork.parent),
            "parentStep": None if trial.fork is None else trial.fork.step,
            "cause": "; ".join(filter(None, (_origin(trial), trial.cause))),
        }

    def _repr_html_(self) -> str:
        from footplate.jobs.job_html import tuning_html

        return tuning_html(self)


def tuning_of(store: Store, job: Job) -> Tuning | None:
    """Read the results of a tuning; None for another job.

    Args:
        store: the store of the job.
        job: the job.
    """
    values = job.plan.get("tuning")
    if values is None:
        return None
    plan = TuningPlan.from_dict(values)
    trials = plan.ranked(store.trials.of(job.name))
    states = {trial.job: store.state(trial.job) for trial in trials if trial.state == TrialState.ACTIVE}
    return Tuning(job, plan, tuple(trials), {name: state for name, state in states.items() if state is not None})


def training_output(store: Store, job: Job) -> dict[str, Any] | None:
    """The results of a tuning as plain values; None for another job."""
    tuning = tuning_of(store, job)
    return None if tuning is None else tuning.to_dict()


def trial_table(output: Mapping[str, Any]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The trials as the rows of a table.

    Args:
        output: the results of a tuning, as `Tuning.to_dict` makes them.

    Returns:
        The headings of the columns by their keys, and the cells of each row by key.
    """
    trials = output["trials"]
    names = list(trials[0]["hyperparameters"]) if trials else []
    rows = [
        {
            "trial": trial["trialId"],
            "state": trial["state"],
            "value": _cell((trial["finalMetric"] or {}).get("objectiveValue")),
            "step": _cell((trial["finalMetric"] or {}).get("trainingStep")),
            **{f"--{name}": _cell(trial["hyperparameters"][name]) for name in names},
            "cause": trial["cause"],
        }
        for trial in trials
    ]
    columns = {"trial": "trial", "state": "state", "value": output["hyperparameterMetricTag"], "step": "step"}
    columns |= {f"--{name}": name for name in names}
    columns |= {"cause": "cause"} if any(row["cause"] for row in rows) else {}
    return columns, rows


def summary(output: Mapping[str, Any]) -> str:
    """How many trials have ended, and which one is the best.

    Args:
        output: the results of a tuning, as `Tuning.to_dict` makes them.
    """
    return f"{output['completedTrialCount']} of {output['maxTrials']} trials have ended. {_best(output)}"


def _best(output: Mapping[str, Any]) -> str:
    best = output["bestTrial"]
    if best is None:
        return "None has a result yet."
    text = f"The best is {best['jobId']}, {output['hyperparameterMetricTag']}={_cell(best['objectiveValue'])}:"
    if len(best["lineage"]) < 2:
        return f"{text} {_arguments(best['hyperparameters'])}"
    # The schedule of hyperparameters of a fork, and of the trials that it comes from.
    return text + "".join(
        f"\n  from step {_cell(each['fromStep'])}, trial {each['trialId']}: {_arguments(each['hyperparameters'])}"
        for each in best["lineage"]
    )


def _arguments(hyperparameters: Mapping[str, Any]) -> str:
    return " ".join(f"--{name}={_cell(value)}" for name, value in hyperparameters.items())


def _origin(trial: Trial) -> str:
    fork = trial.fork
    return (
        "" if fork is None else f"from trial {fork.parent} at step {fork.step:g}, in the place of trial {fork.replaces}"
    )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
