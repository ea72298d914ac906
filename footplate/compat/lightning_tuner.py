"""Lightning's searches (its `Tuner`, `LearningRateFinder` and `BatchSizeFinder`) on our trainer.

Lightning's Tuner puts a callback of its own in front of `trainer.callbacks` and calls `fit`; the callback then drives
Lightning's loops. Here such a callback is an order: before the call begins, `footplate.Tuner` searches with its arguments,
and what was found stands where Lightning's would. A Tuner's callback wants no more than that; one that you gave to the
trainer is followed by the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.training.tuner import Tuner

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

FINDERS = ("LearningRateFinder", "BatchSizeFinder")
_AGAIN = ("on_train_epoch_start", "on_fit_start", "on_validation_start", "on_test_start", "on_predict_start")


def is_finder(callback: Any) -> bool:
    """Whether a callback is, or inherits from, one of Lightning's that search."""
    return any(kind.__name__ in FINDERS and "lightning" in kind.__module__ for kind in type(callback).__mro__)


def searched(trainer: Trainer, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
    """Make the searches that callbacks of Lightning's ask for, before a call; whether they were all that was wanted.

    Args:
        trainer: whose callbacks.
        method: "fit", "validate", "test" or "predict".
        model: what the call was given.
        loaders: likewise.
        datamodule: likewise.

    Raises:
        ConfigError: a subclass, which searches at other times.
    """
    given = {id(callback): callback for callback in (*trainer.own_callbacks, *trainer.callbacks)}
    finders = [callback for callback in given.values() if is_finder(callback)]
    for finder in finders:
        name = type(finder).__name__
        if any(hook in vars(type(finder)) for hook in _AGAIN) and name not in FINDERS:
            raise ConfigError(
                f"{name} searches when its hooks say so, in the middle of a run, which Lightning's loops allow. Use "
                "footplate.Tuner before trainer.fit()."
            )
        if "_min_lr" in vars(finder) and method == "fit":
            found = Tuner(trainer).lr_find(
                model, loaders, datamodule=datamodule, min_lr=finder._min_lr, max_lr=finder._max_lr,
                num_training=finder._num_training_steps, mode=finder._mode,
                early_stop_threshold=finder._early_stop_threshold, update_attr=finder._update_attr,
                attr_name=finder._attr_name,
            )  # fmt: skip
            finder.optimal_lr = found
        elif "_min_lr" not in vars(finder):
            taken = {"train_dataloaders" if method == "fit" else "dataloaders": loaders}
            finder.optimal_batch_size = Tuner(trainer).scale_batch_size(
                model, datamodule=datamodule, method=method, mode=finder._mode,  # type: ignore[arg-type]
                steps_per_trial=finder._steps_per_trial, init_val=finder._init_val, max_trials=finder._max_trials,
                batch_arg_name=finder._batch_arg_name, margin=finder._margin, max_val=finder._max_val, **taken,
            )  # fmt: skip
    return any(finder._early_exit for finder in finders)
