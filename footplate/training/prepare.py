"""Checks what a user gives a trainer before any work starts: callbacks, loggers, a model, a data module.

Objects of other libraries go through the adapter of their library; see `core/adapters.py`.
"""

from __future__ import annotations

import logging
import re
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar, Timer
from footplate.callbacks.base import is_kind
from footplate.core.adapters import adapter_of, adapters_in_use, adapters_of, all_adapters, packages
from footplate.core.entry_points import entry_points
from footplate.core.errors import ConfigError, DataError, did_you_mean
from footplate.core.hooks import overrides
from footplate.distributed.strategies import Options
from footplate.tracking.base import Logger
from footplate.training.argument_checks import as_list
from footplate.training.config import NAMES, TrainerConfig
from footplate.training.module import Module
from footplate.training.trainer_access import TrainerAccess

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}


# Arguments of the trainer


def refuse_arguments(unknown: dict[str, Any]) -> None:
    """Refuse arguments that `Trainer` doesn't have; another library's defaults pass.

    Raises:
        ConfigError: an unknown argument, or another library's argument with a value that would change something.
    """
    for name, value in unknown.items():
        adapter = next((adapter for adapter in all_adapters() if name in adapter.refused_arguments), None)
        if adapter is None:
            raise ConfigError(f"Trainer({name}=…): there is no such argument. {did_you_mean(name, NAMES)}")
        harmless, hint = adapter.refused_arguments[name]
        if value != harmless:
            raise ConfigError(f"Trainer({name}={value!r}) is {adapter.name}'s and not supported here: {hint}.")


def our_strategy(strategy: Any) -> str | Options:
    """Our name or options for a strategy, which may be another library's object.

    Raises:
        ConfigError: an object that stands for no strategy here.
    """
    if isinstance(strategy, str | Options):
        return strategy
    adapter = adapter_of(strategy)
    if adapter is None:
        raise ConfigError(
            f'strategy={strategy!r} is of type {type(strategy).__name__}: expected a name ("auto", "ddp", '
            '"ddp_find_unused_parameters_true", "fsdp", "replicas"), an FSDPStrategy, a ModelParallelStrategy, or a '
            f"strategy object of {' or '.join(packages())}."
        )
    return adapter.our_strategy(strategy)


# Loggers


def choose_loggers(logger: Any) -> list[Any]:
    """The user's logger objects that `Trainer(logger=…)` stands for."""
    if logger is False:
        return []
    if logger is None or logger is True:
        from footplate.tracking.csv import CSV

        return [CSV()]
    return as_list(logger)


def record_with(loggers: list[Any]) -> list[Any]:
    """The loggers behind our contract: ours as they are, another library's wrapped by its adapter.

    Raises:
        ConfigError: an object that is not a logger.
    """
    return [logger if isinstance(logger, Logger) else _translate_logger(logger) for logger in loggers]


def _translate_logger(logger: Any) -> Any:
    adapter = adapter_of(logger)
    if adapter is None:
        raise ConfigError(
            f"logger: expected a footplate.Logger, or a logger of {' or '.join(packages())}, got {type(logger).__name__}."
        )
    return adapter.translate_logger(logger)


# Callbacks


def choose_callbacks(config: TrainerConfig) -> list[Any]:
    """The callbacks of a trainer: the given ones and the usual ones that are missing. Callbacks that save come last.

    Raises:
        ConfigError: an object that is not a callback, or a callback that contradicts `enable_checkpointing`.
    """
    callbacks = checked_callbacks([*as_list(config.callbacks), *_callbacks_of_packages()])
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


def checked_callbacks(callbacks: list[Any]) -> list[Any]:
    """Callbacks that can run here.

    Raises:
        ConfigError: an object that is not a callback.
    """
    callbacks = translate_callbacks(callbacks)
    for callback in callbacks:
        if isinstance(callback, type) or not hasattr(callback, "on_train_batch_end"):
            raise ConfigError(f"callbacks: expected Callback objects, got {callback!r}.")
    return callbacks


def translate_callbacks(callbacks: list[Any]) -> list[Any]:
    """The callbacks, with those of other libraries made able to run here."""
    foreign = [callback for callback in callbacks if not isinstance(callback, Callback)]
    for adapter in adapters_of(foreign):
        callbacks = adapter.translate_callbacks(callbacks)
    return list(callbacks)


def _callbacks_of_packages() -> list[Any]:
    """Callbacks that installed packages add to every trainer, through our entry-point group or an imported library's."""
    groups = [
        "footplate.callbacks_factory",
        *(group for adapter in adapters_in_use() for group in adapter.callback_groups()),
    ]
    entries = [entry for group in groups for entry in entry_points(group)]
    return [callback for entry in entries for callback in as_list(entry.load()())]


def replaces(configured: Any, callback: Any) -> bool:
    """Return True if a callback that the module configures takes the place of one of the trainer's."""
    # The trainer adds these callbacks if the user gives none.
    usual = (ModelCheckpoint, ProgressBar, ModelSummary)
    return type(configured) is type(callback) or any(
        type(callback) is kind and is_kind(configured, kind) for kind in usual
    )


def without_searches(callbacks: list[Any]) -> list[Any]:
    """The callbacks that run during a call: those of other libraries that only ask for a search are left out."""
    return [
        callback
        for callback in callbacks
        if (adapter := adapter_of(callback)) is None or not adapter.is_search(callback)
    ]


def run_searches(trainer: Trainer, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
    """Run the searches that another library's callbacks ask for. Return True if the call should end after them."""
    callbacks = (*trainer.own_callbacks, *trainer.callbacks)
    ends = [adapter.search(trainer, method, model, loaders, datamodule) for adapter in adapters_of(callbacks)]
    return any(ends)


# Model and data


def attach(trainer: Trainer, stage: str, model: Any, datamodule: Any) -> None:
    """Check that a model can run a stage, and connect it and the data module to the trainer.

    Raises:
        ConfigError: no model, or a model without a method that the stage needs.
    """
    if model is None:
        raise ConfigError(f"trainer.{stage}() needs a model: none was given, and none has been trained yet.")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"trainer.{stage}(model): expected a footplate.Module, got {type(model).__name__}.")
    _attach_module(trainer, model)
    for name in NEEDED[stage]:
        if not overrides(model, name):
            raise ConfigError(
                f"{type(model).__name__} has no {name}(), which trainer.{stage}() needs. Define it on the class."
            )
    if datamodule is not None:
        datamodule.trainer = trainer


def _attach_module(trainer: Trainer, model: Any) -> None:
    if isinstance(model, Module):
        model.trainer = trainer
        return
    if not hasattr(model, "training_step") or not hasattr(model, "configure_optimizers"):
        raise ConfigError(
            f"{type(model).__name__} is a plain torch.nn.Module: it has no training_step() and configure_optimizers(), "
            "which say how to train it. Wrap it:\n"
            "    class Training(footplate.Module):\n"
            "        def __init__(self, net): super().__init__(); self.net = net\n"
            "        def training_step(self, batch, batch_idx): ...\n"
            "        def configure_optimizers(self): ..."
        )
    adapter = adapter_of(model)
    if adapter is not None:
        adapter.attach_module(model, trainer)
    else:
        bind_to_trainer(model, trainer)


# The methods of TrainerAccess that a module of another library gets.
_BOUND = (
    "log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "toggle_optimizer",
    "untoggle_optimizer", "toggled_optimizer", "all_gather", "print",
)  # fmt: skip


def bind_to_trainer(module: Any, trainer: Trainer) -> None:
    """Let a module that is not a `Module` log to our trainer and use its optimizers, as a `Module` does."""
    for name in _BOUND:
        module.__dict__[name] = types.MethodType(getattr(TrainerAccess, name), module)
    module.trainer = trainer


def split_datamodule(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """Loaders and data module, where a data module may have been given in place of the loaders.

    Raises:
        ConfigError: both were given.
    """
    if loaders is not None and hasattr(loaders, "train_dataloader") and hasattr(loaders, "prepare_data"):
        if datamodule is not None:
            raise ConfigError(
                "A data module was given in place of the loaders, and datamodule=… too: give one of them."
            )
        return None, loaders
    return loaders, datamodule


def default_max_epochs(max_steps: int, callbacks: list[Any]) -> int:
    """The epoch limit of a `fit` without one: -1 if steps or a `Timer` limit it; else 1000, with a warning."""
    if max_steps != -1 or any(is_kind(callback, Timer) for callback in callbacks):
        return -1
    warnings.warn("Nothing limits this run: max_epochs=1000 is assumed. Set max_epochs=-1 for no limit.", stacklevel=5)
    return 1000


def explain(error: BaseException) -> Exception | None:
    """A plain error for a common traceback; None for any other."""
    if isinstance(error, ValueError) and "Expected more than 1 value per channel when training" in str(error):
        return DataError(
            f"Batch norm can't train on a single row ({error}). The last batch of an epoch may be that small, above all "
            "when several ranks share it: use drop_last=True."
        )
    if isinstance(error, RuntimeError) and "Expected to have finished reduction in the prior iteration" in str(error):
        return ConfigError(
            "Some parameters got no gradient from the loss, and the ranks can't reduce a gradient that is missing. Freeze "
            'parameters that are never used (requires_grad = False), or use strategy="ddp_find_unused_parameters_true", '
            "which looks for them in every step."
        )
    if "device-side assert triggered" in str(error):
        return DataError(
            "A kernel on the GPU has refused a value. Most often a label or an index is outside the range of the model's "
            'outputs or of an embedding. Train with accelerator="cpu", whose error names the place. This process '
            "can't use the GPU any more."
        )
    match = re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error)) if isinstance(error, IndexError) else None
    if match is None:
        return None
    return DataError(
        f"A label is {match.group(1)}, which is outside the range of the model's outputs. "
        "Labels must be 0 … outputs - 1: give the model more outputs, or map the labels."
    )
