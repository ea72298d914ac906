"""The contestant `optuna` of `tune.py`: two processes run `study.optimize` on one storage, with `SuccessiveHalvingPruner`.

    python tune_optuna.py TASK GIVEN      one of the processes

That is how Optuna's documentation runs trials in parallel on one machine, with a `JournalFileBackend`. A process runs one
trial after another, so torch is imported once for each device. The first trial of a process holds its device from the start
of the process. A pruned trial never goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
import tune_problem
import tune_records
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState
from tune_task import GRACE, REDUCTION, Task

STUDY = "tuning"
LOOK_S = 0.05


def run(task: Task) -> float:
    """Tune until a trial has reached the score, or until the end. Returns the time of the start."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    hyperparameters = task.hyperparameters()
    started = time.time()
    study = optuna.create_study(study_name=STUDY, storage=_storage(task.place), direction="maximize")
    for tried in hyperparameters:
        study.enqueue_trial(vars(tried))
    if task.quick:
        work(task, time.time())
        return started
    given = time.time()
    words = json.dumps({**asdict(task), "place": str(task.place)})
    processes = [subprocess.Popen([sys.executable, __file__, words, str(given)]) for _ in range(task.parallel)]
    while any(process.poll() is None for process in processes) and not task.is_reached:
        time.sleep(LOOK_S)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"Optuna's processes ended with {[process.returncode for process in processes]}")
    for process in processes:
        process.kill()
        process.wait()
    return started


def work(task: Task, given: float) -> None:
    """Run trials until all are done.

    Args:
        task: the tuning.
        given: when this process got its device.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=GRACE, reduction_factor=REDUCTION)
    study = optuna.load_study(
        study_name=STUDY, storage=_storage(task.place), sampler=optuna.samplers.RandomSampler(), pruner=pruner
    )
    is_first = True

    def objective(trial: optuna.Trial) -> float:
        nonlocal is_first
        number = trial.number + 1
        tried = tune_problem.Hyperparameters(
            lr=trial.suggest_float("lr", *tune_problem.LR, log=True),
            width=trial.suggest_categorical("width", tune_problem.WIDTHS),
            weight_decay=trial.suggest_float("weight_decay", *tune_problem.WEIGHT_DECAY, log=True),
        )
        tune_records.write(task.place, number, "chosen")
        tune_records.write(task.place, number, "given", at=given if is_first else None)
        is_first = False
        try:
            return _train(trial, tried, task)
        finally:
            tune_records.write(task.place, number, "released")

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    study.optimize(objective, n_trials=task.trials, callbacks=[MaxTrialsCallback(task.trials, states=ended)])


def _train(trial: optuna.Trial, tried: tune_problem.Hyperparameters, task: Task) -> float:
    tune_records.write(task.place, trial.number + 1, "began")
    score = 0.0
    for epoch, score in enumerate(tune_problem.train(tried, task.place, task.epochs), start=1):
        tune_records.write(task.place, trial.number + 1, "score", score)
        trial.report(score, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return score


def _storage(place: Path) -> Any:
    return JournalStorage(JournalFileBackend(str(place / "journal")))


def main() -> None:
    words, given = sys.argv[1:]
    values = json.loads(words)
    work(Task(**{**values, "place": Path(values["place"])}), float(given))


if __name__ == "__main__":
    main()
