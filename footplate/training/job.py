"""What a trainer knows of the job that it runs in (`footplate/jobs`), from the variables that the job's processes get.

A job is begun again when its machine or a process was lost. So that a program which says nothing of it continues:

- the n-th call of `fit` in a later attempt continues from the newest checkpoint that the n-th call of an earlier one has
  saved in the same directory, whatever `ckpt_path` says, as in a restart of `Trainer(devices=N)`; with none there,
  `ckpt_path` holds. A program that fits several times must do so in the same order, then.
- without `default_root_dir`, the run's directory is the job's: the same in each attempt. If the job's is in a bucket, the
  run's is `runs/NAME` on this machine, and checkpoints go into the bucket.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from footplate.checkpoint.storage import Place, is_remote, to_place

_fits = itertools.count(1)


def next_fit() -> str | None:
    """The name of a call of `fit`, by which a later attempt knows its checkpoints; None outside a job."""
    job = os.environ.get("FOOTPLATE_JOB_ID")
    return None if job is None else f"{job}/{next(_fits)}"


def begun_again() -> bool:
    """Whether this is a later attempt of a job."""
    return "FOOTPLATE_JOB_ID" in os.environ and int(os.environ.get("FOOTPLATE_JOB_ATTEMPT", 1)) > 1


def directory() -> Path | None:
    """The directory of a run that names none; None outside a job, and in one without a directory."""
    found = _directory()
    if found is None:
        return None
    return Path("runs") / os.environ["FOOTPLATE_JOB_NAME"] if is_remote(found) else Path(found)


def checkpoints(run_dir: Path) -> Place:
    """Where a run keeps its checkpoints if it doesn't say: in its directory, or in the job's bucket."""
    found, own = _directory(), directory()
    if found is not None and own is not None and is_remote(found) and own.absolute() == run_dir.absolute():
        return to_place(found) / "checkpoints"
    return run_dir / "checkpoints"


def _directory() -> str | None:
    return (os.environ.get("FOOTPLATE_JOB_DIR") or None) if "FOOTPLATE_JOB_ID" in os.environ else None
