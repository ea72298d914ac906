"""The job of a trial: the tuning's job with a trial's parameters.

    trainer.task ARGS                      the tuning's program and its arguments
        --lr=0.01 --layers=3               the trial's parameters, after them
        --job-dir JOB_DIR/7                the trial's own directory, in that of the tuning

A trial's processes have these variables:

    CLOUD_ML_TRIAL_ID, TF_CONFIG's task.trial    the trial's number, from 1
    CLOUD_ML_JOB_ID                              the tuning's name
    CLOUD_ML_HP_METRIC_FILE                      where `cloudml-hypertune` writes
    FOOTPLATE_TRIAL_METRIC, FOOTPLATE_TRIAL_REPORTS    what a trainer reports, and where (`training/trial.py`)
    FOOTPLATE_TRIAL_TUNING                       the id of the tuning's job, for MLflow's parent run
    FOOTPLATE_FROM_CHECKPOINT                    the checkpoint from which it begins, if there is one (`training/job.py`)

The files of reports are in the folder of the attempt, so those of a rolled-back attempt are known. Only the master's count.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from footplate.jobs import process_env
from footplate.jobs.execution import Execution
from footplate.jobs.home import PACKAGE, Home
from footplate.jobs.record import Fork, Job, Trial, TrialState
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import FINAL, State
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision.cleaning import put_into_trash
from footplate.jobs.tuning.plan import TuningPlan
from footplate.jobs.tuning.report_lines import HYPERTUNE, TRAINER
from footplate.jobs.tuning.space import Value, to_argument

# A copy of the checkpoint that all trials, or a fork, begin from.
START = "start.ckpt"


def trial_name(tuning: str, number: int) -> str:
    """The name of a trial's job."""
    return f"{tuning}_trial_{number}"


def trial_job_dir(job_dir: str, number: int) -> str:
    """The directory of a trial, in that of its tuning."""
    return f"{job_dir.rstrip('/')}/{number}"


def make_trial(
    parent: Job,
    plan: TuningPlan,
    number: int,
    parameters: dict[str, Value],
    needs: Resources,
    fork: Fork | None = None,
) -> tuple[Trial, Job]:
    """Make a trial and its job, as they are added to the store.

    Args:
        parent: the job of the tuning.
        plan: the tuning.
        number: the trial's number.
        parameters: name → value.
        needs: the part of the machine that a trial needs.
        fork: the trial that it begins from, whose checkpoint is kept in the directory of the new trial.
    """
    name, now = trial_name(parent.name, number), time.time()
    execution = Execution.from_dict(parent.plan)
    own = [to_argument(parameter, value) for parameter, value in parameters.items()]
    arguments, job_dir = list(execution.arguments), execution.job_dir
    if job_dir is None:
        arguments += own
    else:
        # A program gets its directory last.
        job_dir = trial_job_dir(job_dir, number)
        arguments[-2:] = [*own, "--job-dir", job_dir]
    trial = {
        "tuning": parent.name,
        "tuning_id": parent.id,
        "number": number,
        "metric": plan.metric,
        "parameters": dict(parameters),
        "checkpoint": plan.checkpoint if fork is None or job_dir is None else str(fork_checkpoint(job_dir)),
    }
    spec = _spec_of_trial(execution.spec)
    execution = replace(
        execution, name=name, arguments=tuple(arguments), job_dir=job_dir, spec=spec, tuning=None, trial=trial
    )
    described = {
        **parent.spec, "jobId": name, "jobDir": job_dir, "command": ["python", *arguments], "trainingInput": spec,
        "trial": trial,
    }  # fmt: skip
    job = Job(
        name, State.QUEUED, created=now, queued=now, host=parent.host, backend=parent.backend, priority=parent.priority,
        needs=needs, plan=execution.to_dict(), spec=described, labels=dict(parent.labels),
    )  # fmt: skip
    return Trial(parent.name, number, name, TrialState.ACTIVE, dict(parameters), created=now, fork=fork), job


def fork_checkpoint(job_dir: str) -> Path:
    """The copy of the checkpoint that a fork begins from.

    Args:
        job_dir: the directory of the fork.
    """
    return Path(job_dir) / START


def make_folder(home: Home, parent: Job, job: Job) -> None:
    """Make the folder of a trial's job, before the job is in the store. A folder that a crash left is replaced.

    Raises:
        ConfigError: the variables of the tuning's job can't be read.
        OSError: there is no space, or no permission.
    """
    folder = home.job(job.name)
    if folder.exists():
        shutil.rmtree(put_into_trash(home, folder), ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    (folder / job.id).touch()
    (folder / PACKAGE).write_text((home.job(parent.name) / PACKAGE).read_text())
    process_env.copy(home.job(parent.name), folder)


def trial_variables(trial: Mapping[str, Any], folder: Path, role: str, index: int) -> dict[str, str]:
    """The variables of a process of a trial.

    Args:
        trial: the trial, as `Execution.trial`.
        folder: the folder of the attempt.
        role: the process's role.
        index: its number within the role.
    """
    is_master = role == "master"
    hypertune = HYPERTUNE if is_master else f"{role}-{index}-{HYPERTUNE}"
    reports = {"FOOTPLATE_TRIAL_REPORTS": str(folder / TRAINER), **variables_of_master(trial)}
    return {
        **variables_of_all(trial),
        "CLOUD_ML_HP_METRIC_FILE": str(folder / hypertune),
        **(reports if is_master else {}),
    }


def variables_of_all(trial: Mapping[str, Any]) -> dict[str, str]:
    """The variables that all processes of a trial have, wherever they run."""
    return {
        "CLOUD_ML_JOB_ID": trial["tuning"],
        "CLOUD_ML_TRIAL_ID": str(trial["number"]),
        **({"FOOTPLATE_FROM_CHECKPOINT": trial["checkpoint"]} if trial.get("checkpoint") else {}),
    }


def variables_of_master(trial: Mapping[str, Any]) -> dict[str, str]:
    """The variables that only the master of a trial has, wherever it runs."""
    return {"FOOTPLATE_TRIAL_METRIC": trial["metric"], "FOOTPLATE_TRIAL_TUNING": trial["tuning_id"]}


def end_job(store: Store, name: str, cause: str) -> bool:
    """Ask for the end of a trial's job, which may save first. Returns True if it has ended."""
    while True:
        job = store.get(name)
        if job is None or job.state in FINAL:
            return True
        if job.state == State.CANCELLING:
            return False
        now = time.time()
        if job.state == State.QUEUED:
            store.move(name, State.QUEUED, State.CANCELLED, now, cause, ended=now)
        else:
            store.move(name, job.state, State.CANCELLING, now, cause)


def continue_job(store: Store, name: str) -> None:
    """Put a trial's cancelled job into the queue again. It continues from its newest checkpoint."""
    now = time.time()
    store.move(
        name, State.CANCELLED, State.QUEUED, now, "its tuning continues", queued=now, started=None, ended=None,
        failures=0, losses=0, owner=None,
    )  # fmt: skip


def _spec_of_trial(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec of one training. The longest waiting time is the tuning's: it ends when the first trial begins."""
    own = {key: copy.deepcopy(value) for key, value in spec.items() if key != "hyperparameters"}
    if "scheduling" in own:
        own["scheduling"].pop("maxWaitTime", None)
    return own
