"""Setup of a call of `fit`, in the order in which its parts become ready.

    checkpoint found and read  →  loaders that exist already  →  on_load_checkpoint  →  module, its weights
    →  optimizers, schedulers  →  step  →  loggers  →  on_fit_start  →  all loaders  →  the rest of the checkpoint  →  loop

This is Lightning's order, so hooks find the same parts ready as there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.callbacks import ModelCheckpoint
from footplate.checkpoint.frozen_weights import FrozenWeights, fill_in
from footplate.checkpoint.optimizer_settings import settings_of
from footplate.checkpoint.run_state import RunState
from footplate.checkpoint.storage import Place
from footplate.core import rng
from footplate.core.errors import CheckpointError
from footplate.core.hooks import overrides
from footplate.core.hparams import hparams_to_log
from footplate.distributed.resharing import part_of
from footplate.step.optimizers import configure
from footplate.training.argument_checks import validation_interval
from footplate.training.call_scope import call_setup
from footplate.training.loaders import asks_hooks, evaluation_loaders, training_loader
from footplate.training.logical import check_resumed
from footplate.training.logical_checks import check_module
from footplate.training.loop import TrainingLoop
from footplate.training.profiler.step_profiles import StepProfiles
from footplate.training.profiling import recorder
from footplate.training.rank_checks import check_data, check_optimizers, read_alike, warn_of_own_disks
from footplate.training.reloading import check_same_ranks, making_loaders, resumed_epoch
from footplate.training.resuming import call_load_hooks, find_on_all, named_checkpoint, read_checkpoint
from footplate.training.saving import save_before_end, wait_for_save
from footplate.training.step_setup import build_step, prepare_module
from footplate.training.trial import TrialReports

if TYPE_CHECKING:
    from footplate.training.run import LoaderPair, Run

log = logging.getLogger(__name__)


def fit(run: Run, train_dataloaders: Any, val_dataloaders: Any, ckpt_path: str | Path | None) -> None:
    """Train; see `Trainer.fit`."""
    if run.logical is not None:
        run.logical.enter(run, None)
    call_setup(run)
    if not run.config.fast_dev_run:
        warn_of_own_disks(run)
    path = find_on_all(run, ckpt_path)
    run.resumed_from = named_checkpoint(ckpt_path, path)

    # The checkpoint's seed and the position of its loader come first: loaders are made with them.
    loaded = None if path is None else _read(run, path)
    if run.logical is not None:
        check_module(run)
        run.logical.use_threads(run, loaded)
        # The seed may be that of the checkpoint.
        run.logical.enter(run, None)

    # Loaders that exist already are checked before anything begins. Hooks are asked for theirs after on_fit_start.
    run.parallel.check(run.module)
    _begin_state(run)
    make = functools.partial(_make_loaders, run, train_dataloaders, val_dataloaders)
    run.make_loaders = functools.partial(_first_loaders, run, make, _loader_position(loaded), resumed_epoch(loaded))
    hooked = asks_hooks(run, train_dataloaders, val_dataloaders)
    if not hooked:
        run.ask_for_loaders()

    # Hooks of the checkpoint may still build layers, so the module is moved and its optimizers are made after them.
    if loaded is not None:
        call_load_hooks(run, loaded)
    prepare_module(run)
    assert run.state is not None
    if not run.config.save_frozen_weights:
        run.state.frozen_weights = FrozenWeights(run.module, run.parallel.whole)
    if loaded is not None:
        loaded = run.parallel.weight_parts(loaded, run.module)
        loaded = fill_in(loaded, run.module, str(path), run.parallel.whole)
        _resume_module(run, loaded, str(path))
        if run.state.frozen_weights is not None:
            run.state.frozen_weights.loaded(loaded)
    _configure_training(run)
    for logger in run.recorders:
        logger.setup(run.run_dir, settings_to_log(run))

    run.hooks.call("on_fit_start")
    loader, val_loaders = run.ask_for_loaders()
    # New loaders may replace the loaders that were found.
    run.found_loaders = None
    _check_loaders(run, loader, val_loaders)
    if loaded is not None:
        loaded = run.parallel.optimizer_parts(loaded, run.optimizers)
        _resume_training(run, loaded, str(path))
    # Free the memory of the checkpoint's tensors.
    resumed, loaded = loaded is not None, None

    # Train.
    run.profiles = StepProfiles(run)
    loop = run.loop = TrainingLoop(run, loader, val_loaders)
    for logger in run.recorders:
        if isinstance(logger, TrialReports):
            logger.watch(loop.has_trained)
    if run.begins_from_origin and loop.has_trained():
        raise CheckpointError(
            f"{path} is at epoch {run.progress.epoch}, step {run.progress.global_step}: with "
            f"max_epochs={run.config.max_epochs} and max_steps={run.config.max_steps}, nothing is left to train from there."
        )
    if hooked:
        loop.make_loaders = functools.partial(_later_loaders, run, make)
    run.use_loader(loop.source)
    if not resumed:
        loop.sanity_check()
    _train(run, loop)
    for logger in run.recorders:
        logger.log_model(run.trainer)
    run.hooks.call("on_fit_end")


def _train(run: Run, loop: TrainingLoop) -> None:
    """Run the epochs until the loop has finished, between `on_train_start` and `on_train_end`."""
    if not run.num_training_batches:
        log.info("Nothing is trained, since limit_train_batches=0.")
        return
    run.training_in_progress = True
    run.metrics.by_step = False
    run.monitor.begin(run)
    run.hooks.call("on_train_start")
    run.agreement.settle()
    record = recorder(run.profiler) or contextlib.nullcontext
    with run.profiles.while_training():
        while not loop.finished():
            with record("run_training_epoch"):
                loop.epoch()
    # Save before a callback sets averaged weights.
    save_before_end(run)
    run.step.fetch_weights(may_change=True)
    run.hooks.call("on_train_end")
    with run.monitor.times.during("checkpoint"):
        wait_for_save(run)
    run.monitor.end(run)
    # From now on, every rank finds the checkpoints of rank 0.
    run.group.barrier()


def _begin_state(run: Run) -> None:
    """Begin a fresh run state. Optimizers, step and loader are added when they are ready."""
    run.metrics = run.training_metrics = run.new_metrics(by_step=True)
    run.state = RunState(
        module=run.module,
        seed=run.seed,
        progress=run.progress,
        metrics=run.metrics,
        callbacks=run.callbacks,
        loggers=run.recorders,
        datamodule=run.datamodule,
        callback_metrics=run.reports.callback,
    )


def _configure_training(run: Run) -> None:
    """Make the optimizers, the schedulers and the step. From now on, the run state has them."""
    run.optimizers, run.lr_scheduler_configs = configure(run.module)
    check_optimizers(run)
    settings = [settings_of(optimizer) for optimizer in run.optimizers]
    build_step(run)
    assert run.state is not None
    run.state.step, run.state.optimizers = run.step, run.optimizers
    run.state.optimizer_settings = settings
    run.state.schedulers = [config.scheduler for config in run.lr_scheduler_configs]


# Resuming


def _read(run: Run, path: Place) -> dict[str, Any]:
    """Read a checkpoint on all ranks, and take its seed. Return this rank's part of it."""
    loaded = read_alike(run, path, functools.partial(read_checkpoint, run))
    run.seed = loaded.get("seed", run.seed)
    check_resumed(run.config.logical_ranks, loaded, str(path))
    if run.logical is not None:
        return run.logical.part_of(loaded)
    return part_of(loaded, run.data_world, lambda path: run.module.get_submodule(path)._reductions)


def _loader_position(loaded: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the training loader's state in a checkpoint. None if there is none that a loader of ours can continue from."""
    position = {} if loaded is None else loaded.get("loader", {})
    return position if {"global_batch_size", "parts"} & position.keys() else None


def _resume_module(run: Run, loaded: dict[str, Any], source: str) -> None:
    """Restore the weights, then callbacks, which may change the weights."""
    assert run.state is not None
    try:
        run.state.load_module(loaded, source)
    except CheckpointError as error:
        if not run.begins_from_origin:
            raise
        raise CheckpointError(
            f"{error} A training that begins from a checkpoint can have other hyperparameters, but not other shapes."
        ) from error
    for callback in run.callbacks:
        if overrides(callback, "on_load_checkpoint"):
            callback.on_load_checkpoint(run.trainer, run.module, loaded)
    if not run.begins_from_origin:
        run.state.load_callbacks(loaded)
        run.state.load_loggers(loaded)
        return

    # The checkpoints, scores and records of the other training stay its own.
    run.state.load_callbacks(loaded, but=(ModelCheckpoint,))
    for part in (*run.callbacks, *run.recorders):
        if isinstance(part, (ModelCheckpoint, TrialReports)):
            part.begin_at(loaded["global_step"])


def _resume_training(run: Run, loaded: dict[str, Any], source: str) -> None:
    """Restore the rest, after `on_fit_start`, where callbacks may still add parameter groups."""
    assert run.state is not None
    run.state.load_training(loaded, source, run.lr_scheduler_configs if run.begins_from_origin else None)
    if "rng" in loaded:
        rng.restore(loaded["rng"], run.device)
    verb = "Beginning" if run.begins_from_origin else "Continuing"
    run.print(f"{verb} from {source} (epoch {run.progress.epoch + 1}, step {run.progress.global_step}).")
    if loaded["footplate"].get("failed_in_step"):
        run.print(
            "This checkpoint was saved after a step had failed. It contains what that forward pass changed, such as the "
            "running statistics of batch norm or the state of a torchmetrics object."
        )


# Loaders


def _make_loaders(
    run: Run, train_dataloaders: Any, val_dataloaders: Any, position: dict[str, Any] | None
) -> LoaderPair:
    """Make the loaders of a `fit`, from the call's arguments or from hooks.

    Args:
        run: the run.
        train_dataloaders: as the user passed them.
        val_dataloaders: as the user passed them.
        position: the training loader's state in a checkpoint.
    """
    config = run.config
    loader, run.training_batches = training_loader(run, train_dataloaders, config.limit("fit"), position)
    val_loaders: list[Any] = []
    if overrides(run.module, "validation_step") and config.limit("validate") != 0:
        limit = config.overfit_batches or config.limit("validate")
        val_loaders, run.num_val_batches = evaluation_loaders(run, "validate", val_dataloaders, limit)
    run.has_validation = bool(val_loaders)
    run.val_check_batches = run.training_batches
    if val_loaders and run.training_batches:
        run.val_check_batches = validation_interval(
            config.val_check_interval, config.check_val_every_n_epoch, run.training_batches
        )
    return loader, val_loaders


def _first_loaders(
    run: Run, make: Callable[..., LoaderPair], position: dict[str, Any] | None, epoch: int
) -> LoaderPair:
    with making_loaders(run, epoch):
        return make(position)


def _later_loaders(run: Run, make: Callable[..., LoaderPair]) -> LoaderPair:
    loader, val_loaders = make(None)
    _check_loaders(run, loader, val_loaders)
    return loader, val_loaders


def _check_loaders(run: Run, loader: Any, val_loaders: list[Any]) -> None:
    """Check on all ranks together that their loaders agree."""
    validated = list(zip(val_loaders, run.num_val_batches, strict=True)) if val_loaders else []
    check_data(run, {"training": [(loader, run.training_batches)], "validation": validated})
    check_same_ranks(run, loader)


# Loggers


def settings_to_log(run: Run) -> dict[str, Any]:
    """Return the hyper-parameters of module and data module, and the trainer's settings."""
    config = run.config
    settings = {
        "accelerator": run.accelerator.name,
        "precision": run.precision.name,
        "max_epochs": config.max_epochs,
        "max_steps": config.max_steps,
        "accumulate_grad_batches": config.accumulate_grad_batches,
        "gradient_clip_val": config.gradient_clip_val,
        "seed": run.seed,
    }
    saved = hparams_to_log(run.module, run.datamodule)
    return {**saved, **{f"trainer/{name}": value for name, value in settings.items()}}
