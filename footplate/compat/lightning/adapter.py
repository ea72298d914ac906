"""Lightning's adapter: a `LightningModule` and its data module, callbacks and loggers run unchanged on our trainer.

A LightningModule uses its trainer in some thirty places. Methods about logging and optimizers read the internals of
Lightning's trainer; `attach_module` puts our own methods over them, on the instance. The rest are plain attributes of the
trainer: ours has most of them under the same name, `trainer_attributes` adds others, and `refused_attributes` refuses
Lightning's internals with one sentence each. This file doesn't import Lightning: a program that uses it has imported it.

docs/reference/lightning.md and lightning-trainer.md list what is supported, different or refused. A test covers each row.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import proxy

from footplate.checkpoint import load_datamodule, load_module
from footplate.compat.lightning._class_between import is_lightning
from footplate.compat.lightning.callbacks import PredictionCollector, translate_callbacks
from footplate.compat.lightning.loggers import translate_logger
from footplate.compat.lightning.strategies import our_strategy
from footplate.compat.lightning.tuner import is_finder, run_finders
from footplate.core.adapters import Adapter
from footplate.core.device_scalar import DeviceScalar
from footplate.core.errors import ConfigError, MissingExtra
from footplate.core.hooks import overrides, step_arguments
from footplate.distributed.strategies import Options
from footplate.training.prepare import bind_to_trainer

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer

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
    "scaler": "the step scales the loss itself",
    "tuner": "footplate.Tuner(trainer) searches",
    "init_module": "build large layers in configure_model()",
    "distributed_sampler_kwargs": "data is always shared out between processes",
}

PROFILERS = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
    "xla": "XLAProfiler",
}


class LightningAdapter(Adapter):
    """Lightning's adapter; see the module's docstring and `core/adapters.py`."""

    name = "Lightning"
    hook_bases = frozenset({
        "LightningModule", "LightningDataModule", "ModelHooks", "DataHooks", "CheckpointHooks", "Callback",
        "_DeviceDtypeModuleMixin",
    })  # fmt: skip
    refused_arguments = REFUSED_ARGUMENTS
    refused_attributes = REFUSED_ATTRIBUTES
    profilers = tuple(PROFILERS)

    def __init__(self) -> None:
        self.trainer_attributes = {
            "lightning_module": lambda trainer: trainer.module,
            "log_dir": _log_dir,
            "state": _state,
            "strategy": _strategy,
            "predict_loop": _prediction_collector,
            "barebones": lambda trainer: False,
            "_accelerator_connector": lambda trainer: SimpleNamespace(
                is_distributed=max(trainer.ranks_asked, trainer.world.size) > 1
            ),
        }

    def attach_module(self, module: Any, trainer: Trainer) -> None:
        """Connect a LightningModule, and the LightningModules in it, to our trainer."""
        _refuse_hooks(module)
        for part in module.modules():
            if part is module or is_lightning(part):
                bind_to_trainer(part, trainer)
                part.__dict__["_call_batch_hook"] = types.MethodType(_call_batch_hook, part)

    def ranks_met(self, module: Any, trainer: Trainer) -> None:
        for part in module.modules():
            if part is module or is_lightning(part):
                part.__dict__["_device_mesh"] = trainer.parallel.device_mesh

    def batch_outputs(self, output: Any, trainer: Trainer) -> dict[str, Any]:
        """Convert a step's output into Lightning's dict: empty for a skipped batch, and its "loss" as Lightning has it.

        With automatic optimisation, Lightning's "loss" is the batch's part of the step's loss: the loss divided by
        `accumulate_grad_batches`.
        """
        outputs = {} if output is None else dict(output) if isinstance(output, Mapping) else {"loss": output}
        batches = trainer.accumulate_grad_batches
        if batches > 1 and "loss" in outputs and trainer.module.automatic_optimization:
            loss = outputs["loss"]
            outputs["loss"] = (float(loss) if isinstance(loss, DeviceScalar) else loss) / batches
        return outputs

    def translate_callbacks(self, callbacks: list[Any]) -> list[Any]:
        return translate_callbacks(callbacks)

    def callback_groups(self) -> tuple[str, ...]:
        return ("lightning.pytorch.callbacks_factory",) if "lightning.pytorch" in sys.modules else ()

    def is_search(self, callback: Any) -> bool:
        return is_finder(callback)

    def search(self, trainer: Trainer, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
        return run_finders(trainer, method, model, loaders, datamodule)

    def translate_logger(self, logger: Any) -> Any:
        return translate_logger(logger)

    def our_strategy(self, strategy: Any) -> str | Options:
        return our_strategy(strategy)

    def make_profiler(self, name: str) -> Any:
        """Make Lightning's profiler of a name.

        Raises:
            MissingExtra: Lightning isn't installed.
        """
        for package in ("lightning.pytorch.profilers", "pytorch_lightning.profilers"):
            with contextlib.suppress(ImportError):
                return getattr(importlib.import_module(package), PROFILERS[name])()
        raise MissingExtra(
            f"profiler=\"{name}\" is Lightning's {PROFILERS[name]}, and Lightning isn't installed: pip install lightning."
        )

    def attach_profiler(self, profiler: Any, module: Any) -> None:
        """Give `PyTorchProfiler` the module, whose trainer and layers it reads."""
        if hasattr(profiler, "_lightning_module"):
            profiler._lightning_module = proxy(module)

    def share_rank(self, rank: int) -> None:
        """Set the rank of `rank_zero_only`. Without the variable `RANK`, Lightning would use the local rank."""
        rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
        if rank_zero is not None:
            rank_zero.rank_zero_only.rank = rank


def load_from_checkpoint(
    kind: type, checkpoint_path: str | Path, map_location: Any = "cpu", strict: bool | None = None, **kwargs: Any
) -> Any:
    """Load a LightningModule or LightningDataModule of class `kind` from a Footplate checkpoint.

    A module gets its weights and hyper-parameters, a data module its hyper-parameters and state. This is what
    `kind.load_from_checkpoint` does for Lightning's `.ckpt` files, which this function reads too.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or of another model, or an argument of `__init__` is missing.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from footplate.compat.lightning import load_from_checkpoint
        >>> class Net(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch[0]).square().mean()
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> trainer = fp.Trainer(max_epochs=1)
        >>> trainer.fit(Net(), train)
        >>> net = load_from_checkpoint(Net, trainer.checkpoint_callback.best_model_path)
    """
    if hasattr(kind, "train_dataloader") and not hasattr(kind, "training_step"):
        return load_datamodule(kind, checkpoint_path, kwargs)
    return load_module(kind, checkpoint_path, map_location, strict, kwargs)


# Modules


def _refuse_hooks(module: Any) -> None:
    """Raise ConfigError if a module overrides a hook, or takes an argument, that has no counterpart here."""
    kind = type(module).__name__
    for name, hint in REFUSED_HOOKS.items():
        if hasattr(module, name) and overrides(module, name):
            raise ConfigError(f"{kind}.{name}() is not supported: {hint}.")
    for name in STEPS:
        if not overrides(module, name):
            continue
        step = getattr(module, name)
        if "optimizer_idx" in inspect.signature(step).parameters:
            raise ConfigError(
                f"{kind}.{name}(optimizer_idx) is not supported: Lightning 2 removed it. With several optimizers, set "
                "self.automatic_optimization = False and step them yourself."
            )
        step_arguments(step, name)


def _call_batch_hook(module: Any, name: str, *args: Any) -> Any:
    """Call a batch hook of the module. Lightning's exporters and loggers prepare an example input with this method.

    Lightning's own method reads the internals of Lightning's trainer.
    """
    return getattr(module, name)(*args)


# Attributes of the trainer. Each function takes our trainer and returns the value.


def _state(trainer: Trainer) -> Any:
    """Lightning's `TrainerState`, or an object with the same attributes if Lightning isn't imported."""
    states = sys.modules.get("lightning.pytorch.trainer.states") or sys.modules.get("pytorch_lightning.trainer.states")
    status, function, stage = trainer.status, trainer.stage, trainer.running_stage
    if states is None:
        stopped = status in ("finished", "interrupted")
        return SimpleNamespace(status=status, fn=function, stage=stage, finished=status == "finished", stopped=stopped)
    return states.TrainerState(
        states.TrainerStatus(status), function and states.TrainerFn(function), stage and states.RunningStage(stage)
    )


def _strategy(trainer: Trainer) -> Any:
    """An object with the methods of Lightning's strategies that modules and callbacks call."""
    group = trainer.group

    def decide(decision: bool, all: bool = True) -> bool:
        return group.everybody(decision) if all else bool(group.maximum([int(decision)])[0])

    def reduce(tensor: Any, _: Any = None, reduce_op: str = "mean") -> Any:
        if trainer.run.logical is not None:
            # This raises.
            return trainer.all_gather(tensor)
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
        world_size=trainer.world_size,
        is_global_zero=trainer.world.rank == 0,
    )


def _log_dir(trainer: Trainer) -> Any:
    """The directory of the first logger, if it is Lightning's and there is one process; else the run's directory."""
    logger = trainer.logger
    if not is_lightning(logger) or trainer.group.is_distributed:
        return str(trainer.run_dir)
    has_own = any(kind.__name__ in ("TensorBoardLogger", "CSVLogger", "LitLogger") for kind in type(logger).__mro__)
    return logger.log_dir if has_own else logger.save_dir  # type: ignore[union-attr]


def _prediction_collector(trainer: Trainer) -> PredictionCollector | None:
    """The attributes of Lightning's prediction loop that a `BasePredictionWriter` reads; None without a writer."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, PredictionCollector)), None)


ADAPTER = LightningAdapter()
