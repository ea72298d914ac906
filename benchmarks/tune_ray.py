"""The contestant `ray tune` of `tune.py`: Ray Tune with `ASHAScheduler`, on two cores of this machine.

Ray is started before the clock. Actors are reused (`reuse_actors`), so torch is imported once for each device. A trial
holds its device from the moment when the search hands it out, until Ray calls it complete. A stopped trial never goes on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import tune_problem
import tune_records
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from tune_task import GRACE, METRIC, REDUCTION, Task


@contextmanager
def cluster(cores: int) -> Iterator[None]:
    """Ray, with this process connected. Its workers find the benchmark's modules."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}):
        ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def run(task: Task) -> float:
    """Tune until a trial has reached the score, or until the end. Returns the time of the start."""
    with cluster(task.parallel):
        tuner, started = _tuner(task), time.time()
        if errors := tuner.fit().errors:
            raise errors[0]
        return started


def _tuner(task: Task) -> tune.Tuner:
    points = [{"number": number, **vars(tried)} for number, tried in enumerate(task.hyperparameters(), start=1)]
    space = {
        "number": 0,
        "lr": tune.loguniform(*tune_problem.LR),
        "width": tune.choice(tune_problem.WIDTHS),
        "weight_decay": tune.loguniform(*tune_problem.WEIGHT_DECAY),
    }
    tuning = tune.TuneConfig(
        metric=METRIC,
        mode="max",
        search_alg=_Search(task, points),
        scheduler=ASHAScheduler(max_t=task.epochs, grace_period=GRACE, reduction_factor=REDUCTION),
        num_samples=task.trials,
        reuse_actors=True,
    )
    running = tune.RunConfig(
        storage_path=str(task.place / "ray"), verbose=0, stop=_Reached(task), callbacks=[_Released(task)]
    )
    return tune.Tuner(
        tune.with_parameters(_train, task=task), param_space=space, tune_config=tuning, run_config=running
    )


def _train(config: dict[str, Any], task: Task) -> None:
    number = config["number"]
    tune_records.write(task.place, number, "began")
    tried = tune_problem.Hyperparameters(config["lr"], config["width"], config["weight_decay"])
    for score in tune_problem.train(tried, task.place, task.epochs):
        tune_records.write(task.place, number, "score", score)
        tune.report({METRIC: score})


class _Search(BasicVariantGenerator):
    """Hands out the trials, as many at once as there are devices, and writes that down."""

    def __init__(self, task: Task, points: list[dict[str, Any]]) -> None:
        super().__init__(points_to_evaluate=points, max_concurrent=task.parallel)
        self._place = task.place

    def next_trial(self) -> Any:
        trial = super().next_trial()
        if trial is not None:
            tune_records.write(self._place, trial.config["number"], "chosen")
            tune_records.write(self._place, trial.config["number"], "given")
        return trial


class _Released(tune.Callback):
    """Writes down that a trial has ended."""

    def __init__(self, task: Task) -> None:
        self._place = task.place

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        tune_records.write(self._place, trial.config["number"], "released")


class _Reached(tune.Stopper):
    """Ends the tuning when a trial has reached the score."""

    def __init__(self, task: Task) -> None:
        self._target = task.target
        self._is_reached = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self._is_reached = self._is_reached or result[METRIC] >= self._target
        return self._is_reached

    def stop_all(self) -> bool:
        return self._is_reached
