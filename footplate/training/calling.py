"""What every call of a trainer begins and ends with, whatever happens in between.

    begin   the module knows its trainer  →  the ranks meet  →  callbacks, settings compared
    end     an exception: the run saved if it can be, `on_exception`, a plain error for some that many users meet
            always: worker processes, weights on other devices, the writing thread, loggers, `teardown`

What is opened in a call is closed here, so that the second call of a trainer finds nothing of the first in its way.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks import Callback, ModelSummary, ProgressBar
from footplate.callbacks.ambient import present
from footplate.core.errors import CheckpointError
from footplate.core.hooks import Hooks, order_of, overrides
from footplate.tracking.base import Status
from footplate.training.changes import changed, take_callbacks, warn_of_late_changes
from footplate.training.crash_checkpoint import savable
from footplate.training.prepare import attach, compat, explain, replaces, translate_callbacks
from footplate.training.profiling import profiling, recorder
from footplate.training.rank_checks import check_settings
from footplate.training.saving import save_before_failing
from footplate.training.settings import as_list
from footplate.training.status import TrainerFn, running

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)


@contextlib.contextmanager
def called(run: Run) -> Iterator[None]:
    """A call, from its beginning to its end; see the module's docstring."""
    stage = run.stage
    assert stage is not None
    with running(run):
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
    """What is done about an exception before all ends.

    Raises:
        FootplateError: a plain error in the place of some exceptions.
    """
    run.status = "interrupted"
    if run.group.is_distributed and hasattr(run, "step"):
        run.step.leave()
    if savable(run, error):
        save_before_failing(run, error)
    run.hooks.call("on_exception", error)
    plain = explain(error)
    if plain is not None:
        raise plain from error


def _end(run: Run, status: Status) -> None:
    run.training_in_progress = run.sanity_checking = False
    run.make_loaders = run.found_loaders = None
    run.end_workers()
    apart = run.parallel.is_distributed or run.parallel.copies or run.accelerator.owns_weights
    if apart and hasattr(run, "step"):
        run.step.release()
    if status != "success":
        run.writer.make_haste()
    with contextlib.nullcontext() if status == "success" else contextlib.suppress(CheckpointError):
        run.writer.close()
    for logger in run.recorders:
        logger.finalize(status)
    run.hooks.call("teardown", stage=TrainerFn(str(run.stage)))
    warn_of_late_changes(run.trainer)


def join(run: Run) -> None:
    """Meet the other ranks, the first time; from then on seed and directory are those of rank 0."""
    if run.placement.meet():
        run.seed = run.group.from_first(run.seed)
        run.run_dir = Path(run.group.from_first(run.placement.for_all(run.run_dir)))
    if run.group.is_distributed:
        run.agree()
        run.agreement.settle()  # so that there is one clock before any callback asks for it


def use_callbacks(run: Run, callbacks: list[Any]) -> None:
    """Let a run have these callbacks."""
    run.trainer.show_callbacks(callbacks)
    for callback in callbacks:
        callback.log, callback.log_dict = run.module.log, run.module.log_dict
    before_looking = (lambda: _lend_weights(run)) if run.accelerator.owns_weights else None
    run.hooks = Hooks(run.trainer, run.module, run.datamodule, callbacks, before_looking, recorder(run.profiler))


def _lend_weights(run: Run) -> None:
    if hasattr(run, "step"):
        run.step.fetch_weights(may_change=True)


def _callbacks_of(run: Run) -> list[Any]:
    """The trainer's, those of `everywhere` and of the accelerator, and the module's, which replace those of the same
    type, and the usual ones; late ones last.
    """
    watchers = [pkgutil.resolve_name(name)(run.accelerator) for name in run.accelerator.callbacks]
    callbacks = [*run.trainer.own_callbacks, *present(), *watchers]
    for callback in translate_callbacks(as_list(run.module.configure_callbacks())):
        callbacks = [one for one in callbacks if not replaces(callback, one)] + [callback]
    if run.world.rank != 0:
        callbacks = [one for one in callbacks if not isinstance(one, (ProgressBar, ModelSummary))]
    if not all(isinstance(one, Callback) for one in callbacks):
        callbacks = [one for one in callbacks if not compat().is_finder(one)]
    return sorted(callbacks, key=order_of)


def call_setup(run: Run) -> None:
    """`prepare_data` on one rank of each machine, then `setup` and `configure_model` on all."""
    if run.world.local_rank == 0:
        run.hooks.call("prepare_data")
    run.group.barrier()
    stage = TrainerFn(str(run.stage))
    for hook in (*run.hooks.late("setup"), *run.hooks.get("setup")):
        hook(stage=stage)
    while changed(run.trainer):  # by one of these hooks: what it has added takes part in this call
        added = take_callbacks(run.trainer)
        use_callbacks(run, sorted(run.trainer.callbacks, key=order_of))
        for callback in added:
            if overrides(callback, "setup"):
                callback.setup(run.trainer, run.module, stage=stage)
    with run.precision.default_type():
        run.module.configure_model()
