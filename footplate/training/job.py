"""What a trainer knows of the job that it runs in (`footplate/jobs`), from the variables that the job's processes get.

A job is begun again when its machine or a process was lost. So that a program which says nothing of it continues:

- the n-th call of `fit` in a later attempt continues from the newest checkpoint that the n-th call of an earlier one has
  saved in the same directory, whatever `ckpt_path` says, as in a restart of `Trainer(devices=N)`; with none there,
  `ckpt_path` holds. A program that fits several times must do so in the same order, then.
- without `default_root_dir`, the run's directory is the job's, if that is on this machine: the same in each attempt.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

_fits = itertools.count(1)


def next_fit() -> str | None:
    """The name of a call of `fit`, by which a later attempt knows its checkpoints; None outside a job."""
    job = os.environ.get("FOOTPLATE_JOB_ID")
    return None if job is None else f"{job}/{next(_fits)}"


def begun_again() -> bool:
    """Whether this is a later attempt of a job."""
    return "FOOTPLATE_JOB_ID" in os.environ and int(os.environ.get("FOOTPLATE_JOB_ATTEMPT", 1)) > 1


def directory() -> Path | None:
    """The job's directory; None outside a job, and where it is in a bucket."""
    found = os.environ.get("FOOTPLATE_JOB_DIR")
    return Path(found) if "FOOTPLATE_JOB_ID" in os.environ and found and "://" not in found else None
