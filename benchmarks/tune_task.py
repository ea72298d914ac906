"""A tuning of `tune.py`, as every contestant gets it.

All contestants try the same hyperparameters in the same order: those that Footplate's random search draws from the seed. So
the luck of the draw isn't part of a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tune_records
from tune_problem import LR, WEIGHT_DECAY, WIDTHS, Hyperparameters

METRIC = "score"
# Successive halving: a trial is judged after 1, 3, 9, … epochs, and the best third goes on.
GRACE, REDUCTION = 1, 3


@dataclass(frozen=True)
class Task:
    """A tuning.

    Attributes:
        place: a directory with the table, for the records and the contestant's own files.
        seed: of the search.
        trials: the most trials.
        epochs: the most epochs of a trial.
        parallel: the trials at once.
        target: the score at which the tuning may end.
        quick: a peer may run its trials in this process.
    """

    place: Path
    seed: int
    trials: int
    epochs: int
    parallel: int
    target: float
    quick: bool

    @property
    def is_reached(self) -> bool:
        """True if a trial has reached the score."""
        return tune_records.time_of_score(tune_records.read(self.place), self.target) is not None

    def hyperparameters(self) -> list[Hyperparameters]:
        """What the trials try, in their order."""
        # Import here: the processes of the peers don't need Footplate.
        from footplate.jobs.record import Trial, TrialState
        from footplate.jobs.tuning.plan import TuningPlan
        from footplate.jobs.tuning.proposals import propose

        plan = TuningPlan.of(self.spec(), self.seed)
        trials: list[Trial] = []
        for number in range(1, self.trials + 1):
            drawn = propose(plan, number, trials)
            assert drawn is not None
            trials.append(Trial("", number, "", TrialState.ACTIVE, drawn))
        return [Hyperparameters(**trial.parameters) for trial in trials]  # type: ignore[arg-type]

    def spec(self) -> dict[str, Any]:
        """The tuning as `trainingInput.hyperparameters` of a job."""
        doubles = {"lr": LR, "weight_decay": WEIGHT_DECAY}
        params: list[dict[str, Any]] = [
            {
                "parameterName": name,
                "type": "DOUBLE",
                "minValue": low,
                "maxValue": high,
                "scaleType": "UNIT_LOG_SCALE",
            }
            for name, (low, high) in doubles.items()
        ]
        return {
            "goal": "MAXIMIZE",
            "hyperparameterMetricTag": METRIC,
            "maxTrials": self.trials,
            "maxParallelTrials": self.parallel,
            "algorithm": "RANDOM_SEARCH",
            "params": [*params, {"parameterName": "width", "type": "DISCRETE", "discreteValues": list(WIDTHS)}],
        }
