"""What a tuning does: its goal, parameters and limits, as plain values that the store keeps with the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from footplate.jobs.record import Trial
from footplate.jobs.tuning.space import Parameter, Value

DEFAULT_METRIC = "training/hptuning/metric"
GRID, RANDOM = "GRID_SEARCH", "RANDOM_SEARCH"
StopRule = Literal["", "median", "asha", "hyperband", "pbt"]


@dataclass(frozen=True)
class EarlierTrial:
    """A trial of the tuning that this one continues (`resumePreviousJobId`).

    Attributes:
        job: the name of its job.
        state: its final state, a `TrialState`.
        parameters: name → value.
        value: its result; None if it has none.
    """

    job: str
    state: str
    parameters: dict[str, Value]
    value: float | None


@dataclass(frozen=True)
class TuningPlan:
    """A tuning.

    Attributes:
        goal: MAXIMIZE or MINIMIZE.
        metric: the name of the metric.
        parameters: the search space.
        max_trials: how many trials it makes.
        max_parallel_trials: how many of them at once.
        max_failed_trials: it fails after this many failed trials; with 0, `attempt.py` decides.
        algorithm: GRID, RANDOM, or another text for Optuna's TPE.
        stop_early: the rule that stops or pauses unpromising trials; empty for none.
        seed: of the search. With the results of earlier trials, it determines the next trial.
        earlier: trials of an earlier tuning, which count as results.
        imports: names that trials import, beside those in the source of their program (`jobs/fork_server/imports.py`).
        checkpoint: the checkpoint from which all trials begin, a path or a URI; empty if they begin at their first step.
        interval: with "pbt", the number of measurements between two comparisons (`population.py`).
    """

    goal: str
    metric: str
    parameters: tuple[Parameter, ...]
    max_trials: int
    max_parallel_trials: int
    max_failed_trials: int
    algorithm: str
    stop_early: StopRule
    seed: int
    earlier: tuple[EarlierTrial, ...] = ()
    imports: tuple[str, ...] = ()
    checkpoint: str = ""
    interval: int = 1

    @classmethod
    def of(
        cls,
        spec: Mapping[str, Any],
        seed: int,
        earlier: Sequence[EarlierTrial] = (),
        stop_early: StopRule = "",
        imports: Sequence[str] = (),
        checkpoint: str = "",
        interval: int = 1,
    ) -> TuningPlan:
        """Read a HyperparameterSpec in the API's form, which was checked.

        Args:
            spec: the spec.
            seed: of the search.
            earlier: the trials of the tuning that this one continues.
            stop_early: the rule for stopping trials; by default `enableTrialEarlyStopping` decides.
            imports: further names that trials import.
            checkpoint: the checkpoint from which all trials begin.
            interval: the number of measurements between two comparisons.
        """
        return cls(
            goal=spec["goal"],
            metric=spec.get("hyperparameterMetricTag") or DEFAULT_METRIC,
            parameters=tuple(map(Parameter.from_spec, spec["params"])),
            max_trials=int(spec.get("maxTrials", 1)),
            max_parallel_trials=int(spec.get("maxParallelTrials", 1)),
            max_failed_trials=int(spec.get("maxFailedTrials", 0)),
            algorithm=spec.get("algorithm") or "",
            stop_early=stop_early or ("median" if spec.get("enableTrialEarlyStopping") else ""),
            seed=seed,
            earlier=tuple(earlier),
            imports=tuple(imports),
            checkpoint=checkpoint,
            interval=interval,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TuningPlan:
        """Undo `to_dict`."""
        parameters = tuple(Parameter(**{**each, "values": tuple(each["values"])}) for each in values["parameters"])
        earlier = tuple(EarlierTrial(**each) for each in values["earlier"])
        return cls(**{**values, "parameters": parameters, "earlier": earlier})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return dataclasses.asdict(self)

    @property
    def maximizes(self) -> bool:
        """True if a larger value of the metric is better."""
        return self.goal == "MAXIMIZE"

    def is_better(self, value: float, other: float) -> bool:
        """Return True if a value of the metric is better than another."""
        return value > other if self.maximizes else value < other

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Order trials: those with a final result first, the best before the others; then the rest, by number."""
        return sorted(trials, key=self._rank)

    def _rank(self, trial: Trial) -> tuple[bool, float, int]:
        finished = trial.state == "SUCCEEDED" and trial.value is not None
        value = trial.value if finished and trial.value is not None else 0.0
        return (not finished, -value if self.maximizes else value, trial.number)


def best_of(plan: TuningPlan, trials: Sequence[Trial]) -> EarlierTrial | None:
    """The best trial, those of the continued tuning included; None while none has a result.

    Only a trial that ran to its end can be the best: the metric of a stopped one is from another step.
    Of equal trials the first is the best.
    """
    own = [EarlierTrial(trial.job, trial.state, trial.parameters, trial.value) for trial in trials]
    best: EarlierTrial | None = None
    for trial in (*plan.earlier, *own):
        if trial.state != "SUCCEEDED" or trial.value is None:
            continue
        if best is None or best.value is None or plan.is_better(trial.value, best.value):
            best = trial
    return best
