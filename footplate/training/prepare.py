"""What a run is put together from: callbacks, loggers, loaders, a checkpoint; found and checked before work starts."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from footplate import checkpoint
from footplate.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar, Timer
from footplate.callbacks.base import is_kind
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.data.adapt import adapt, beside, even, pin_for, share_out
from footplate.data.combined import leaves_of, loaders_of
from footplate.errors import CheckpointError, ConfigError, DataError
from footplate.hardware.base import Accelerator, Devices
from footplate.hooks import overrides
from footplate.launch import worker
from footplate.module import Module
from footplate.parallel.uneven import shortest
from footplate.parallel.world import World
from footplate.step.precision import Precision
from footplate.tracking.base import Logger
from footplate.training import job
from footplate.training.config import TrainerConfig
from footplate.training.settings import as_list, count_batches, limit_batches

if TYPE_CHECKING:
    from footplate.trainer import Trainer

log = logging.getLogger(__name__)

NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}
LOADERS = {"validate": "val", "test": "test", "predict": "predict"}


def choose_devices(accelerator: Accelerator, devices: Devices, world: World) -> list[int]:
    """The devices that the processes of this node use, in the order of their local ranks.

    Raises:
        ConfigError: fewer devices than processes.
    """
    found = accelerator.parse_devices(devices)
    if not world.launched or accelerator.drives_all:
        return found
    if len(found) < world.local_size and len(found) == 1:  # one for each process
        found = accelerator.parse_devices(world.local_size if accelerator.name == "cpu" else "auto")
    if len(found) < world.local_size:
        raise ConfigError(
            f"devices={devices!r}: {len(found)} device(s) of {accelerator.name} for the {world.local_size} processes of "
            "this node (LOCAL_WORLD_SIZE). Start one process for each device."
        )
    return found


def choose_precision(precision: str, accelerator: Accelerator) -> Precision:
    """The precision to train in. A CPU trains in "bf16-mixed" where "16-mixed" is asked for, as under Lightning.

    Raises:
        ConfigError: an unknown one, or one that the accelerator doesn't train in.
    """
    chosen = Precision.parse(precision)
    if chosen.name == "16-mixed" and accelerator.name == "cpu" and "16-mixed" not in accelerator.precisions:
        log.warning('precision="16-mixed": a CPU trains in "bf16-mixed" instead.')
        chosen = Precision.parse("bf16-mixed")
    accelerator.check_precision(chosen.name)
    return chosen


def check_nodes(nodes: int, devices: int, world: World) -> int:
    """`num_nodes`, for a run with this number of devices on each.

    Raises:
        ConfigError: the processes that were started are not as many.
    """
    if nodes > 1 and world.launched and worker.attempt() == 0 and world.size != nodes * devices:
        raise ConfigError(
            f"num_nodes={nodes} with {devices} device(s) each: {nodes * devices} processes, but {world.size} were started "
            "(WORLD_SIZE). Start as many, or leave num_nodes and devices out: what was started is then used."
        )
    return nodes


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


def share_rank(world: World) -> None:
    """Give Lightning's `rank_zero_only` the rank of this process. Without `RANK`, it would take the local rank."""
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if world.launched and rank_zero is not None:
        rank_zero.rank_zero_only.rank = world.rank


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


def ask_loader(trainer: Trainer, name: str, given: Any) -> Any:
    """A loader: what was given, or the data module's, or the module's own; None when nobody has one."""
    if given is not None:
        return given
    owner = _owner(trainer, name)
    return None if owner is None else getattr(owner, name)()


def _owner(trainer: Trainer, name: str) -> Any:
    """Who has a hook that makes a loader: the data module, or the module; None when nobody has."""
    owners = [trainer.datamodule, trainer.module]
    return next((owner for owner in owners if owner is not None and overrides(owner, name)), None)


def asks_hooks(trainer: Trainer, train_dataloaders: Any, val_dataloaders: Any) -> bool:
    """Whether a hook makes one of the loaders of a `fit`.

    Raises:
        ConfigError: nobody has training data.
    """
    training, validation = _owner(trainer, "train_dataloader"), _owner(trainer, "val_dataloader")
    if train_dataloaders is None and training is None:
        raise _no_training_data()
    return train_dataloaders is None or (val_dataloaders is None and validation is not None)


def _no_training_data() -> ConfigError:
    return ConfigError(
        "trainer.fit() has no training data: pass train_dataloaders=… or datamodule=… (on the command line: --data), "
        "or define train_dataloader()."
    )


def training_loader(trainer: Trainer, given: Any, limit: Any, saved: dict[str, Any] | None) -> tuple[Any, float]:
    """The training loader, made resumable, and how many of its batches make an epoch, on all ranks.

    Args:
        trainer: whose loader it is.
        given: what the user passed.
        limit: `limit_train_batches`.
        saved: the loader's state in a checkpoint, where it says how large global batches are: that goes on.

    Raises:
        ConfigError: there is none, it is empty, or a part of it is less than a batch.
    """
    found = trainer.dataloaders["train"] = ask_loader(trainer, "train_dataloader", given)
    if found is None:
        raise _no_training_data()
    overfit = trainer.config.overfit_batches
    for leaf in leaves_of(found):
        pin_for(leaf, trainer.device)
    loader = adapt(found, trainer.seed, not overfit, trainer.world, trainer.config.use_distributed_sampler)
    trainer.read_from("train", [loader])
    if saved is None and trainer.ranks_meant > trainer.world.size:
        saved = as_meant(loader.state_dict(), trainer.ranks_meant, trainer.world.size)
    if saved is not None:
        loader.load_state_dict(saved)
    total = count_batches(loader)
    if trainer.group.several and not even(loader):
        total = shortest(total, trainer.group, "training")
    if total == 0:
        raise ConfigError("The training loader has no batches: is the data empty, or drop_last with too few rows?")
    name = "overfit_batches" if overfit else "limit_train_batches"
    limit = overfit or limit
    batches = limit_batches(name, limit, total)
    return loader, batches


def as_meant(state: dict[str, Any], meant: int, ranks: int) -> dict[str, Any] | None:
    """A fresh loader's state on fewer ranks than it was meant for, with the global batches of all; None if it has none."""
    if "parts" in state:
        parts = [{**one, "state": as_meant(one["state"], meant, ranks) or one["state"]} for one in state["parts"]]
        return {**state, "parts": parts}
    size = state.get("global_batch_size")
    return None if size is None else {**state, "global_batch_size": size // ranks * meant, "ranks": meant}


def check_evaluated(trainer: Trainer, stage: str, dataloaders: Any) -> None:
    """Refuse an evaluation that nobody has data for.

    Raises:
        ConfigError: no loader was given, and no hook makes one.
    """
    if dataloaders is None and _owner(trainer, f"{LOADERS[stage]}_dataloader") is None:
        raise no_data(stage)


def no_data(stage: str) -> ConfigError:
    """The error of an evaluation without a loader."""
    return ConfigError(
        f"trainer.{stage}() has no data: pass dataloaders=… or datamodule=…, or define {LOADERS[stage]}_dataloader()."
    )


def evaluation_loaders(trainer: Trainer, stage: str, given: Any, limit: Any) -> tuple[list[Any], list[float]]:
    """The loaders of a stage and how many batches of each are run; empty when there are none.

    Raises:
        ConfigError: one of them is empty, or a part of it is less than a batch.
    """
    name = LOADERS[stage]
    found = trainer.dataloaders[name] = ask_loader(trainer, f"{name}_dataloader", given)
    for leaf in leaves_of(found):
        pin_for(leaf, trainer.device)
    training, shared = trainer.dataloaders.get("train"), trainer.config.use_distributed_sampler
    given = [beside(loader, training) for loader in loaders_of(found)]
    loaders = [share_out(loader, trainer.seed, trainer.world, shared) for loader in given]
    trainer.read_from(name, loaders)
    totals = [count_batches(loader) for loader in loaders]
    if trainer.parallel.lockstep and trainer.group.several:
        pairs = zip(loaders, totals, strict=True)
        totals = [one if even(loader) else shortest(one, trainer.group, stage) for loader, one in pairs]
    limits = [limit_batches(f"limit_{name}_batches", limit, total) for total in totals]
    for index, batches in enumerate(limits):
        if batches == 0 and limit != 0:
            which = f" {index}" if len(loaders) > 1 else ""
            raise ConfigError(f"The {stage} loader{which} has no batches: is the data empty?")
    return loaders, limits


def started_again(trainer: Trainer) -> bool:
    """Whether this process repeats a `fit` that failed, and continues from what that has saved."""
    return trainer.launch_id is not None and trainer.stage == "fit" and worker.attempt() > 0


def default_max_epochs(max_steps: int, callbacks: list[Any]) -> int:
    """The limit of a `fit` that was given none: -1 where steps or a `Timer` limit it; else 1000, with a warning."""
    if max_steps != -1 or any(is_kind(callback, Timer) for callback in callbacks):
        return -1
    warnings.warn("Nothing limits this run: max_epochs=1000 is assumed. Say max_epochs=-1 for no limit.", stacklevel=3)
    return 1000


def find_checkpoint(trainer: Trainer, ckpt_path: str | Place | None) -> Place | None:
    """The checkpoint that `ckpt_path` stands for; None for none, and for "last" when a run has not saved yet.

    Raises:
        CheckpointError: "last" of nothing to evaluate, or "best" where none was kept.
    """
    savers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
    directories = sorted({to_place(callback.dirpath) for callback in savers if callback.dirpath is not None}, key=str)
    where = ", ".join(map(str, directories)) or str(trainer.run_dir)

    def newest(key: str | None = None, value: Any = None) -> Place | None:
        """The newest that serves the stage: to train on, a checkpoint needs more than weights."""
        return checkpoint.newest(
            directories,
            lambda meta: (
                (trainer.stage != "fit" or not meta.get("weights_only")) and (key is None or meta.get(key) == value)
            ),
        )

    if started_again(trainer):
        found = newest("launch", trainer.launch_id)
        if found is not None:
            return found
    if trainer.job_fit is not None and trainer.stage == "fit" and job.begun_again():
        found = newest("job_fit", trainer.job_fit)
        if found is not None:
            return found
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        found = newest()
        if found is None and trainer.stage != "fit":
            raise CheckpointError(f'ckpt_path="last": there is no checkpoint in {where}.')
        if found is None:
            trainer.print(f"There is no checkpoint in {where} that training can continue from: it begins at step 0.")
        return found
    if ckpt_path == "best":
        for callback in savers:
            link = to_place(callback.dirpath or trainer.run_dir) / f"best{checkpoint.SUFFIX}"
            for candidate in (callback.best_model_path, link):
                if candidate and checkpoint.exists(candidate):
                    return to_place(candidate)
        raise CheckpointError(
            'ckpt_path="best": no best checkpoint was kept. Use ModelCheckpoint(monitor=…), or ckpt_path="last".'
        )
    return to_place(ckpt_path)


def shown_path(ckpt_path: str | Place | None, found: Place) -> str:
    """What `trainer.ckpt_path` shows of a checkpoint that was found: `last.ckpt`, where that is a link to it."""
    if ckpt_path != "last" or not isinstance(found, Path):
        return str(found)
    link = found.parent / checkpoint.LAST
    return str(link if link.exists() and link.samefile(found) else found)


def named_checkpoint(ckpt_path: str | Place | None, found: Place | None) -> Place | None:
    """The checkpoint that the user has chosen to continue from; None where the newest was asked for, or none.

    Savers delete what newer checkpoints replace, but not this one: it is the user's.
    """
    if ckpt_path in (None, "last"):
        return None
    chosen = found if ckpt_path == "best" or found is None else to_place(ckpt_path)
    return None if chosen is None else store_of(chosen).resolve(chosen)


def read_checkpoint(trainer: Trainer, path: Place) -> dict[str, Any]:
    """The state that training continues from; one that Lightning has made, under our names, with a word on what it lacks.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or needs code to be run.
    """
    from footplate.checkpoint.lightning import is_lightnings, translate

    state = checkpoint.load(path)
    if is_lightnings(state):
        state = translate(state)
    if "made_by" in state:
        trainer.print(
            f"{path} was made by {state['made_by']}: weights, optimizers, schedulers and the place in the epoch continue; "
            "the order of the data and the random draws can't, and are Footplate's own from here."
        )
    return state


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
