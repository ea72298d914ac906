"""What a user gives a trainer, found and checked before work starts: callbacks, loggers, a model, a data module."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar, Timer
from footplate.callbacks.base import is_kind
from footplate.core.errors import ConfigError, DataError
from footplate.core.hooks import overrides
from footplate.tracking.base import Logger
from footplate.training.argument_checks import as_list
from footplate.training.config import TrainerConfig
from footplate.training.module import Module

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}


def choose_loggers(logger: Any) -> list[Any]:
    """The loggers that `Trainer(logger=…)` stands for: the user's own objects."""
    if logger is False:
        return []
    if logger is None or logger is True:
        from footplate.tracking.csv import CSV

        return [CSV()]
    return as_list(logger)


def record_with(loggers: list[Any]) -> list[Any]:
    """Loggers behind our contract: ours as they are.

    Raises:
        ConfigError: something that is no logger.
    """
    return list(loggers) if all(isinstance(one, Logger) for one in loggers) else compat().translate_loggers(loggers)


def choose_callbacks(config: TrainerConfig) -> list[Any]:
    """The callbacks of a trainer: those that were given, and the usual ones that were not; those that save come last.

    Raises:
        ConfigError: something that is no callback, or that contradicts `enable_checkpointing`.
    """
    callbacks = checked_callbacks([*as_list(config.callbacks), *_of_packages()])
    if config.max_time is not None:
        callbacks.append(Timer(config.max_time))
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if savers and not config.enable_checkpointing:
        raise ConfigError("enable_checkpointing=False, but callbacks holds a ModelCheckpoint: leave out one of them.")
    if not savers and config.enable_checkpointing and not config.fast_dev_run:
        savers = [ModelCheckpoint()]
    if config.enable_progress_bar and not any(is_kind(callback, ProgressBar) for callback in callbacks):
        callbacks.append(ProgressBar())
    if config.enable_model_summary and not any(is_kind(callback, ModelSummary) for callback in callbacks):
        callbacks.append(ModelSummary())
    return [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)] + savers


def checked_callbacks(given: list[Any]) -> list[Any]:
    """Callbacks that can run here.

    Raises:
        ConfigError: something that is no callback.
    """
    callbacks = translate_callbacks(given)
    for callback in callbacks:
        if isinstance(callback, type) or not hasattr(callback, "on_train_batch_end"):
            raise ConfigError(f"callbacks: expected Callback objects, got {callback!r}.")
    return callbacks


def _of_packages() -> list[Any]:
    """Callbacks that installed packages add to every trainer: those of Lightning's group too, where Lightning is used."""
    groups = ["footplate.callbacks_factory"]
    if "lightning.pytorch" in sys.modules:
        groups.append("lightning.pytorch.callbacks_factory")
    return [made for group in groups for entry in entry_points(group=group) for made in as_list(entry.load()())]


def replaces(configured: Any, callback: Any) -> bool:
    """Whether a callback that the module configures takes the place of one of the trainer's."""
    usual = (ModelCheckpoint, ProgressBar, ModelSummary)  # what a trainer has of its own, if nobody brings another
    return type(configured) is type(callback) or any(
        type(callback) is kind and is_kind(configured, kind) for kind in usual
    )


def attach(trainer: Trainer, stage: str, model: Any, datamodule: Any) -> None:
    """Check that a model can be run for a stage, and let it and the data module know their trainer.

    Raises:
        ConfigError: no model, or one without a method that the stage needs.
    """
    if model is None:
        raise ConfigError(f"trainer.{stage}() needs a model: none was given, and none has been trained yet.")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"trainer.{stage}(model): expected a footplate.Module, got {type(model).__name__}.")
    if isinstance(model, Module):
        model.trainer = trainer
    else:
        compat().attach_module(model, trainer)
    for name in NEEDED[stage]:
        if not overrides(model, name):
            raise ConfigError(
                f"{type(model).__name__} has no {name}(), which trainer.{stage}() needs. Define it on the class."
            )
    if datamodule is not None:
        datamodule.trainer = trainer


def split_datamodule(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Loaders and data module, where a data module may have been given in the loaders' place.

    Raises:
        ConfigError: both were given.
    """
    if loaders is not None and hasattr(loaders, "train_dataloader") and hasattr(loaders, "prepare_data"):
        if datamodule is not None:
            raise ConfigError("Both a data module in the loaders' place and datamodule=… were given: give one.")
        return None, loaders
    return loaders, datamodule


def default_max_epochs(max_steps: int, callbacks: list[Any]) -> int:
    """The limit of a `fit` that was given none: -1 where steps or a `Timer` limit it; else 1000, with a warning."""
    if max_steps != -1 or any(is_kind(callback, Timer) for callback in callbacks):
        return -1
    warnings.warn("Nothing limits this run: max_epochs=1000 is assumed. Say max_epochs=-1 for no limit.", stacklevel=3)
    return 1000


def explain(error: BaseException) -> Exception | None:
    """A plain error for a traceback that many users have met; None for any other."""
    if isinstance(error, ValueError) and "Expected more than 1 value per channel when training" in str(error):
        return DataError(
            f"Batch norm can't train on a single row ({error}). The last batch of an epoch may be that small, above all "
            "when several ranks share it: use drop_last=True."
        )
    if isinstance(error, RuntimeError) and "Expected to have finished reduction in the prior iteration" in str(error):
        return ConfigError(
            "Some parameters got no gradient from the loss, so the ranks wait for them in vain. Freeze those that are "
            'never used (requires_grad = False), or use strategy="ddp_find_unused_parameters_true", which looks for them '
            "in every step."
        )
    found = re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error)) if isinstance(error, IndexError) else None
    if found is None:
        return None
    return DataError(
        f"A label is {found.group(1)}, which is outside the range of the model's outputs. "
        "Labels must be 0 … outputs - 1: give the model more outputs, or map the labels."
    )


def translate_callbacks(given: list[Any]) -> list[Any]:
    """Callbacks, with Lightning's own as ours where ours do the same."""
    return list(given) if all(isinstance(one, Callback) for one in given) else compat().translate_callbacks(given)


def refuse_arguments(others: dict[str, Any]) -> None:
    """Say of arguments that `Trainer` doesn't have what to do instead; Lightning's defaults are let pass.

    Raises:
        ConfigError: an argument that would change something.
    """
    error = compat().refused_arguments(others)
    if error is not None:
        raise error


def compat() -> ModuleType:
    """What knows Lightning; loaded only for those who bring its classes."""
    from footplate.compat import lightning

    return lightning
