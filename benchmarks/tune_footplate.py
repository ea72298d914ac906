"""The contestant `footplate` of `tune.py`: a job with hyperparameters and the rule `asha`.

Trials begin from forks of a process that has imported what they import. A trial that isn't among the best third is paused,
and may go on later. A trial holds its device from PREPARING, before its fork is asked for, until its job has ended.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import tune_records
from tune_task import Task

from footplate.jobs.operations import Jobs
from footplate.jobs.spec.draft import draft, put
from footplate.jobs.spec.resolving import resolve
from footplate.jobs.states import FINAL, State
from footplate.jobs.submission import PlannedJob, submit

NAME = "tuning"
LOOK_S = 0.05
_HERE = Path(__file__).parent
_PROGRAM = ("tune_trial.py", "tune_problem.py", "tune_records.py")


def run(task: Task) -> float:
    """Tune until a trial has reached the score, or until the end. Returns the time of the start."""
    os.environ["FOOTPLATE_HOME"] = str(task.place / "home")
    started, jobs = time.time(), Jobs.from_env()
    _submit(task, jobs)
    while jobs.store.state(NAME) not in FINAL and not task.is_reached:
        time.sleep(LOOK_S)
    if jobs.store.state(NAME) not in FINAL:
        jobs.cancel(NAME)
    job = jobs.wait(NAME)
    if job.state == State.FAILED:
        raise RuntimeError(f"{NAME} has failed: {job.cause}")
    _record(task, jobs)
    jobs.store.close()
    return started


def _submit(task: Task, jobs: Jobs) -> None:
    package = task.place / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    for file in _PROGRAM:
        shutil.copy(_HERE / file, package)
    flags = {"module-name": "trainer.tune_trial", "job-dir": str(task.place / "run")}
    requested = draft(None, flags, (str(task.place), str(task.epochs)), NAME)
    put(requested.values, ("trainingInput", "hyperparameters"), task.spec())
    submit(
        PlannedJob(resolve(requested), package, tuning_options={"seed": task.seed, "stop_early": "asha"}),
        jobs,
    )


def _record(task: Task, jobs: Jobs) -> None:
    """Write down what the store has about the trials."""
    for trial in jobs.store.trials.of(NAME):
        tune_records.write(task.place, trial.number, "chosen", at=trial.created)
        for transition in jobs.store.transitions(trial.job):
            if transition.target == State.PREPARING:
                tune_records.write(task.place, trial.number, "given", at=transition.at)
            elif transition.target in FINAL:
                tune_records.write(task.place, trial.number, "released", at=transition.at)
