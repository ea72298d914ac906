"""Hyperparameter tuning: a job with `hyperparameters` makes trials, which are jobs of the same store.

    the tuning's supervisor ─► TuningAttempt ─► trial 1, 2, 3, …: jobs with supervisors of their own

space.py         parameters, and their values as positions in the unit cube
plan.py          goal, parameters and limits; the best of some trials
proposals.py     the parameters of the next trial
measurements.py  the measurements of a trial's metric
stopping.py      which trials are stopped early
population.py    population-based training: which trial gives way to a fork of which other one
trial_jobs.py    the job of a trial
attempt.py       the trials, added and followed until the tuning ends
backend.py       what the tuning's supervisor needs of a backend
submission.py    checks, and the plan, when a tuning is submitted
checkpoints.py   copies of checkpoints that trials begin from
results.py       the trials, the best first, and the best of them

The store keeps trials and results (`store/trials.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.jobs.backends import get_backend

if TYPE_CHECKING:
    from footplate.jobs.backends.contract import SupervisedBackend
    from footplate.jobs.record import Job
    from footplate.jobs.store.jobs import Store


def backend_of(job: Job, store: Store) -> SupervisedBackend:
    """The backend on which a job's supervisor makes its attempts.

    Args:
        job: the job.
        store: its store.
    """
    if job.plan.get("tuning") is None:
        return get_backend(job.backend)
    # Import here: a supervisor of one training doesn't need it, and starts faster.
    from footplate.jobs.tuning.backend import TuningBackend

    return TuningBackend(store)
