"""Lightning's searches (its `Tuner`, `LearningRateFinder` and `BatchSizeFinder`) on our trainer.

Lightning's Tuner adds a finder to `trainer.callbacks` and calls `fit`; the finder then drives Lightning's loops. Here
`footplate.Tuner` searches before the call begins, with the finder's arguments, and the result is stored where Lightning
stores it. After the search of Lightning's Tuner, the call ends. After the search of a finder that you gave to the trainer,
the call runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError
from footplate.training.tuner import Tuner

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

FINDERS = ("LearningRateFinder", "BatchSizeFinder")
# A subclass that overrides one of these hooks searches in the middle of a run.
_SEARCH_HOOKS = ("on_train_epoch_start", "on_fit_start", "on_validation_start", "on_test_start", "on_predict_start")


def is_finder(callback: Any) -> bool:
    """Return True if a callback is, or inherits from, one of Lightning's finders."""
    return any(kind.__name__ in FINDERS and "lightning" in kind.__module__ for kind in type(callback).__mro__)


def run_finders(trainer: Trainer, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
    """Run the searches of the trainer's finders before a call. Return True if the call should end after them.

    Args:
        trainer: the trainer that has the finders.
        method: the call: "fit", "validate", "test" or "predict".
        model: the model that the call was given.
        loaders: the loaders that the call was given.
        datamodule: the data module that the call was given.

    Raises:
        ConfigError: a subclass of a finder that searches in the middle of a run.
    """
    callbacks = {id(callback): callback for callback in (*trainer.own_callbacks, *trainer.callbacks)}
    finders = [callback for callback in callbacks.values() if is_finder(callback)]
    for finder in finders:
        name = type(finder).__name__
        if any(hook in vars(type(finder)) for hook in _SEARCH_HOOKS) and name not in FINDERS:
            raise ConfigError(
                f"{name} overrides a hook to search in the middle of a run, which only Lightning's loops can do. Use "
                "footplate.Tuner before trainer.fit()."
            )
        if "_min_lr" in vars(finder) and method == "fit":
            finder.optimal_lr = Tuner(trainer).lr_find(
                model, loaders, datamodule=datamodule, min_lr=finder._min_lr, max_lr=finder._max_lr,
                num_training=finder._num_training_steps, mode=finder._mode,
                early_stop_threshold=finder._early_stop_threshold, update_attr=finder._update_attr,
                attr_name=finder._attr_name,
            )  # fmt: skip
        elif "_min_lr" not in vars(finder):
            loaders_argument = {"train_dataloaders" if method == "fit" else "dataloaders": loaders}
            finder.optimal_batch_size = Tuner(trainer).scale_batch_size(
                model, datamodule=datamodule, method=method, mode=finder._mode,  # type: ignore[arg-type]
                steps_per_trial=finder._steps_per_trial, init_val=finder._init_val, max_trials=finder._max_trials,
                batch_arg_name=finder._batch_arg_name, margin=finder._margin, max_val=finder._max_val, 
                **loaders_argument,
            )  # fmt: skip
    return any(finder._early_exit for finder in finders)
