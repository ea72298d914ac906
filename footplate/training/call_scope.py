"""The beginning and the end of every call of a trainer.

    begin   the module gets its trainer  →  the ranks meet  →  callbacks, settings compared
    end     after an exception: the run is saved if possible, `on_exception`, a plain error for some common exceptions
            always: worker processes, weights on other devices, checkpoints, profiles, loggers, `teardown`

A call closes here what it has opened, so that the next call of the trainer starts clean.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from footplate.callbacks.ambient import present
from footplate.core.adapters import adapter_of
from footplate.core.errors import CheckpointError
from footplate.core.hooks import Hooks, order_of, overrides
from footplate.core.stacks import answering
from footplate.tracking.base import Status
from footplate.training.argument_checks import as_list
from footplate.training.changes import changed, take_callbacks, warn_of_late_changes
from footplate.training.crash_checkpoint import savable
from footplate.training.out_of_memory import explain_memory
from footplate.training.prepare import attach, explain, replaces, translate_callbacks, without_searches
from footplate.training.profiling import profiling, recorder
from footplate.training.rank_checks import check_settings
from footplate.training.saving import save_before_failing
from footplate.training.status import TrainerFn, running
from footplate.training.step_setup import leave_device

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)


@contextlib.contextmanager
def called(run: Run) -> Iterator[None]:
    """Begin and end a call, around a `with` block."""
    stage = run.stage
    assert stage is not None
    with answering.while_running(), running(run):
        attach(run.trainer, stage, run.module, run.datamodule)
        join(run)
        use_callbacks(run, _callbacks_of(run))
        check_settings(run)
        status: Status = "failed"
        try:
            with torch.autograd.set_detect_anomaly(run.config.detect_anomaly), run.signals, profiling(run, stage):
                yield
            status = "success"
        except BaseException as error:
            status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            _fail(run, error)
            raise
        finally:
            _end(run, status)


def _fail(run: Run, error: BaseException) -> None:
    """Handle an exception before the call ends.

    Raises:
        FootplateError: a plain error in the place of some exceptions.
    """
    run.status = "interrupted"
    explain_memory(run, error)
    if run.group.is_distributed and hasattr(run, "step"):
        run.step.leave()
    if savable(run, error):
        save_before_failing(run, error)
    run.hooks.call("on_exception", error)
    plain = explain(error)
    if plain is not None:
        raise plain from error


def _end(run: Run, status: Status) -> None:
    run.monitor.close(run, "finished" if status == "success" else status)
    if run.logical is not None:
        run.logical.give_threads_back()
    run.training_in_progress = run.sanity_checking = False
    run.make_loaders = run.found_loaders = None
    run.end_workers()
    apart = run.parallel.is_distributed or run.parallel.copies or run.accelerator.owns_weights
    has_graphs = isinstance(run.config.compile, str)
    if (apart or has_graphs) and hasattr(run, "step"):
        run.step.release()
    if status != "success":
        run.writer.make_haste()
    try:
        with contextlib.nullcontext() if status == "success" else contextlib.suppress(CheckpointError):
            run.writer.close()
    finally:
        # A machine that is being taken away gives time for the checkpoint first.
        if hasattr(run, "profiles"):
            run.profiles.close()
    for logger in run.recorders:
        logger.finalize(status)
    run.hooks.call("teardown", stage=TrainerFn(str(run.stage)))
    # A GPU with a failed kernel can't be read any more. The user must see the first exception.
    with contextlib.nullcontext() if status == "success" else contextlib.suppress(RuntimeError):
        leave_device(run)
    warn_of_late_changes(run.trainer)


def join(run: Run) -> None:
    """Meet the other ranks, the first time. From then on, seed and directory are those of rank 0."""
    if run.placement.meet():
        run.seed = run.group.from_first(run.seed)
        run.run_dir = Path(run.group.from_first(run.placement.for_all(run.run_dir)))
    if run.group.is_distributed:
        run.agree()
        # Callbacks may ask for the clock that all ranks share.
        run.agreement.settle()


def use_callbacks(run: Run, callbacks: list[Any]) -> None:
    """Set the callbacks of a run."""
    run.trainer.show_callbacks(callbacks)
    for callback in callbacks:
        callback.log, callback.log_dict = run.module.log, run.module.log_dict
    before_looking = (lambda: _lend_weights(run)) if run.accelerator.owns_weights else None
    run.hooks = Hooks(run.trainer, run.module, run.datamodule, callbacks, before_looking, recorder(run.profiler))


def _lend_weights(run: Run) -> None:
    if hasattr(run, "step"):
        run.step.fetch_weights(may_change=True)


def _callbacks_of(run: Run) -> list[Any]:
    """Return the callbacks of a call, late ones last.

    They are the trainer's, those of `everywhere`, those of the accelerator, and the module's. A callback of the module
    replaces one of the same type.
    """
    watchers = [pkgutil.resolve_name(name)(run.accelerator) for name in run.accelerator.callbacks]
    callbacks = [*run.trainer.own_callbacks, *present(), *watchers]
    for callback in translate_callbacks(as_list(run.module.configure_callbacks())):
        callbacks = [existing for existing in callbacks if not replaces(callback, existing)] + [callback]
    if any(getattr(callback, "saves_nothing", False) for callback in callbacks):
        callbacks = [existing for existing in callbacks if not isinstance(existing, ModelCheckpoint)]
    if run.world.rank != 0:
        callbacks = [existing for existing in callbacks if not isinstance(existing, (ProgressBar, ModelSummary))]
    return sorted(without_searches(callbacks), key=order_of)


def call_setup(run: Run) -> None:
    """Call `prepare_data` on one rank of each machine, then `setup` and `configure_model` on all."""
    if run.world.local_rank == 0:
        run.hooks.call("prepare_data")
    run.group.barrier()
    adapter = adapter_of(run.module)
    if adapter is not None:
        adapter.ranks_met(run.module, run.trainer)
    stage = TrainerFn(str(run.stage))
    for hook in (*run.hooks.late("setup"), *run.hooks.get("setup")):
        hook(stage=stage)
    # A hook has added callbacks. They take part in this call.
    while changed(run.trainer):
        added = take_callbacks(run.trainer)
        use_callbacks(run, sorted(run.trainer.callbacks, key=order_of))
        for callback in added:
            if overrides(callback, "setup"):
                callback.setup(run.trainer, run.module, stage=stage)
    with run.precision.default_type():
        run.module.configure_model()
