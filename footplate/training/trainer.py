"""The trainer: runs a module over batches, and writes down what comes of it.

    table → loader → batch → step (forward, backward, optimizer) → metrics → loggers, callbacks, checkpoints

`Trainer` is the front, with Lightning's names. Each call makes a `Run` (`training/run.py`) and hands it to what does the
work. Read on with `training/fitting.py`, how a `fit` is put together; `training/loop.py`, its epochs and steps; and
`training/evaluation_calls.py` for the other three calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from footplate.checkpoint.storage import Place, to_place
from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.hardware.transfer import as_tensors, map_tensors
from footplate.step.optimizers import SchedulerConfig
from footplate.step.torch_compile import unwrapped
from footplate.tracking.silent import Silent
from footplate.training import job
from footplate.training.argument_checks import set_deterministic
from footplate.training.call_scope import called
from footplate.training.changes import take_changes, take_ckpt_path
from footplate.training.config import TrainerConfig, configured
from footplate.training.evaluation_calls import judge, predict, show
from footplate.training.fitting import fit
from footplate.training.lock import only_writer
from footplate.training.placement import place
from footplate.training.preemption import watching
from footplate.training.prepare import (
    choose_callbacks,
    choose_loggers,
    default_max_epochs,
    record_with,
    refuse_arguments,
    run_searches,
    split_datamodule,
    strategy_name,
)
from footplate.training.profiling import make_profiler
from footplate.training.reports import Reports
from footplate.training.resuming import or_best
from footplate.training.run import Run, Stage
from footplate.training.saving import wait_for_save, write_checkpoint
from footplate.training.trainer_attributes import TrainerAttributes


class Trainer(TrainerAttributes):
    """Trains a `Module` (or a `LightningModule`), evaluates it, and predicts with it.

    Args: those of `TrainerConfig`, by name. Lightning's other arguments are refused, with what to use instead.

    Attributes:
        module: the module that is run, or was run last.
        should_stop: set it to end training after the present step.

    Raises:
        ConfigError: an argument that can't be used, by name, with what to write instead.
    """

    @configured(TrainerConfig, refuse_arguments)
    def __init__(self, config: TrainerConfig) -> None:
        config = replace(config, strategy=strategy_name(config.strategy))
        placement = place(config)
        directory = config.default_root_dir or job.directory()
        run_dir = Path(directory or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")).expanduser()
        set_deterministic(config.deterministic)
        if config.benchmark is not None:
            torch.backends.cudnn.benchmark = config.benchmark

        self.loggers: list[Any] = choose_loggers(config.logger)
        recorders = record_with(self.loggers)
        if config.fast_dev_run or placement.world.rank != 0:
            self.loggers = [Silent() for _ in self.loggers]
        self.run = Run(
            trainer=self,
            config=config.with_dry_run(),
            placement=placement,
            seed=rng.default_seed() if config.seed is None else config.seed,
            run_dir=run_dir,
            recorders=recorders,
            profiler=make_profiler(config.profiler),
            reports=Reports(recorders),
        )
        self.own_callbacks = choose_callbacks(config)
        self.show_callbacks(self.own_callbacks)
        self.ckpt_path: str | Path | None = None  # of the last call: what it loaded; or what the user has assigned
        self.shown_ckpt_path: str | None = None
        self.assigned_ckpt_path: str | Path | None = None

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train.

        Args:
            model: a `Module` or a `LightningModule`; `torch.compile(module)` of one trains it compiled.
            train_dataloaders: a loader, or a `DataModule`.
            val_dataloaders: a loader or several.
            datamodule: a `DataModule` or a `LightningDataModule`.
            ckpt_path: continue from this checkpoint, a path or a URI; "last" from the newest complete one of this run, or
                from the beginning when there is none; "best" from the best.
            weights_only: accepted for Lightning's sake: no code of a checkpoint is ever run, whatever this says.

        Raises:
            FootplateError: something that can be mended, said before training begins wherever it can be known then.
            SystemExit: 143, after SIGTERM: the step was finished and the run saved.
            KeyboardInterrupt: after SIGINT, likewise; or at once after a second one.
        """
        ckpt_path = self._take_over(ckpt_path)
        if self.max_epochs is None:
            self.max_epochs = default_max_epochs(self.max_steps, self.callbacks)
        given, model = model, self._unwrapped(model)
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        if self._searched_only("fit", model, train_dataloaders, datamodule):
            return
        if self.run.launch_id is None:
            self.run.job_fit = job.next_fit()
        if self.run.placement.starts_ranks:
            self._in_ranks(
                "fit", given, train_dataloaders=train_dataloaders, val_dataloaders=val_dataloaders, datamodule=datamodule,
                ckpt_path=ckpt_path,
            )  # fmt: skip
            return
        run = self._begin("fit", model, datamodule)
        with contextlib.ExitStack() as held, called(run):
            if not run.config.fast_dev_run:
                run.group.ask_first(lambda: held.enter_context(only_writer(run.run_dir)))
            held.enter_context(watching(run.signals.terminate))
            fit(run, train_dataloaders, val_dataloaders, ckpt_path)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation loaders.

        Args:
            model: by default the module that was trained last, with its best weights if they were kept.
            dataloaders: a loader, several, or a `DataModule`.
            ckpt_path: load these weights first: "best", "last" or a path.
            verbose: print the results.
            datamodule: a `DataModule`.
            weights_only: see `fit`.

        Returns:
            One dict of metrics for each loader.
        """
        return self._judge("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test loaders; see `validate`."""
        return self._judge("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        output: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Run `predict_step` over the prediction loaders.

        Args:
            model: see `validate`.
            dataloaders: a loader, several, or a `DataModule`.
            datamodule: a `DataModule`.
            return_predictions: keep and return what `predict_step` returns. Default: unless `output` is given.
                The objects themselves are kept, as under Lightning: if `predict_step` fills a tensor that it uses again,
                return a copy (`.clone()`).
            ckpt_path: see `validate`.
            output: a directory: write the predictions as a Parquet table, batch by batch. `predict_step` then returns a
                tensor or a dict of tensors or lists, whose first dimension is the batch.
            weights_only: see `fit`.

        Returns:
            The predictions, a list for each loader (just the list when there is one); the `Table` when there is an
            `output` and they are not to be returned.
        """
        ckpt_path = self._take_over(ckpt_path)
        given, model = model, self._unwrapped(model)
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        if self._searched_only("predict", model, dataloaders, datamodule):
            return None
        keep, is_new = output is None if return_predictions is None else return_predictions, model is not None
        if self.run.placement.starts_ranks:
            return self._in_ranks(
                "predict", self.module if given is None else given, dataloaders=dataloaders, datamodule=datamodule,
                return_predictions=keep, ckpt_path=or_best(self.run, ckpt_path, is_new), output=output,
            )  # fmt: skip
        run = self._begin("predict", model if is_new else self.module, datamodule)
        with called(run):
            return predict(run, dataloaders, ckpt_path, is_new, keep, output)

    def _judge(
        self, stage: Stage, model: Any, dataloaders: Any, ckpt_path: str | Path | None, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        ckpt_path = self._take_over(ckpt_path)
        given, model = model, self._unwrapped(model)
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        if self._searched_only(stage, model, dataloaders, datamodule):
            return []
        is_new = model is not None
        if self.run.placement.starts_ranks:
            return self._in_ranks(
                stage, self.module if given is None else given, dataloaders=dataloaders, datamodule=datamodule,
                ckpt_path=or_best(self.run, ckpt_path, is_new), verbose=verbose,
            )  # fmt: skip
        run = self._begin(stage, model if is_new else self.module, datamodule)
        with contextlib.ExitStack() as held, called(run):
            results = judge(run, held, dataloaders, ckpt_path, is_new)
        if verbose:
            show(run, results)
        return results

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint of the run as it stands, and return when it is on the disk. All ranks call it.

        Args:
            filepath: a path or a URI.
            weights_only: leave out all that resuming needs.
            storage_options: Lightning's, for a plugin that writes; only None.

        Raises:
            ConfigError: options, which nothing here would read.
        """
        if storage_options is not None:
            raise ConfigError(
                f"save_checkpoint(storage_options={storage_options!r}): there is no plugin that would take them. Give the "
                "address as a URI (s3://…, gs://…); credentials come from the environment."
            )
        run = self.run
        self.write_checkpoint(run.group.from_first(self.for_all(to_place(filepath))), weights_only)
        wait_for_save(run)
        run.group.barrier()
        if not run.training_in_progress:
            run.writer.close()  # no call is running that would end its thread

    # A call's beginning

    def _take_over(self, ckpt_path: str | Path | None) -> Any:
        """Take over what the user has changed since the last call; returns the checkpoint to begin with."""
        take_changes(self)
        return take_ckpt_path(self, ckpt_path)

    def _unwrapped(self, model: Any) -> Any:
        return unwrapped(model, self.run.accelerator, self.run.parallel)

    def _searched_only(self, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
        """Run the searches that another library's callbacks ask for. Return True if the call should end after them."""
        return run_searches(self, method, self.module if model is None else model, loaders, datamodule)

    def _begin(self, stage: Stage, module: Any, datamodule: Any) -> Run:
        self.run = self.run.next(stage, module, datamodule)
        return self.run

    def _in_ranks(self, stage: Stage, module: Any, **arguments: Any) -> Any:
        """Make the call in processes of its own, one for each device."""
        from footplate.training.worker_calls import in_ranks

        return in_ranks(self, stage, module, **arguments)

    def show_callbacks(self, callbacks: list[Any]) -> None:
        """Set `callbacks`, and remember what it was set to, so that a user's changes are found."""
        self.callbacks, self.shown_callbacks, self.run.callbacks = list(callbacks), list(callbacks), list(callbacks)

    # For callbacks and modules

    def write_checkpoint(
        self, path: Place, weights_only: bool = False, then: Callable[[], None] = lambda: None
    ) -> None:
        """Copy the run's state and write it in the background; see `training/saving.py`. All ranks call it."""
        write_checkpoint(self.run, path, weights_only, then)

    def wait_for_save(self) -> None:
        """Wait until what was saved last is complete. All ranks call it.

        Raises:
            CheckpointError: it could not be written, on whichever rank.
        """
        wait_for_save(self.run)

    def replace_schedulers(self, configs: list[SchedulerConfig]) -> None:
        """Let other schedulers set the learning rates from here on, in checkpoints too."""
        self.run.replace_schedulers(configs)

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, only for what layers gather by themselves. At the end of
        training, on all ranks.
        """
        self.run.run_forward()

    def log_now(self, values: dict[str, float]) -> None:
        """Send host floats to the loggers with the next report: for callbacks that measure something themselves."""
        self.run.reports.log_now(values)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress display. Rich renderables are rendered."""
        self.run.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """`data` of every rank (tensors and numbers, of one shape, in any nesting), stacked in a new first dimension;
        with one process, `data` itself.
        """
        ranks = self.run.group
        if not ranks.is_distributed:
            return data
        return map_tensors(as_tensors(data, self.run.device), lambda tensor: ranks.stack(tensor, sync_grads))

    def for_all(self, place: Place) -> Place:
        """A place as the other ranks can use it, which may have another working directory."""
        return self.run.placement.for_all(place)

    def clock(self) -> float:
        """Monotonic seconds, the same on every rank: rank 0's when the ranks last agreed on anything, or met."""
        return self.run.agreement.now_s

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        """Itself: a copy of a module, or of what holds one, is still this trainer's."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a trainer is a process's own, and what travels to another is trained there by another."""
        return _no_trainer, ()


def _no_trainer() -> None:
    """What a trainer becomes in another process."""
