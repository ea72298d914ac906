"""Changes that users make to a trainer's callbacks, loggers and checkpoint path between its calls.

`trainer.callbacks` and `trainer.loggers` are lists of the user's objects. A user may append objects or assign other lists.
Each call (`fit`, `validate`, …) begins by reading them:

    trainer.callbacks  →  own_callbacks   without the callbacks of the last run alone: the module's, the accelerator's
    trainer.loggers    →  recorders       the same loggers behind our contract; silent loggers on all ranks but the first;
                                          in a trial, also the logger that reports its metric (`trial.py`)
    trainer.ckpt_path  →  ckpt_path       for this call and later calls, until None or another path is assigned

A callback that a `setup` hook appends to `trainer.callbacks` takes part in the same call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from footplate.tracking.silent import Silent
from footplate.training.argument_checks import as_list
from footplate.training.prepare import checked_callbacks, record_with
from footplate.training.trial import trial_loggers

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)


def take_changes(trainer: Trainer) -> None:
    """Use the callbacks and loggers that the trainer's lists hold now, in the call that begins.

    Raises:
        ConfigError: an object that is not a callback, or not a logger.
    """
    take_callbacks(trainer)
    loggers = as_list(trainer.loggers)
    if trainer.world.rank != 0:
        loggers = [logger if isinstance(logger, Silent) else Silent() for logger in loggers]
    trainer.loggers = loggers
    writes = trainer.world.rank == 0 and not trainer.config.fast_dev_run
    trainer.recorders[:] = [*record_with(loggers), *(trial_loggers() if writes else ())]


def take_ckpt_path(trainer: Trainer, argument: Any) -> Any:
    """The checkpoint that a call begins with: its argument, or else the path that `trainer.ckpt_path` was set to."""
    if trainer.ckpt_path != trainer.shown_ckpt_path:
        trainer.assigned_ckpt_path = trainer.ckpt_path
    if argument is not None and trainer.assigned_ckpt_path is not None:
        log.warning(
            "trainer.ckpt_path was set to %s, but this call was given ckpt_path=%s. The argument is used, and the "
            "path that was set is cleared.",
            trainer.assigned_ckpt_path,
            argument,
        )
        trainer.assigned_ckpt_path = None
    return trainer.assigned_ckpt_path if argument is None else argument


def show_ckpt_path(trainer: Trainer, path: str | None) -> None:
    """Set `trainer.ckpt_path` to the checkpoint that a call has loaded."""
    trainer.ckpt_path = trainer.shown_ckpt_path = path


def take_callbacks(trainer: Trainer) -> list[Any]:
    """Use the changes of `trainer.callbacks` since the trainer set it. Return the added callbacks.

    Raises:
        ConfigError: an object in the list is not a callback.
    """
    shown, own = trainer.shown_callbacks, trainer.own_callbacks
    known = {id(callback) for callback in (*shown, *own)}
    callbacks: list[Any] = []
    added: list[Any] = []
    for callback in as_list(trainer.callbacks):
        checked = [callback] if id(callback) in known else checked_callbacks([callback])
        callbacks += checked
        added += [new for new in checked if id(new) not in known]

    # The last module may have replaced some of the trainer's callbacks for its run. These come back.
    replaced = [callback for callback in own if id(callback) not in _ids(shown)]
    kept = _ids(own) | _ids(added)
    remaining = [callback for callback in callbacks if id(callback) in kept]
    trainer.own_callbacks = [*remaining, *(callback for callback in replaced if id(callback) not in _ids(remaining))]
    trainer.show_callbacks(callbacks)
    return added


def changed(trainer: Trainer) -> bool:
    """Return True if `trainer.callbacks` holds other objects than the trainer has set it to."""
    return _ids(trainer.callbacks) != _ids(trainer.shown_callbacks)


def warn_of_late_changes(trainer: Trainer) -> None:
    """Warn of callbacks and hooks that were changed in the middle of a call, where they have no effect."""
    if changed(trainer):
        log.warning(
            "trainer.callbacks was changed in the middle of trainer.%s(): the change takes effect in the next call. Change "
            "it before the call, or in a setup hook.",
            trainer.stage,
        )
    if replaced := trainer.hooks.replaced():
        log.warning(
            "%s: set in the middle of trainer.%s(), which looks hooks up once. The change takes effect in the next call. "
            "Set it before the call, or in a setup hook.",
            ", ".join(replaced),
            trainer.stage,
        )


def _ids(callbacks: Any) -> set[int]:
    return {id(callback) for callback in as_list(callbacks)}
