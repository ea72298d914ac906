"""Changes that users make to a trainer's callbacks, loggers and checkpoint path after it was made.

`trainer.callbacks` and `trainer.loggers` are lists of the user's objects. A user appends to them or assigns others, as to
Lightning's. Each call (`fit`, `validate`, …) begins by reading them:

    trainer.callbacks  →  own_callbacks   without those that only the last run had: the module's, the accelerator's
    trainer.loggers    →  recorders       the same loggers behind our contract; silent ones on every rank but the first
    trainer.ckpt_path  →  ckpt_path       of this call and of later ones, until None or another one is assigned

What is appended to `trainer.callbacks` in a `setup` hook takes part in the same call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from footplate.tracking.silent import Silent
from footplate.training.argument_checks import as_list
from footplate.training.prepare import checked_callbacks, record_with

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)


def take_changes(trainer: Trainer) -> None:
    """Let a call that begins have the callbacks and loggers that the trainer's lists hold now.

    Raises:
        ConfigError: an object in them is no callback or no logger.
    """
    take_callbacks(trainer)
    loggers = as_list(trainer.loggers)
    if trainer.world.rank != 0:
        loggers = [logger if isinstance(logger, Silent) else Silent() for logger in loggers]
    trainer.loggers = loggers
    trainer.recorders[:] = record_with(loggers)


def take_ckpt_path(trainer: Trainer, given: Any) -> Any:
    """The checkpoint that a call begins with: the one that was given, or the one that `trainer.ckpt_path` was set to."""
    if trainer.ckpt_path != trainer.shown_ckpt_path:
        trainer.assigned_ckpt_path = trainer.ckpt_path
    if given is not None and trainer.assigned_ckpt_path is not None:
        log.warning(
            "trainer.ckpt_path was set to %s, but this call was given ckpt_path=%s: the latter is used, and the former is "
            "forgotten.",
            trainer.assigned_ckpt_path,
            given,
        )
        trainer.assigned_ckpt_path = None
    return trainer.assigned_ckpt_path if given is None else given


def show_ckpt_path(trainer: Trainer, path: str | None) -> None:
    """Let `trainer.ckpt_path` show what a call has loaded."""
    trainer.ckpt_path = trainer.shown_ckpt_path = path


def take_callbacks(trainer: Trainer) -> list[Any]:
    """Take over what `trainer.callbacks` has gained and lost since the trainer set it; returns what it has gained.

    Raises:
        ConfigError: an object in it is no callback.
    """
    shown, own = trainer.shown_callbacks, trainer.own_callbacks
    known = {id(callback) for callback in (*shown, *own)}
    callbacks: list[Any] = []
    added: list[Any] = []
    for callback in as_list(trainer.callbacks):
        found = [callback] if id(callback) in known else checked_callbacks([callback])
        callbacks += found
        added += [one for one in found if id(one) not in known]
    kept = _ids(own) | _ids(added)
    replaced = [callback for callback in own if id(callback) not in _ids(shown)]  # by the last module's, for its run
    there = [callback for callback in callbacks if id(callback) in kept]
    trainer.own_callbacks = [*there, *(callback for callback in replaced if id(callback) not in _ids(there))]
    trainer.show_callbacks(callbacks)
    return added


def changed(trainer: Trainer) -> bool:
    """Whether `trainer.callbacks` holds other objects than the trainer has set it to."""
    return _ids(trainer.callbacks) != _ids(trainer.shown_callbacks)


def warn_of_late_changes(trainer: Trainer) -> None:
    """Warn of callbacks and hooks that were changed in the middle of a call, which has not followed them."""
    if changed(trainer):
        log.warning(
            "trainer.callbacks was changed in the middle of trainer.%s(): that takes effect with the next call. Change it "
            "before the call, or in a setup hook.",
            trainer.stage,
        )
    if replaced := trainer.hooks.replaced():
        log.warning(
            "%s: set in the middle of trainer.%s(), which looks hooks up once. That takes effect with the next call. "
            "Set it before the call, or in a setup hook.",
            ", ".join(replaced),
            trainer.stage,
        )


def _ids(callbacks: Any) -> set[int]:
    return {id(callback) for callback in as_list(callbacks)}
