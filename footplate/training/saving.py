"""Checkpoints of a run: copied between two steps, and written in the background.

run state  →  host memory  →  hooks (`on_save_checkpoint`)  →  the writing thread  →  disk or object store

All ranks take part, since a state holds parts of each rank. Rank 0 writes. With a sharded model, each rank writes its own
part to a disk that all of them share. To an object store, rank 0 writes the whole.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks import Callback, ModelCheckpoint
from footplate.checkpoint.format.shards import cut_out
from footplate.checkpoint.run_state import describe
from footplate.checkpoint.storage import Place
from footplate.checkpoint.storage.joint import abandon, begin
from footplate.checkpoint.writer import Joint
from footplate.core.errors import CheckpointError, ConfigError
from footplate.core.hooks import overrides
from footplate.distributed.consistency import blind
from footplate.distributed.resharing import OWN
from footplate.hardware.transfer import to_device
from footplate.launch import worker
from footplate.training.crash_checkpoint import crash_phase
from footplate.training.lock import check as check_writer
from footplate.training.reports import finite

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def write_checkpoint(
    run: Run, path: Place, weights_only: bool = False, then: Callable[[], None] = lambda: None
) -> None:
    """Copy the run's state and write it in the background. All ranks call this.

    Args:
        run: the run.
        path: the checkpoint to write.
        weights_only: leave out everything that only resuming needs.
        then: called once the checkpoint is complete.

    Raises:
        CheckpointError: the save before this one failed.
        ConfigError: nothing has been trained.
    """
    if run.state is None:
        raise ConfigError("There is nothing to save: this trainer has trained no model. Call trainer.fit(model) first.")

    run.monitor.saved()
    with run.monitor.times.during("checkpoint"):
        _write(run, path, weights_only, then)


def _write(run: Run, path: Place, weights_only: bool, then: Callable[[], None]) -> None:
    if run.group.is_distributed:
        wait_for_save(run)
    # The disk that all ranks of a sharded model write to.
    shared = path if run.parallel.sharded and isinstance(path, Path) else None
    state = collect_state(run, weights_only, whole=shared is None)
    joint = None
    if shared is not None:
        state, parts = cut_out(state)
        joint = _begin_joint(run, shared, parts)
        run.writer.save_part(joint)
    if run.world.rank != 0:
        return

    # Rank 0 writes the rest.
    state["footplate"]["failed_in_step"] = run.failed_in_step
    meta = {**describe(state, run.progress), "metrics": finite(run.reports.callback)}
    meta |= {"launch": run.launch_id, "job_fit": run.job_fit}
    before = functools.partial(_before_write, run)
    if not weights_only:
        then = functools.partial(_saved, then)
    if joint is None:
        run.writer.save(state, path, meta, then, first=before)
    else:
        run.writer.complete(joint, state, meta, then, first=before)


def _saved(then: Callable[[], None]) -> None:
    """In the writing thread, when a checkpoint is complete."""
    then()
    worker.saved()


def collect_state(run: Run, weights_only: bool, whole: bool) -> dict[str, Any]:
    """Return the state that a checkpoint holds, after the hooks of a save. All ranks call this.

    Args:
        run: the run.
        weights_only: see `write_checkpoint`.
        whole: gather sharded tensors.
    """
    assert run.state is not None
    if run.make_loaders is not None and not weights_only:
        # The loader's position is part of the state.
        run.ask_for_loaders()
    state = run.state.state_dict(weights_only)
    if whole:
        state = run.parallel.whole(state)

    # Each rank has its own random numbers and loader position.
    if run.logical is not None and not weights_only:
        state["logical_ranks"] = run.logical.record()
        state["ranks"] = to_device(run.logical.parts(run, state), CPU)
        state["metrics"] = state["metrics"][0]
    elif run.group.is_distributed and not weights_only:
        own = {name: state[name] for name in OWN if name != "step" or run.parallel.own_gradients}
        # Ranks that read the same rows have the same part.
        state["ranks"] = run.group.gather_to_first(to_device(own, CPU))[:: run.ranks_of_a_share]
    _call_save_hooks(run, state, weights_only)
    if run.state.frozen_weights is not None:
        run.state.frozen_weights.leave_out(state)
    return state


def _call_save_hooks(run: Run, state: dict[str, Any], weights_only: bool) -> None:
    if not weights_only:
        run.hooks.call("on_save_checkpoint", state)
        return
    for callback in run.callbacks:
        if isinstance(callback, Callback):
            state["state_dict"] = callback.weights_to_save(state["state_dict"])
    if overrides(run.module, "on_save_checkpoint"):
        run.module.on_save_checkpoint(state)


def _begin_joint(run: Run, path: Path, parts: Any) -> Joint:
    """Begin a checkpoint of which every rank writes a part.

    Raises:
        CheckpointError: a rank can't see the directory.
    """
    token = run.group.ask_first(lambda: begin(path))
    joint = Joint(path, token, run.world.rank, run.world.size, parts)
    without = blind(run.group, joint.directory)
    if without:
        run.group.ask_first(lambda: abandon(path, token))
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {without} can't see its directory. All ranks of a sharded model "
            "write into it. Set default_root_dir to a disk that all machines share, or "
            'ModelCheckpoint(dirpath="s3://…").'
        )
    return joint


def _before_write(run: Run) -> None:
    """In the writing thread: refuse to write beside a later attempt, then flush the loggers."""
    check_writer(run.run_dir)
    for logger in run.recorders:
        logger.flush()


def wait_for_save(run: Run) -> None:
    """Wait until the last save is complete. All ranks call this.

    With a sharded model, the ranks first compare whether their parts are written. So no rank waits for a rank that has
    died, or whose disk is full.

    Raises:
        CheckpointError: it could not be written, on any rank.
    """
    if run.parallel.sharded:
        faults = [fault for fault in run.group.gather(run.writer.part_fault()) if fault]
        if faults:
            run.writer.make_haste()
            raise CheckpointError(faults[0])
    run.group.ask_each(run.writer.wait)


def save_before_end(run: Run, failing: bool = False) -> str:
    """Save the run as it is, if it keeps its last checkpoint or one of its failure. Return a message for the user.

    The first saver that saves the whole state does it.
    """
    # The attributes of a trainer are descriptors, which pyright doesn't match with a protocol.
    trainer: Any = run.trainer
    for callback in run.callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.save_weights_only:
            continue
        if callback.save_last or (failing and callback.save_on_exception):
            path = callback.save_now(trainer)
            return "" if path is None else f'saved {path}; continue with ckpt_path="last".'
    return ""


def end_on_signal(run: Run) -> None:
    """Save and end between two steps, because of a signal.

    Raises:
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after SIGINT.
    """
    if run.training_in_progress:
        message = save_before_end(run)
        wait_for_save(run)
        # The ranks end together: a rank that ends early would count as lost.
        run.group.barrier()
        run.print(f"{run.signals.reason} after step {run.progress.global_step}: {message}")
    raise run.signals.end()


def save_before_failing(run: Run, error: BaseException) -> None:
    """Save a run that an exception ends, as it was before the failed batch."""
    run.failed_in_step = crash_phase(run) != "between steps"
    run.training_metrics.take_back()
    try:
        message = save_before_end(run, failing=True)
        run.writer.wait()
    except Exception as failure:
        # The user must see the first exception, not this one.
        log.warning("The run could not be saved as it was when it failed: %s", failure)
    else:
        run.print(f"{type(error).__name__} after step {run.progress.global_step}: {message}")
