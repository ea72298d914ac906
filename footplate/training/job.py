"""The job that a trainer runs in (`footplate/jobs`), read from the variables of the job's processes.

A job is started again when its machine or a process was lost. A program that doesn't know of jobs continues then:

- The n-th call of `fit` in a later attempt continues from the newest checkpoint that the n-th call of an earlier attempt
  saved in the same directory, whatever `ckpt_path` is, as in a restart of `Trainer(devices=N)`. Without such a checkpoint,
  `ckpt_path` counts. So a program that fits several times must do so in the same order.
- `FOOTPLATE_FROM_CHECKPOINT` names a checkpoint from which the first call of `fit` begins, whatever `ckpt_path` is. Unlike
  a resumed run, it keeps its own hyperparameters (`checkpoint/optimizer_settings.py`). The trials of a tuning begin so.
  Their later attempts continue from their own checkpoints. The variable works outside of a job, too.
- Without `default_root_dir`, the run's directory is the job's, the same in each attempt. If the job's directory is in a
  bucket, the run's is `runs/NAME` on this machine, and checkpoints go into the bucket.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from footplate.checkpoint.storage import Place, is_remote, to_place

_fits = itertools.count(1)


def next_fit() -> tuple[str | None, str | None]:
    """Count a call of `fit`.

    Returns:
        Its name, by which a later attempt finds its checkpoints; None outside a job. The checkpoint of another training
        that it begins from; None without one.
    """
    job, number = os.environ.get("FOOTPLATE_JOB_ID"), next(_fits)
    origin = os.environ.get("FOOTPLATE_FROM_CHECKPOINT") if number == 1 else None
    return None if job is None else f"{job}/{number}", origin or None


def identity() -> str | None:
    """Return the job's id, which no other job has, not even a later one of the same name. None outside a job."""
    return os.environ.get("FOOTPLATE_JOB_ID") or None


def begun_again() -> bool:
    """Return True in a later attempt of a job."""
    return "FOOTPLATE_JOB_ID" in os.environ and int(os.environ.get("FOOTPLATE_JOB_ATTEMPT", 1)) > 1


def directory() -> Path | None:
    """Return the directory of a run that names none. None outside a job, and in a job without a directory."""
    folder = _directory()
    if folder is None:
        return None
    return Path("runs") / os.environ["FOOTPLATE_JOB_NAME"] if is_remote(folder) else Path(folder)


def checkpoints(run_dir: Path) -> Place:
    """Return where a run keeps its checkpoints by default: in its directory, or in the job's bucket."""
    folder, own = _directory(), directory()
    if folder is not None and own is not None and is_remote(folder) and own.absolute() == run_dir.absolute():
        return to_place(folder) / "checkpoints"
    return run_dir / "checkpoints"


def _directory() -> str | None:
    return (os.environ.get("FOOTPLATE_JOB_DIR") or None) if "FOOTPLATE_JOB_ID" in os.environ else None
