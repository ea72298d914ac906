"""The checkpoint that a call begins with: which one, and what is read of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate import checkpoint
from footplate.callbacks import ModelCheckpoint
from footplate.checkpoint.by_parts import load_by_parts
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.core.errors import CheckpointError
from footplate.core.foreign_checkpoints import to_run_state
from footplate.core.hooks import overrides
from footplate.launch import worker
from footplate.training import job
from footplate.training.changes import show_ckpt_path

if TYPE_CHECKING:
    from footplate.training.run import Run


def find_on_all(run: Run, ckpt_path: str | Place | None) -> Place | None:
    """Return, on every rank, the checkpoint that rank 0 finds."""

    def find() -> tuple[Place | None, str | None, bool]:
        path = find_checkpoint(run, ckpt_path)
        if path is None:
            return None, None, False
        is_origin = run.stage == "fit" and run.origin is not None and path == to_place(run.origin)
        return run.placement.for_all(path), shown_path(ckpt_path, path), is_origin

    path, shown, run.begins_from_origin = run.group.ask_first(find)
    show_ckpt_path(run.trainer, shown)
    return path


def or_best(run: Run, ckpt_path: str | Place | None, is_new: bool) -> str | Place | None:
    """Return `ckpt_path`, or the best checkpoint of the module that was trained last, if there is one."""
    if ckpt_path is None and not is_new:
        with contextlib.suppress(CheckpointError):
            return find_on_all(run, "best")
    return ckpt_path


def started_again(run: Run) -> bool:
    """Return True if this process repeats a `fit` that failed, and continues from its checkpoints."""
    return run.launch_id is not None and run.stage == "fit" and worker.attempt() > 0


def find_checkpoint(run: Run, ckpt_path: str | Place | None) -> Place | None:
    """Return the checkpoint for a `ckpt_path`. None for None, and for "last" if a run has not saved yet.

    Raises:
        CheckpointError: "last" without a checkpoint to evaluate, or "best" if none was kept.
    """
    savers = [callback for callback in run.callbacks if isinstance(callback, ModelCheckpoint)]
    directories = sorted({to_place(callback.dirpath) for callback in savers if callback.dirpath is not None}, key=str)
    where = ", ".join(map(str, directories)) or str(run.run_dir)

    def newest(key: str | None = None, value: Any = None) -> Place | None:
        """Return the newest checkpoint that serves the stage. Training needs more than weights."""
        return checkpoint.newest(
            directories,
            lambda meta: (
                (run.stage != "fit" or not meta.get("weights_only")) and (key is None or meta.get(key) == value)
            ),
        )

    if started_again(run):
        path = newest("launch", run.launch_id)
        if path is not None:
            return path
    if run.job_fit is not None and run.stage == "fit" and job.begun_again():
        path = newest("job_fit", run.job_fit)
        if path is not None:
            return path
    if run.origin is not None and run.stage == "fit":
        return to_place(run.origin)
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        path = newest()
        if path is None and run.stage != "fit":
            raise CheckpointError(f'ckpt_path="last": there is no checkpoint in {where}.')
        if path is None:
            run.print(f"No checkpoint in {where} to continue from: training begins at step 0.")
        return path
    if ckpt_path == "best":
        for callback in savers:
            link = to_place(callback.dirpath or run.run_dir) / f"best{checkpoint.SUFFIX}"
            for candidate in (callback.best_model_path, link):
                if candidate and checkpoint.exists(candidate):
                    return to_place(candidate)
        raise CheckpointError(
            'ckpt_path="best": no best checkpoint was kept. Use ModelCheckpoint(monitor=…), or ckpt_path="last".'
        )
    return to_place(ckpt_path)


def shown_path(ckpt_path: str | Place | None, path: Place) -> str:
    """Return what `trainer.ckpt_path` shows for a checkpoint: `last.ckpt`, if that is a link to it."""
    if ckpt_path != "last" or not isinstance(path, Path):
        return str(path)
    link = path.parent / checkpoint.LAST
    return str(link if link.exists() and link.samefile(path) else path)


def named_checkpoint(ckpt_path: str | Place | None, path: Place | None) -> Place | None:
    """Return the checkpoint that the user has chosen to continue from. None for the newest, and for none.

    Savers delete checkpoints that newer ones replace, but never this one.
    """
    if ckpt_path in (None, "last"):
        return None
    chosen = path if ckpt_path == "best" or path is None else to_place(ckpt_path)
    return None if chosen is None else store_of(chosen).resolve(chosen)


def read_checkpoint(run: Run, path: Place) -> dict[str, Any]:
    """Return the state to continue from. A state in another format is translated, and what it lacks is printed.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or needs code to be run.
    """
    state = to_run_state(load_state(run, path))
    if "made_by" in state:
        run.print(
            f"{path} was made by {state['made_by']}: weights, optimizers, schedulers and the place in the epoch continue; "
            "the order of the data and the random draws don't, and are Footplate's own from now on."
        )
    return state


def load_state(run: Run, path: Place) -> dict[str, Any]:
    """Load a checkpoint. If the model is sharded, its tensors stay in the files until the ranks know their shards.

    A hook of the user takes the state as it is, with tensors. For it, each rank loads the whole.
    """
    takers = [run.module, *run.callbacks, *([] if run.datamodule is None else [run.datamodule])]
    if run.parallel.sharded and not any(overrides(taker, "on_load_checkpoint") for taker in takers):
        return load_by_parts(path, run.world.rank, run.world.size)
    return checkpoint.load(path)


def call_load_hooks(run: Run, loaded: dict[str, Any]) -> None:
    """Call `on_load_checkpoint` of data module and module. These hooks may build layers, which are then trained."""
    for owner in (run.datamodule, run.module):
        if owner is not None and overrides(owner, "on_load_checkpoint"):
            owner.on_load_checkpoint(loaded)
