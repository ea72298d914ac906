"""A tuning when it is submitted: its plan, and the checks that need the store."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.jobs.execution import BUCKETS
from footplate.jobs.states import FINAL
from footplate.jobs.store.jobs import Store, WrongState
from footplate.jobs.tuning.checkpoints import keep_checkpoint
from footplate.jobs.tuning.plan import EarlierTrial, TuningPlan
from footplate.jobs.tuning.population import QUARTER
from footplate.jobs.tuning.trial_jobs import START, trial_name

if TYPE_CHECKING:
    from footplate.jobs.spec.resolving import ResolvedJob

# Names of jobs have at most 128 characters.
_NAME_CHARACTERS = 128
SEED = "FOOTPLATE_SEED"
# Backends whose trials write their checkpoints where this machine reads them.
_SHARES_DISK = ("local", "slurm")


def tuning_plan(
    resolved: ResolvedJob, store: Store, options: Mapping[str, Any], backend: str = "local"
) -> TuningPlan | None:
    """The plan of a job that tunes; None for a job that is one training.

    Args:
        resolved: the job; it has a name.
        store: the store of the jobs.
        options: `seed`, `stop_early`, `imports`, `checkpoint` and `interval`, which a config can't express. Without a
            seed, `FOOTPLATE_SEED` gives it, or one is drawn and kept with the job.
        backend: where its trials run.

    Raises:
        ConfigError: its trials can't have names; the tuning that it continues can't be continued.
        WrongState: a job has the name of a trial.
    """
    spec = resolved.spec.get("hyperparameters")
    if spec is None:
        return None
    name = resolved.name or ""
    stop_early, imports = options.get("stop_early", ""), options.get("imports", ())
    checkpoint = options.get("checkpoint", "")
    interval = options.get("interval", 1)
    plan = TuningPlan.of(spec, _seed(options), _earlier(spec, store), stop_early, imports, checkpoint, interval)
    if plan.stop_early == "pbt":
        _check_population(plan, resolved.job_dir, backend)
    longest = trial_name(name, plan.max_trials)
    if len(longest) > _NAME_CHARACTERS:
        raise ConfigError(
            f"{name}: the name of its last trial, {longest[:20]}…, would be longer than {_NAME_CHARACTERS} characters. "
            "Choose a shorter name."
        )
    is_trial = re.compile(re.escape(name) + r"_trial_\d+")
    if taken := next((job.name for job in store.list() if is_trial.fullmatch(job.name)), None):
        raise WrongState(
            f"there is a job {taken} already, and a trial of {name} would have its name. Choose another name, or delete "
            f"it: footplate jobs delete {taken}"
        )
    return plan


def _check_population(plan: TuningPlan, job_dir: str | None, backend: str) -> None:
    if backend not in _SHARES_DISK:
        raise ConfigError(
            f"population-based training copies checkpoints on this machine's disk, and --backend is {backend}, whose "
            "machines have disks of their own. Choose another rule with --stop-early, or run the trials on this machine or "
            "on Slurm."
        )
    if plan.max_parallel_trials < QUARTER:
        raise ConfigError(
            f"population-based training compares the trials that run at once, and {plan.max_parallel_trials} is too few. "
            f"Run at least {QUARTER} at once (--parallel, maxParallelTrials)."
        )
    if job_dir is None or job_dir.startswith(BUCKETS):
        raise ConfigError(
            f"population-based training copies checkpoints, and --job-dir is {job_dir or 'not given'}. Give a directory of "
            "this machine."
        )


def keep_start(plan: TuningPlan, job_dir: str | None) -> TuningPlan:
    """Keep the checkpoint from which the trials begin, if it is on this machine: `start.ckpt` in the tuning's directory.

    Args:
        plan: the tuning.
        job_dir: its directory.

    Returns:
        The plan, with the kept checkpoint.

    Raises:
        ConfigError: it can't be kept.
    """
    remote = (plan.checkpoint, job_dir or "")
    if not plan.checkpoint or job_dir is None or any(path.startswith(BUCKETS) for path in remote):
        return plan
    kept = Path(job_dir) / START
    keep_checkpoint(Path(plan.checkpoint), kept)
    return replace(plan, checkpoint=str(kept))


def _seed(options: Mapping[str, Any]) -> int:
    if options.get("seed") is not None:
        return int(options["seed"])
    text = os.environ.get(SEED)
    if not text:
        return secrets.randbelow(2**31)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f'{SEED}="{text}": expected a whole number.') from None


def _earlier(spec: Mapping[str, Any], store: Store) -> list[EarlierTrial]:
    """The finished trials of the tuning that `resumePreviousJobId` names, and of those that it continued itself."""
    name = spec.get("resumePreviousJobId")
    if name is None:
        return []
    origin = f"trainingInput.hyperparameters.resumePreviousJobId: {name}"
    job = store.get(name)
    if job is None or job.plan.get("tuning") is None:
        raise ConfigError(f"{origin} is no tuning in this store. See: footplate jobs list")
    if job.state not in FINAL:
        raise ConfigError(f"{origin} is {job.state}: wait until it ends, or cancel it: footplate jobs cancel {name}")
    plan, wanted = TuningPlan.from_dict(job.plan["tuning"]), TuningPlan.of(spec, 0)
    for key, now, before in (
        ("goal", wanted.goal, plan.goal),
        ("hyperparameterMetricTag", wanted.metric, plan.metric),
        ("params", wanted.parameters, plan.parameters),
    ):
        if now != before:
            shown = "" if key == "params" else f": {now} here, {before} there"
            raise ConfigError(f"{origin} has other {key}{shown}. Its results count only for the same {key}.")
    own = [
        EarlierTrial(trial.job, str(trial.state), trial.parameters, trial.value)
        for trial in store.trials.of(name)
        if trial.has_ended
    ]
    return [*plan.earlier, *own]
