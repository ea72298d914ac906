"""A `LightningModule`, a `LightningDataModule`, Lightning's callbacks and loggers, unchanged on our trainer.

A LightningModule reaches its trainer in some thirty places. Those that concern logging and optimizers are methods of the
module that read the trainer's insides; `attach_module` puts ours, from `TrainerAccess`, over them on the instance. The
rest are plain attributes of the trainer: `trainer_attribute` answers for those that ours names otherwise, and refuses
Lightning's insides with one sentence. Lightning itself is never imported here: a user who has it, has imported it.

Callbacks and loggers have files of their own beside this one. What is supported, translated, different or refused is
written in docs/lightning.md, and each row of it is tested.
"""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from footplate import callbacks as ours
from footplate.callbacks.base import is_kind
from footplate.checkpoint import load_datamodule, load_module
from footplate.compat.lightning_callbacks import PredictionCollector, is_lightning, translate_callbacks
from footplate.compat.lightning_loggers import translate_loggers
from footplate.compat.lightning_tuner import is_finder, searched
from footplate.core.errors import ConfigError, did_you_mean
from footplate.core.hooks import overrides, step_arguments
from footplate.data.adapters.combined import is_combined
from footplate.training.trainer_access import TrainerAccess

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

__all__ = [
    "attach_module",
    "is_finder",
    "load_from_checkpoint",
    "refused_arguments",
    "searched",
    "strategy_name",
    "trainer_attribute",
    "translate_callbacks",
    "translate_loggers",
]

BOUND = (
    "log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "toggle_optimizer",
    "untoggle_optimizer", "toggled_optimizer", "all_gather", "print",
)  # fmt: skip

STEPS = ("training_step", "validation_step", "test_step", "predict_step")

REFUSED_HOOKS = {
    "configure_sharded_model": "rename it to configure_model()",
    "on_validation_model_zero_grad": "gradients are never cleared before validation here; drop it, or clear them in "
    "on_validation_start()",
    "training_step_end": "Lightning 2 removed it: do its work at the end of training_step()",
    "validation_step_end": "Lightning 2 removed it: do its work at the end of validation_step()",
    "test_step_end": "Lightning 2 removed it: do its work at the end of test_step()",
    "training_epoch_end": "Lightning 2 removed it: use on_train_epoch_end()",
    "validation_epoch_end": "Lightning 2 removed it: use on_validation_epoch_end()",
    "test_epoch_end": "Lightning 2 removed it: use on_test_epoch_end()",
    "on_epoch_start": "Lightning 2 removed it: use on_train_epoch_start()",
    "on_epoch_end": "Lightning 2 removed it: use on_train_epoch_end()",
    "tbptt_split_batch": "Lightning 2 removed it: split the batch in training_step(), with manual optimisation",
}

REFUSED_ARGUMENTS = {
    "plugins": (None, "precision=… and accelerator=… cover what plugins did"),
    "barebones": (False, "there is little to leave out: logger=False, enable_checkpointing=False"),
    "enable_autolog_hparams": (True, "call save_hyperparameters(logger=False)"),
    "model_registry": (None, "use fp.MLflow, which registers models"),
}

_COUNTERS = "trainer.progress has the counters"
REFUSED_ATTRIBUTES = {
    "fit_loop": _COUNTERS,
    "validate_loop": _COUNTERS,
    "test_loop": _COUNTERS,
    "predict_loop": _COUNTERS,
    "_evaluation_loop": _COUNTERS,
    "_active_loop": _COUNTERS,
    "_results": "trainer.callback_metrics has what was logged",
    "_logger_connector": "log with self.log, or trainer.loggers",
    "_checkpoint_connector": "use trainer.save_checkpoint",
    "_data_connector": "use the loaders you passed",
    "_callback_connector": "trainer.callbacks has the callbacks",
    "_signal_connector": "trainer.interrupted tells of a signal",
    "precision_plugin": "trainer.precision names the precision",
    "scaler": "the loss is scaled by the step itself",
    "tuner": "footplate.Tuner(trainer) searches",
    "init_module": "build large layers in configure_model()",
    "distributed_sampler_kwargs": "data is always shared out between processes",
}


class NotHere(ConfigError, AttributeError):
    """An attribute of Lightning's trainer that ours has not; `hasattr` says no, and people are told what to use."""


def attach_module(module: Any, trainer: Trainer) -> None:
    """Let a module that is not ours reach our trainer.

    Raises:
        ConfigError: it is a plain `nn.Module`, or overrides a hook or takes an argument that has no counterpart.
    """
    if not hasattr(module, "training_step") or not hasattr(module, "configure_optimizers"):
        raise ConfigError(
            f"{type(module).__name__} is a plain torch.nn.Module: nothing says how to train it. Wrap it:\n"
            "    class Training(footplate.Module):\n"
            "        def __init__(self, net): super().__init__(); self.net = net\n"
            "        def training_step(self, batch, batch_idx): ...\n"
            "        def configure_optimizers(self): ..."
        )
    _refuse(module)
    for part in module.modules():
        if part is module or is_lightning(part):
            for name in BOUND:
                part.__dict__[name] = types.MethodType(getattr(TrainerAccess, name), part)
            part.__dict__["_call_batch_hook"] = types.MethodType(_call_batch_hook, part)
            part.trainer = trainer


def _refuse(module: Any) -> None:
    who = type(module).__name__
    for name, hint in REFUSED_HOOKS.items():
        if hasattr(module, name) and overrides(module, name):
            raise ConfigError(f"{who}.{name}() is not supported: {hint}.")
    for name in STEPS:
        if overrides(module, name):
            function = getattr(module, name)
            if "optimizer_idx" in inspect.signature(function).parameters:
                raise ConfigError(
                    f"{who}.{name}(optimizer_idx) is not supported: Lightning 2 removed it. With several optimizers, set "
                    "self.automatic_optimization = False and step them yourself."
                )
            step_arguments(function, name)


def _call_batch_hook(module: Any, name: str, *args: Any) -> Any:
    """How Lightning's exporters and loggers prepare an example input; replaces a reading of its trainer's insides."""
    return getattr(module, name)(*args)


def load_from_checkpoint(
    kind: type, checkpoint_path: str | Path, map_location: Any = "cpu", strict: bool | None = None, **kwargs: Any
) -> Any:
    """A LightningModule of class `kind` with the weights and hyper-parameters of a Footplate checkpoint; or a
    LightningDataModule with its hyper-parameters and state.

    What `kind.load_from_checkpoint` does for Lightning's `.ckpt` files; those can be given here too.

    Raises:
        CheckpointError: missing, incomplete, of another model, or an argument of `__init__` is missing.
    """
    if hasattr(kind, "train_dataloader") and not hasattr(kind, "training_step"):
        return load_datamodule(kind, checkpoint_path, kwargs)
    return load_module(kind, checkpoint_path, map_location, strict, kwargs)


def refused_arguments(given: dict[str, Any]) -> ConfigError | None:
    """The error for arguments that our `Trainer` has not; None when they only say what holds anyway."""
    from footplate.training.trainer import Trainer

    for name, value in given.items():
        if name not in REFUSED_ARGUMENTS:
            return ConfigError(f"Trainer({name}=…): there is no such argument. {_known_arguments(Trainer, name)}")
        harmless, hint = REFUSED_ARGUMENTS[name]
        if value != harmless:
            return ConfigError(f"Trainer({name}={value!r}) is Lightning's and not supported here: {hint}.")
    return None


def _known_arguments(trainer: type, name: str) -> str:
    parameters = inspect.signature(trainer.__init__).parameters.values()
    return did_you_mean(name, [one.name for one in parameters if one.kind is one.KEYWORD_ONLY])


def trainer_attribute(trainer: Trainer, name: str) -> Any:
    """What a LightningModule or callback finds under a name that our trainer has not.

    Raises:
        NotHere: it is one of Lightning's insides.
        AttributeError: there is no such thing.
    """
    reader = _ATTRIBUTES.get(name)
    found = None if reader is None else reader(trainer)
    if found is None and name in REFUSED_ATTRIBUTES:
        raise NotHere(f"trainer.{name} is one of Lightning's insides and not here: {REFUSED_ATTRIBUTES[name]}.")
    if reader is None:
        raise AttributeError(f"Trainer has no attribute {name!r}")
    return found


def stage(trainer: Trainer) -> str | None:
    """What is running now, in Lightning's words: "train", "sanity_check", "validate", "test", "predict" or None."""
    if trainer.status != "running":
        return None
    if trainer.stage != "fit":
        return trainer.stage
    if trainer.sanity_checking:
        return "sanity_check"
    return "train" if trainer.metrics is trainer.run.training_metrics else "validate"


def _state(trainer: Trainer) -> Any:
    """Lightning's `TrainerState`, when Lightning is there; else its names alone."""
    states = sys.modules.get("lightning.pytorch.trainer.states") or sys.modules.get("pytorch_lightning.trainer.states")
    status, fn, now = trainer.status, trainer.stage, stage(trainer)
    if states is None:
        stopped = status in ("finished", "interrupted")
        return SimpleNamespace(status=status, fn=fn, stage=now, finished=status == "finished", stopped=stopped)
    return states.TrainerState(
        states.TrainerStatus(status), fn and states.TrainerFn(fn), now and states.RunningStage(now)
    )


def _strategy(trainer: Trainer) -> Any:
    group = trainer.group

    def decide(decision: bool, all: bool = True) -> bool:
        return group.everybody(decision) if all else bool(group.maximum([int(decision)])[0])

    def reduce(tensor: Any, _: Any = None, reduce_op: str = "mean") -> Any:
        if not group.is_distributed or not hasattr(tensor, "shape"):
            return tensor
        stacked = group.stack(tensor)
        return stacked.float().mean(0).to(tensor.dtype) if reduce_op in ("mean", "avg") else stacked.sum(0)

    return SimpleNamespace(
        root_device=trainer.device,
        reduce_boolean_decision=decide,
        reduce=reduce,
        broadcast=lambda value, src=0: group.gather(value)[src],
        barrier=lambda name=None: group.barrier(),
        all_gather=trainer.all_gather,
        world_size=trainer.world.size,
        is_global_zero=trainer.world.rank == 0,
    )


def _log_dir(trainer: Trainer) -> Any:
    """Where the first logger writes, if it is Lightning's and there is one process; else the run's directory."""
    logger = trainer.logger
    if not is_lightning(logger) or trainer.group.is_distributed:
        return str(trainer.run_dir)
    has_own = any(kind.__name__ in ("TensorBoardLogger", "CSVLogger", "LitLogger") for kind in type(logger).__mro__)
    return logger.log_dir if has_own else logger.save_dir  # type: ignore[union-attr]


def strategy_name(strategy: Any) -> str:
    """Our name for one of Lightning's strategy objects.

    Raises:
        ConfigError: another object, or one with options that change more than `find_unused_parameters`.
    """
    kind, options = type(strategy).__name__, dict(getattr(strategy, "_ddp_kwargs", {}))
    unused = options.pop("find_unused_parameters", False)
    more = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "process_group_backend")
    options |= {name: True for name in more if getattr(strategy, f"_{name}", None) is not None}
    if not is_lightning(strategy) or kind not in ("DDPStrategy", "SingleDeviceStrategy") or options:
        given = f" with {', '.join(options)}" if options else ""
        raise ConfigError(
            f'strategy={kind}(…){given}: expected a name ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp", '
            '"replicas"), or a DDPStrategy or SingleDeviceStrategy of Lightning without other options than '
            "find_unused_parameters."
        )
    if kind == "SingleDeviceStrategy":
        return "auto"
    return "ddp_find_unused_parameters_true" if unused else "ddp"


def _of_type(trainer: Trainer, kind: type) -> list[Any]:
    return [callback for callback in trainer.callbacks if is_kind(callback, kind)]


def _loaders(name: str) -> Any:
    def found(trainer: Trainer) -> Any:
        given: Any = trainer.dataloaders.get(name)
        return given.iterables if is_combined(given) else given

    return found


_ATTRIBUTES: dict[str, Any] = {
    "lightning_module": lambda trainer: trainer.module,
    "model": lambda trainer: trainer.module,
    "global_rank": lambda trainer: trainer.world.rank,
    "local_rank": lambda trainer: trainer.world.local_rank,
    "node_rank": lambda trainer: trainer.world.rank // trainer.world.local_size,
    "world_size": lambda trainer: trainer.world.size,
    "num_devices": lambda trainer: len(trainer.device_ids),
    "num_nodes": lambda trainer: trainer.world.size // trainer.world.local_size,
    "is_global_zero": lambda trainer: trainer.world.rank == 0,
    "default_root_dir": lambda trainer: str(trainer.run_dir),
    "_accelerator_connector": lambda trainer: SimpleNamespace(
        is_distributed=max(trainer.ranks_asked, trainer.world.size) > 1
    ),
    "log_dir": _log_dir,
    "state": _state,
    "strategy": _strategy,
    "training": lambda trainer: stage(trainer) == "train",
    "validating": lambda trainer: stage(trainer) == "validate",
    "testing": lambda trainer: stage(trainer) == "test",
    "predicting": lambda trainer: stage(trainer) == "predict",
    "evaluating": lambda trainer: stage(trainer) in ("validate", "test", "sanity_check"),
    "enable_validation": lambda trainer: trainer.has_validation,
    "checkpoint_callbacks": lambda trainer: _of_type(trainer, ours.ModelCheckpoint),
    "early_stopping_callbacks": lambda trainer: _of_type(trainer, ours.EarlyStopping),
    "progress_bar_callback": lambda trainer: next(iter(_of_type(trainer, ours.ProgressBar)), None),
    "predict_loop": lambda trainer: next(iter(_of_type(trainer, PredictionCollector)), None),
    "num_sanity_val_batches": lambda trainer: [min(trainer.num_sanity_val_steps, n) for n in trainer.num_val_batches],
    "is_last_batch": lambda trainer: trainer.progress.batch_idx + 1 >= trainer.num_training_batches,
    "received_sigterm": lambda trainer: trainer.agreement.interrupted,
    "train_dataloader": _loaders("train"),
    "val_dataloaders": _loaders("val"),
    "test_dataloaders": _loaders("test"),
    "predict_dataloaders": _loaders("predict"),
    "barebones": lambda trainer: False,
}
