"""A `lightning.pytorch.LightningModule`, a `LightningDataModule` and Lightning's callbacks, on our trainer, unchanged.

A LightningModule reaches its trainer in some thirty places. Those that concern logging and optimizers are methods of the
module that read the trainer's insides; `attach_module` puts ours, from `TrainerBound`, over them on the instance. The
rest are plain attributes of the trainer: `trainer_attribute` answers for those that ours names otherwise, and refuses
Lightning's insides with one sentence. Lightning itself is never imported here: a user who has it, has imported it.

Which hooks, attributes and callbacks are supported is written in docs/lightning.md, and each row of it is tested.
"""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from footplate import callbacks as ours
from footplate.errors import ConfigError
from footplate.hooks import overrides
from footplate.module import TrainerBound

if TYPE_CHECKING:
    from footplate.trainer import Trainer

BOUND = (
    "log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "toggle_optimizer",
    "untoggle_optimizer", "toggled_optimizer", "all_gather", "print",
)  # fmt: skip

REFUSED_HOOKS = {
    "configure_sharded_model": "rename it to configure_model()",
    "on_validation_model_zero_grad": "clear the gradients in on_validation_start() instead",
    "optimizer_zero_grad_step": "override optimizer_zero_grad() instead",
    "tbptt_split_batch": "split the batch in training_step(), with manual optimisation",
    "training_epoch_end": "Lightning 2 removed it: use on_train_epoch_end()",
    "validation_epoch_end": "Lightning 2 removed it: use on_validation_epoch_end()",
    "test_epoch_end": "Lightning 2 removed it: use on_test_epoch_end()",
}

TRANSLATED = {
    "EarlyStopping": (
        "monitor", "min_delta", "patience", "verbose", "mode", "strict", "check_finite", "stopping_threshold",
        "divergence_threshold",
    ),
    "LearningRateMonitor": ("logging_interval", "log_momentum", "log_weight_decay"),
}  # fmt: skip

REFUSED_CALLBACKS = {
    "BatchSizeFinder": "it drives Lightning's own loops",
    "LearningRateFinder": "it drives Lightning's own loops",
    "StochasticWeightAveraging": "it rewrites Lightning's own loops; torch.optim.swa_utils.AveragedModel in "
    "on_train_epoch_end does the same",
    "GradientAccumulationScheduler": "the window is fixed for a run: use accumulate_grad_batches",
    "DeviceStatsMonitor": "it reads Lightning's own logger connector",
    "ThroughputMonitor": "it reads Lightning's own loops",
    "OnExceptionCheckpoint": "a Footplate run saves by itself when it is interrupted",
}

REFUSED_ATTRIBUTES = {
    "fit_loop": "trainer.progress has the counters",
    "validate_loop": "trainer.progress has the counters",
    "test_loop": "trainer.progress has the counters",
    "predict_loop": "trainer.progress has the counters",
    "_logger_connector": "log with self.log, or trainer.loggers",
    "_checkpoint_connector": "use trainer.save_checkpoint",
    "_data_connector": "use the loaders you passed",
    "_evaluation_loop": "trainer.progress has the counters",
    "precision_plugin": "trainer.precision names the precision",
    "profiler": "torch.profiler can be used around trainer.fit",
    "tuner": "there is none",
}


def attach_module(module: Any, trainer: Trainer) -> None:
    """Let a module that is not ours reach our trainer.

    Raises:
        ConfigError: it is a plain `nn.Module`, or overrides a hook that has no counterpart.
    """
    if not hasattr(module, "training_step") or not hasattr(module, "configure_optimizers"):
        raise ConfigError(
            f"{type(module).__name__} is a plain torch.nn.Module: nothing says how to train it. Wrap it:\n"
            "    class Training(footplate.Module):\n"
            "        def __init__(self, net): super().__init__(); self.net = net\n"
            "        def training_step(self, batch, batch_idx): ...\n"
            "        def configure_optimizers(self): ..."
        )
    for name, mend in REFUSED_HOOKS.items():
        if hasattr(module, name) and overrides(module, name):
            raise ConfigError(f"{type(module).__name__}.{name}() is not supported: {mend}.")
    for part in (module, *(child for child in module.modules() if child is not module and is_lightning(child))):
        for name in BOUND:
            part.__dict__[name] = types.MethodType(getattr(TrainerBound, name), part)
    module.trainer = trainer


def is_lightning(thing: Any) -> bool:
    """Whether an object's class is, or inherits from, one of Lightning's own base classes."""
    return any(base.__module__.startswith(("lightning.", "pytorch_lightning.")) for base in type(thing).__mro__)


def translate_callbacks(callbacks: list[Any]) -> list[Any]:
    """Lightning's own callbacks as ours where ours do the same; others as they are.

    Raises:
        ConfigError: one that can only work inside Lightning's loops.
    """
    return [_translate(callback) if is_lightning(callback) else callback for callback in callbacks]


def _translate(callback: Any) -> Any:
    kind = type(callback)
    lineage = [
        base.__name__ for base in kind.__mro__ if base.__module__.startswith(("lightning.", "pytorch_lightning."))
    ]
    for name in lineage:
        if name in REFUSED_CALLBACKS:
            raise ConfigError(f"Lightning's {kind.__name__} can't run here: {REFUSED_CALLBACKS[name]}.")
    replaced = next((name for name in lineage if name in _TRANSLATORS), None)
    if replaced is None:
        return callback
    if kind.__name__ != replaced:
        raise ConfigError(
            f"{kind.__name__} inherits from Lightning's {replaced}, which works on Lightning's own loops. "
            f"Inherit from {_TRANSLATORS[replaced].__name__.lstrip('_')} of footplate.callbacks instead."
        )
    return _TRANSLATORS[replaced](callback)


def _same_arguments(callback: Any) -> Any:
    name = type(callback).__name__
    return getattr(ours, name)(**{argument: getattr(callback, argument) for argument in TRANSLATED[name]})


def _model_checkpoint(callback: Any) -> Any:
    return ours.ModelCheckpoint(
        dirpath=callback.dirpath,
        filename=callback.filename,
        monitor=callback.monitor,
        verbose=callback.verbose,
        save_last=callback.save_last,
        save_top_k=callback.save_top_k,
        save_weights_only=callback.save_weights_only,
        mode=callback.mode,
        auto_insert_metric_name=callback.auto_insert_metric_name,
        every_n_train_steps=callback._every_n_train_steps or None,
        train_time_interval=callback._train_time_interval,
        every_n_epochs=callback._every_n_epochs or None,
        save_on_train_epoch_end=callback._save_on_train_epoch_end,
        enable_version_counter=callback._enable_version_counter,
    )


def _timer(callback: Any) -> Any:
    from datetime import timedelta

    duration = None if callback._duration is None else timedelta(seconds=callback._duration)
    return ours.Timer(duration, str(getattr(callback._interval, "value", callback._interval)), callback._verbose)  # type: ignore[arg-type]


def _progress_bar(callback: Any) -> Any:
    return ours.ProgressBar()


def _model_summary(callback: Any) -> Any:
    return ours.ModelSummary(callback._max_depth)


_TRANSLATORS: dict[str, Any] = {
    "EarlyStopping": _same_arguments,
    "LearningRateMonitor": _same_arguments,
    "ModelCheckpoint": _model_checkpoint,
    "Timer": _timer,
    "TQDMProgressBar": _progress_bar,
    "RichProgressBar": _progress_bar,
    "ModelSummary": _model_summary,
    "RichModelSummary": _model_summary,
}


def trainer_attribute(trainer: Trainer, name: str) -> Any:
    """What a LightningModule or callback finds under a name that our trainer has not.

    Raises:
        AttributeError: there is no such thing, or it is one of Lightning's insides.
    """
    if name in REFUSED_ATTRIBUTES:
        raise AttributeError(f"trainer.{name} is one of Lightning's insides and not here: {REFUSED_ATTRIBUTES[name]}.")
    reader = _ATTRIBUTES.get(name)
    if reader is None:
        raise AttributeError(f"Trainer has no attribute {name!r}")
    return reader(trainer)


def _state(trainer: Trainer) -> Any:
    """Lightning's `TrainerState`, when Lightning is there; else its names alone."""
    states = sys.modules.get("lightning.pytorch.trainer.states") or sys.modules.get("pytorch_lightning.trainer.states")
    names = {"fit": "fit", "validate": "validate", "test": "test", "predict": "predict"}
    stages = {"fit": "train", **{name: name for name in ("validate", "test", "predict")}}
    stage = "sanity_check" if trainer.sanity_checking else stages.get(trainer.stage or "")
    if states is None or trainer.stage is None:
        return SimpleNamespace(fn=trainer.stage, stage=stage)
    return SimpleNamespace(fn=states.TrainerFn(names[trainer.stage]), stage=states.RunningStage(stage))


def _strategy(trainer: Trainer) -> Any:
    return SimpleNamespace(
        root_device=trainer.device,
        reduce_boolean_decision=lambda decision, all=True: decision,
        broadcast=lambda value, src=0: value,
        barrier=lambda name=None: None,
        world_size=trainer.world.size,
        is_global_zero=trainer.world.rank == 0,
    )


_ATTRIBUTES: dict[str, Any] = {
    "lightning_module": lambda trainer: trainer.module,
    "model": lambda trainer: trainer.module,
    "global_rank": lambda trainer: trainer.world.rank,
    "local_rank": lambda trainer: trainer.world.local_rank,
    "node_rank": lambda trainer: 0,
    "world_size": lambda trainer: trainer.world.size,
    "num_devices": lambda trainer: len(trainer.device_ids),
    "num_nodes": lambda trainer: 1,
    "is_global_zero": lambda trainer: trainer.world.rank == 0,
    "default_root_dir": lambda trainer: str(trainer.run_dir),
    "log_dir": lambda trainer: str(trainer.run_dir),
    "state": _state,
    "strategy": _strategy,
    "training": lambda trainer: trainer.training_in_progress and not trainer.sanity_checking,
    "validating": lambda trainer: trainer.stage == "validate",
    "testing": lambda trainer: trainer.stage == "test",
    "predicting": lambda trainer: trainer.stage == "predict",
    "evaluating": lambda trainer: trainer.stage in ("validate", "test"),
    "enable_validation": lambda trainer: trainer.has_validation,
    "checkpoint_callbacks": lambda trainer: [one for one in trainer.callbacks if isinstance(one, ours.ModelCheckpoint)],
    "early_stopping_callbacks": lambda trainer: [
        one for one in trainer.callbacks if isinstance(one, ours.EarlyStopping)
    ],
    "progress_bar_callback": lambda trainer: next(
        (one for one in trainer.callbacks if isinstance(one, ours.ProgressBar)), None
    ),
    "num_sanity_val_batches": lambda trainer: [min(trainer.num_sanity_val_steps, n) for n in trainer.num_val_batches],
    "is_last_batch": lambda trainer: trainer.progress.batch_idx + 1 >= trainer.num_training_batches,
    "received_sigterm": lambda trainer: trainer.interrupted,
}
