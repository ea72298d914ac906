"""The trainer: runs a module over batches, and writes down what comes of it.

    table → loader → batch → step (forward, backward, optimizer) → metrics → loggers, callbacks, checkpoints

Read from the top: what it is made of (`__init__`), what it is asked for (`fit`, `validate`, `test`, `predict`), and how
a run is put together (`_fit`). What is found and checked beforehand is in `training/prepare.py`, the loop itself in
`training/loop.py`, evaluation in `training/evaluation.py`, all that a checkpoint holds in `state.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from footplate import checkpoint, optim, rng
from footplate.callbacks import Callback, ModelSummary, ProgressBar
from footplate.callbacks.base import is_kind
from footplate.callbacks.everywhere import present
from footplate.checkpoint.shards import cut_out
from footplate.checkpoint.storage import Place, to_place
from footplate.checkpoint.storage.joint import abandon, begin
from footplate.checkpoint.writer import CheckpointWriter, Joint
from footplate.data.adapt import end_workers
from footplate.errors import CheckpointError, ConfigError
from footplate.hardware.legacy import modernise
from footplate.hardware.registry import get_accelerator
from footplate.hardware.transfer import as_tensors, make_transfer, map_tensors, to_device
from footplate.hooks import Hooks, overrides, turn
from footplate.hparams import hparams_to_log
from footplate.launch.worker import slot
from footplate.metric_states import states_of
from footplate.metrics import MetricLog
from footplate.parallel.agreement import Agreement
from footplate.parallel.alike import blind
from footplate.parallel.group import ALONE, join
from footplate.parallel.resharing import OWN, part_of
from footplate.parallel.strategies import check_strategy, make_strategy
from footplate.parallel.world import World
from footplate.signals import Signals
from footplate.state import Progress, RunState, describe
from footplate.step.base import Step, StepSpec
from footplate.step.compiled import unwrapped
from footplate.tracking.base import Logger, Status
from footplate.tracking.silent import Silent
from footplate.training import job
from footplate.training.ahead import between_any_two, rates_ahead
from footplate.training.alike import (
    check_data,
    check_model,
    check_optimizers,
    check_settings,
    read_alike,
    warn_of_own_disks,
)
from footplate.training.changes import take_callbacks_of_setup, take_changes, take_ckpt_path, warn_of_late_changes
from footplate.training.config import TrainerConfig, configured
from footplate.training.evaluation import by_loader, evaluate
from footplate.training.failing import moment_of, savable
from footplate.training.lock import check as check_writer
from footplate.training.lock import only_writer
from footplate.training.loop import TrainingLoop, save_before_end
from footplate.training.notice import watching
from footplate.training.prepare import (
    LOADERS,
    asks_hooks,
    attach,
    check_evaluated,
    check_nodes,
    choose_callbacks,
    choose_devices,
    choose_loggers,
    choose_precision,
    compat,
    default_max_epochs,
    evaluation_loaders,
    explain,
    find_checkpoint,
    named_checkpoint,
    no_data,
    read_checkpoint,
    record_with,
    refuse_arguments,
    replaces,
    share_rank,
    shown_path,
    split_datamodule,
    training_loader,
    translate_callbacks,
)
from footplate.training.profiling import make_profiler, profile_step, profiling, recorder
from footplate.training.reloading import check_same_ranks, making_loaders, resumed_epoch
from footplate.training.reports import Reports, finite
from footplate.training.settings import (
    as_list,
    check_fewest,
    check_replicas,
    check_sync_batchnorm,
    set_deterministic,
    validation_interval,
)
from footplate.training.status import RunStatus, TrainerFn, running
from footplate.training.view import View

log = logging.getLogger(__name__)

CPU = torch.device("cpu")

Stage = Literal["fit", "validate", "test", "predict"]
LoaderPair = tuple[Any, list[Any]]  # for training and, some, for validation


class Trainer(View):
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
        if not isinstance(config.strategy, str):
            config = replace(config, strategy=compat().strategy_name(config.strategy))
        self.config = config.with_dry_run()
        accelerator, devices, precision = modernise(
            config.accelerator, config.devices, None if config.precision is None else str(config.precision), config.gpus,
            config.tpu_cores, os.environ,
        )  # fmt: skip
        self.accelerator = get_accelerator(accelerator)
        self.precision = choose_precision(precision or "32-true", self.accelerator)
        self.accelerator.check_arguments(vars(config))
        self.world = World.from_environ()
        share_rank(self.world)
        self.device_ids = choose_devices(self.accelerator, devices, self.world)
        drives_all = self.accelerator.drives_all
        self.nodes = check_nodes(config.num_nodes, 1 if drives_all else len(self.device_ids), self.world)
        own = slot() if self.world.launched and not drives_all else 0
        self.device = self.accelerator.torch_device(self.device_ids[own])
        self.group = ALONE  # until there is work to do
        refused = {
            "compile": config.compile, "sync_batchnorm": config.sync_batchnorm, "min_devices": config.min_devices
        }  # fmt: skip
        check_replicas(check_strategy(config.strategy), self.world.size, self.nodes, refused)
        every_device = [self.accelerator.torch_device(index) for index in self.device_ids]
        ranks = 1 if drives_all else self.world.size  # that torch is to bring together
        self.parallel = make_strategy(config.strategy, ranks, every_device)
        self.profiler = make_profiler(config.profiler)
        self.sync_batchnorm = check_sync_batchnorm(config.sync_batchnorm, self.device, ranks)
        check_fewest(config.min_devices, self.ranks_asked)
        self.failed_in_step = False
        self.launch_id: str | None = None  # of the launch that this process is of, where the trainer started it
        self.job_fit: str | None = None  # of a job: which call of fit this is
        self.seed = rng.default_seed() if config.seed is None else config.seed
        directory = config.default_root_dir or job.directory()
        self.run_dir = Path(directory or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")).expanduser()
        set_deterministic(config.deterministic)
        if config.benchmark is not None:
            torch.backends.cudnn.benchmark = config.benchmark

        self.loggers: list[Any] = choose_loggers(config.logger)
        self.recorders: list[Logger] = record_with(self.loggers)  # the same, behind our contract
        if config.fast_dev_run or self.world.rank != 0:
            self.loggers = [Silent() for _ in self.loggers]
        self._recording = False  # since `recorders` were set up
        self.own_callbacks = choose_callbacks(config)
        self.show_callbacks(self.own_callbacks)

        self.module: Any = None
        self.datamodule: Any = None
        self.stage: Stage | None = None
        self.status: RunStatus = "initializing"
        self.sanity_checking = False
        self.training_in_progress = False
        self.should_stop = False
        self.progress = Progress()
        self.reports = Reports(self.recorders)
        self.ckpt_path: str | Path | None = None  # of the last call: what it loaded; or what the user has assigned
        self.shown_ckpt_path: str | None = None
        self.assigned_ckpt_path: str | Path | None = None
        self.resumed_from: Place | None = None  # named by the user: not to be deleted
        self.dataloaders: dict[str, Any] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step_optimizers: list[optim.StepOptimizer] = []
        self.lr_scheduler_configs: list[optim.SchedulerConfig] = []
        self._make_loaders: Callable[[], LoaderPair] | None = None  # until they are made
        self._found_loaders: LoaderPair | None = None
        self.num_training_batches = 0
        self.num_val_batches: list[float] = []
        self.num_test_batches: list[float] = []
        self.num_predict_batches: list[float] = []
        self.val_check_batches: float = math.inf
        self.hooks = Hooks(self, None, None, self.callbacks)
        self.metrics = self._training_metrics = MetricLog(torch.nn.Module(), by_step=True)
        self.step: Step
        self._state: RunState
        self._loop: TrainingLoop | None = None
        self._read_from: dict[str, list[Any]] = {}
        self.data_wait_s: float | None = None  # waited for training batches; counted where a callback has set it to 0
        self.signals = Signals()
        self.agreement = self._make_agreement()
        self._writer = CheckpointWriter()

    # What it is asked for

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
        take_changes(self)
        ckpt_path = take_ckpt_path(self, ckpt_path)
        if self.max_epochs is None:
            self.max_epochs = default_max_epochs(self.max_steps, self.callbacks)
        given, model = model, unwrapped(model, self.accelerator, self.parallel)
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        if self._searched_only("fit", model, train_dataloaders, datamodule):
            return
        if self.launch_id is None:
            self.job_fit = job.next_fit()
        if self.starts_ranks:
            from footplate.training.ranks import in_ranks

            in_ranks(
                self, "fit", given, train_dataloaders=train_dataloaders, val_dataloaders=val_dataloaders,
                datamodule=datamodule, ckpt_path=ckpt_path,
            )  # fmt: skip
            return
        with running(self), contextlib.ExitStack() as held, self._running("fit", model, datamodule):
            if not self.fast_dev_run:
                self.group.ask_first(lambda: held.enter_context(only_writer(self.run_dir)))
            held.enter_context(watching(self.signals.terminate))
            self._fit(train_dataloaders, val_dataloaders, ckpt_path)

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
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

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
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

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
        from footplate.training.predictions import PredictionWriter

        take_changes(self)
        ckpt_path = take_ckpt_path(self, ckpt_path)
        given, model = model, unwrapped(model, self.accelerator, self.parallel)
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        if self._searched_only("predict", model, dataloaders, datamodule):
            return None
        keep = output is None if return_predictions is None else return_predictions
        if self.starts_ranks:
            from footplate.training.ranks import in_ranks

            return in_ranks(
                self, "predict", self.module if given is None else given, dataloaders=dataloaders, datamodule=datamodule,
                return_predictions=keep, ckpt_path=self._or_best(ckpt_path, is_new=model is not None), output=output,
            )  # fmt: skip
        with running(self), self._running("predict", self.module if model is None else model, datamodule):
            loaders, limits = self._prepare_evaluation("predict", dataloaders, ckpt_path, is_new=model is not None)
            if not any(limits):  # a limit of 0 predicts nothing
                return []
            self.reports.forget()
            found: list[list[Any]] = [[] for _ in loaders]
            writer = None
            if output is not None:
                writer = PredictionWriter(self.group.from_first(self.for_all(Path(output))), self.group)

            def sink(prediction: Any, batch_idx: int, index: int) -> None:
                if keep:
                    found[index].append(prediction)
                if writer is not None:
                    writer.write(prediction)

            with contextlib.nullcontext() if writer is None else writer:
                evaluate(self, "predict", loaders, limits, sink)
        if keep:
            return found[0] if len(found) == 1 else found
        return None if writer is None else writer.table()

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
        self.write_checkpoint(self.group.from_first(self.for_all(to_place(filepath))), weights_only)
        self.wait_for_save()
        self.group.barrier()
        if not self.training_in_progress:
            self._writer.close()  # no call is running that would end its thread

    # How a run is put together

    def _fit(self, train_dataloaders: Any, val_dataloaders: Any, ckpt_path: str | Path | None) -> None:
        self.should_stop = False
        self._set_up("fit")
        if not self.fast_dev_run:
            warn_of_own_disks(self)
        found = self._find_checkpoint(ckpt_path)
        self.resumed_from = named_checkpoint(ckpt_path, found)
        loaded = None if found is None else read_alike(self, found, lambda path: read_checkpoint(self, path))
        place = None  # of the loader
        if loaded is not None:
            self.seed = loaded.get("seed", self.seed)
            loaded = part_of(loaded, self.world, self._metric_reductions)
            place = loaded["loader"] if {"global_batch_size", "parts"} & loaded.get("loader", {}).keys() else None

        self.parallel.check(self.module)
        self._prepare_state()
        make = functools.partial(self._prepare_loaders, train_dataloaders, val_dataloaders)
        self.num_training_batches = math.inf
        self._make_loaders = functools.partial(self._first_loaders, make, place, resumed_epoch(loaded))
        hooked = asks_hooks(self, train_dataloaders, val_dataloaders)
        if not hooked:  # what is wrong with loaders that are there already is known before anything begins
            self.ask_for_loaders()
        if loaded is not None:
            self._call_load_hooks(loaded)
        self._prepare_module()
        if loaded is not None:
            loaded = self.parallel.weight_parts(loaded, self.module)
            self._resume_module(loaded, str(found))
        self.optimizers, self.lr_scheduler_configs = optim.configure(self.module)
        check_optimizers(self)
        self._prepare_step(self._weight_now if self.world.size > 1 else None)
        self._state.step, self._state.optimizers = self.step, self.optimizers
        self._state.schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._recording = True
        for logger in self.recorders:
            logger.setup(self.run_dir, self._hparams())

        self.hooks.call("on_fit_start")
        loader, val_loaders = self.ask_for_loaders()
        self._found_loaders = None  # new ones may take their place
        self._check_loaders(loader, val_loaders)
        if loaded is not None:
            loaded = self.parallel.optimizer_parts(loaded, self.optimizers)
            self._resume_training(loaded, str(found))
        resumed, loaded = loaded is not None, None  # its tensors need not stay in memory while the run goes on
        loop = self._loop = TrainingLoop(self, loader, val_loaders)
        if hooked:
            loop.make_loaders = functools.partial(self._later_loaders, make)
        self.use_loader(loop.source)
        if not resumed:
            loop.sanity_check()
        if self.num_training_batches:
            self._train(loop)
        else:
            log.info("Nothing is trained, since limit_train_batches=0.")
        for logger in self.recorders:
            logger.log_model(self)
        self.hooks.call("on_fit_end")

    def _train(self, loop: TrainingLoop) -> None:
        self.training_in_progress = True
        self.metrics.by_step = False
        self.hooks.call("on_train_start")
        self.agreement.settle()
        record = recorder(self.profiler) or contextlib.nullcontext
        while not loop.finished():
            with record("run_training_epoch"):
                loop.epoch()
        save_before_end(self)  # before a callback puts averaged weights, say, in place
        self.step.lend()
        self.hooks.call("on_train_end")
        self.wait_for_save()
        self.group.barrier()  # from here on, every rank finds the checkpoints of rank 0

    def _evaluate(
        self, stage: Stage, model: Any, dataloaders: Any, ckpt_path: str | Path | None, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        take_changes(self)
        ckpt_path = take_ckpt_path(self, ckpt_path)
        given, model = model, unwrapped(model, self.accelerator, self.parallel)
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        if self._searched_only(stage, model, dataloaders, datamodule):
            return []
        if self.starts_ranks:
            from footplate.training.ranks import in_ranks

            return in_ranks(
                self, stage, self.module if given is None else given, dataloaders=dataloaders, datamodule=datamodule,
                ckpt_path=self._or_best(ckpt_path, is_new=model is not None), verbose=verbose,
            )  # fmt: skip
        subject = self.module if model is None else model
        with running(self), contextlib.ExitStack() as held, self._running(stage, subject, datamodule):
            loaders, limits = self._prepare_evaluation(stage, dataloaders, ckpt_path, is_new=model is not None)
            if not any(limits):  # a limit of 0 evaluates nothing
                return []
            self.reports.forget()
            self._append_to_records(held)
            values = evaluate(self, stage, loaders, limits)
            self.reports.publish(values)
            self.reports.send(self.progress.global_step, self.progress.epoch)
        results = by_loader(values, len(loaders))
        if verbose:
            for index, result in enumerate(results):
                where = f" (loader {index})" if len(results) > 1 else ""
                self.print(f"{stage}{where}: " + "  ".join(f"{name} {value:.6g}" for name, value in result.items()))
        return results

    @contextlib.contextmanager
    def _running(self, stage: Stage, model: Any, datamodule: Any) -> Iterator[None]:
        """Whatever happens inside: exceptions told to hooks, loggers closed, threads joined, errors made plain."""
        self.stage, self.module, self.datamodule = stage, model, datamodule
        attach(self, stage, model, datamodule)
        self.signals.forget()
        self._join()
        self.use_callbacks(self._all_callbacks())
        check_settings(self)
        status: Status = "failed"
        try:
            with torch.autograd.set_detect_anomaly(self.config.detect_anomaly), self.signals, profiling(self, stage):
                yield
            status = "success"
        except BaseException as error:
            status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            self.status = "interrupted"
            if self.group.several and hasattr(self, "step"):
                self.step.leave()
            if savable(self, error):
                self._save_before_failing(error)
            self.hooks.call("on_exception", error)
            plain = explain(error)
            if plain is not None:
                raise plain from error
            raise
        finally:
            self.training_in_progress = self.sanity_checking = False
            self._make_loaders = self._found_loaders = None
            for name in [*self._read_from]:
                self.read_from(name, [])
            apart = self.parallel.several or self.parallel.copies or self.accelerator.keeps_weights
            if apart and hasattr(self, "step"):
                self.step.release()
            if status != "success":
                self._writer.make_haste()
            with contextlib.nullcontext() if status == "success" else contextlib.suppress(CheckpointError):
                self._writer.close()
            for logger in self.recorders:
                logger.finalize(status)
            self._recording = False
            self.hooks.call("teardown", stage=TrainerFn(stage))
            warn_of_late_changes(self)

    def use_callbacks(self, callbacks: list[Any]) -> None:
        """Let a run have these callbacks."""
        self.show_callbacks(callbacks)
        for callback in callbacks:
            callback.log, callback.log_dict = self.module.log, self.module.log_dict
        before_looking = self._lend_weights if self.accelerator.keeps_weights else None
        self.hooks = Hooks(self, self.module, self.datamodule, callbacks, before_looking, recorder(self.profiler))

    def show_callbacks(self, callbacks: list[Any]) -> None:
        """Set `callbacks`, and remember what it was set to, so that a user's changes are found."""
        self.callbacks, self.shown_callbacks = list(callbacks), list(callbacks)

    def _append_to_records(self, held: contextlib.ExitStack) -> None:
        """Let the results of an evaluation be added to the run's record, unless another process writes it."""
        if all(isinstance(logger, Silent) for logger in self.recorders):
            return
        try:
            held.enter_context(only_writer(self.run_dir, patience_s=0.0))
        except ConfigError as error:
            log.warning("The results are not logged. %s", error)
            return
        self._recording = True
        for logger in self.recorders:
            logger.append(self.run_dir, self._hparams())

    def _all_callbacks(self) -> list[Any]:
        """The trainer's, those of `everywhere` and of the accelerator, and the module's, which replace those of the same
        type, and the usual ones; late ones last.
        """
        callbacks = [*self.own_callbacks, *present(), *self.accelerator.callbacks()]
        for callback in translate_callbacks(as_list(self.module.configure_callbacks())):
            callbacks = [one for one in callbacks if not replaces(callback, one)] + [callback]
        if self.world.rank != 0:
            callbacks = [one for one in callbacks if not isinstance(one, (ProgressBar, ModelSummary))]
        if not all(isinstance(one, Callback) for one in callbacks):
            callbacks = [one for one in callbacks if not compat().is_finder(one)]
        return sorted(callbacks, key=turn)

    def _searched_only(self, method: str, model: Any, loaders: Any, datamodule: Any) -> bool:
        """Make the searches that Lightning's callbacks ask for; whether nothing else is wanted."""
        if all(isinstance(one, Callback) for one in (*self.own_callbacks, *self.callbacks)):
            return False
        return compat().searched(self, method, self.module if model is None else model, loaders, datamodule)

    def _set_up(self, stage: Stage) -> None:
        if self.world.local_rank == 0:
            self.hooks.call("prepare_data")
        self.group.barrier()
        for hook in (*self.hooks.late("setup"), *self.hooks.get("setup")):
            hook(stage=TrainerFn(stage))
        take_callbacks_of_setup(self, stage)
        with self.precision.default_type():
            self.module.configure_model()

    def _prepare_loaders(
        self, train_dataloaders: Any, val_dataloaders: Any, place: dict[str, Any] | None
    ) -> tuple[Any, list[Any]]:
        loader, self.num_training_batches = training_loader(self, train_dataloaders, self.config.limit("fit"), place)
        val_loaders: list[Any] = []
        if overrides(self.module, "validation_step") and self.config.limit("validate") != 0:
            limit = self.overfit_batches or self.config.limit("validate")
            val_loaders, self.num_val_batches = evaluation_loaders(self, "validate", val_dataloaders, limit)
        self.has_validation = bool(val_loaders)
        self.val_check_batches = self.num_training_batches
        if val_loaders and self.num_training_batches:
            self.val_check_batches = validation_interval(
                self.val_check_interval, self.check_val_every_n_epoch, self.num_training_batches
            )
        return loader, val_loaders

    def _first_loaders(self, make: Callable[..., LoaderPair], place: dict[str, Any] | None, epoch: int) -> LoaderPair:
        with making_loaders(self, epoch):
            return make(place)

    def _later_loaders(self, make: Callable[..., LoaderPair]) -> LoaderPair:
        loader, val_loaders = make(None)
        self._check_loaders(loader, val_loaders)
        return loader, val_loaders

    def _check_loaders(self, loader: Any, val_loaders: list[Any]) -> None:
        """What all ranks check together of their loaders."""
        validated = list(zip(val_loaders, self.num_val_batches, strict=True)) if val_loaders else []
        check_data(self, {"training": [(loader, self.num_training_batches)], "validation": validated})
        check_same_ranks(self, loader)

    def ask_for_loaders(self) -> LoaderPair:
        """The loaders of a `fit`, made when they are asked for first. While they are made, a hook that asks for their
        lengths gets those of before.
        """
        make, self._make_loaders = self._make_loaders, None
        if make is not None:
            self._found_loaders = make()
            self._state.loader = self._found_loaders[0]
        assert self._found_loaders is not None
        return self._found_loaders

    def _prepare_evaluation(
        self, stage: Stage, dataloaders: Any, ckpt_path: str | Place | None, is_new: bool
    ) -> tuple[list[Any], list[float]]:
        self._set_up(stage)
        found = self._find_checkpoint(self._or_best(ckpt_path, is_new))
        check_evaluated(self, stage, dataloaders)
        state = None if found is None else read_alike(self, found, checkpoint.load)
        if state is not None:
            self._call_load_hooks(state)
        loaders, limits = evaluation_loaders(self, stage, dataloaders, self.config.limit(stage))
        if not loaders:
            raise no_data(stage)
        setattr(self, f"num_{LOADERS[stage]}_batches", limits)
        check_data(self, {stage: list(zip(loaders, limits, strict=True))})
        self._prepare_module()
        if state is not None:
            RunState(self.module, self.seed).load_module(self.parallel.weight_parts(state, self.module), str(found))
        self.optimizers = []
        self._prepare_step()
        return loaders, limits

    def _or_best(self, ckpt_path: str | Place | None, is_new: bool) -> str | Place | None:
        """`ckpt_path`, or the best checkpoint of the module that was trained last, if there is one."""
        if ckpt_path is None and not is_new:
            with contextlib.suppress(CheckpointError):
                return self._find_checkpoint("best")
        return ckpt_path

    def _find_checkpoint(self, ckpt_path: str | Place | None) -> Place | None:
        """The checkpoint that rank 0 finds, on every rank."""

        def find() -> tuple[Place | None, str | None]:
            found = find_checkpoint(self, ckpt_path)
            return (None, None) if found is None else (self.for_all(found), shown_path(ckpt_path, found))

        found, self.shown_ckpt_path = self.group.ask_first(find)
        self.ckpt_path = self.shown_ckpt_path
        return found

    def _prepare_module(self) -> None:
        check_model(self)
        self.precision.convert_module(self.module)
        self.module.to(self.device)
        if self.sync_batchnorm:
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.module)
        self.parallel.prepare(self.module)

    def _prepare_step(self, weight: Callable[[int], float] | None = None) -> None:
        spec = StepSpec(
            module=self.module,
            optimizers=self.optimizers,
            hooks=self.hooks,
            device=self.device,
            precision=self.precision,
            accumulate_grad_batches=self.accumulate_grad_batches,
            gradient_clip_val=self.gradient_clip_val,
            gradient_clip_algorithm=self.gradient_clip_algorithm,
            compile=self.config.compile_options,
            on_optimizer_step=self._count_step,
            strategy=self.parallel,
            group=self.group,
            weight=weight,
            device_ids=self.device_ids,
            iterations_per_loop=self._steps_per_call(),
            sync_batchnorm=self.config.sync_batchnorm and self.accelerator.drives_all,
            sharded=self.config.strategy == "fsdp" and self.accelerator.drives_all,
            record=self._record,
            rates_ahead=functools.partial(rates_ahead, self),
        )
        self.step = self.accelerator.make_step(spec)
        profile = recorder(self.profiler)
        if profile is not None:
            profile_step(self, profile)
        self.step_optimizers = [optim.StepOptimizer(one, self.step.optimizer_step) for one in self.optimizers]

    def _join(self) -> None:
        """Meet the other ranks, the first time; from then on seed and directory are those of rank 0."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # so that "cuda" in a user's code is the device of this process
        if self.world.size > 1:
            if not self.group.several:
                self.group = join(self.world, self.accelerator.process_group_backend, self.device)
                self.seed = self.group.from_first(self.seed)
                self.run_dir = Path(self.group.from_first(self.for_all(self.run_dir)))
            self.agreement = self._make_agreement()
            self.agreement.settle()  # so that there is one clock before any callback asks for it

    def _make_agreement(self) -> Agreement:
        return Agreement(self.group, self.signals, lambda: self.should_stop)

    def _metric_reductions(self, path: str) -> dict[str, Any]:
        return self.module.get_submodule(path)._reductions

    def _steps_per_call(self) -> int:
        """`iterations_per_loop`, or one where something must happen between any two steps."""
        steps = self.config.iterations_per_loop
        if steps == 1 or self.stage != "fit":
            return steps
        reasons = self.group.gather(between_any_two(self))  # a callback that one rank alone has counts for all
        reason = next((one for one in reasons if one is not None), None)
        if reason is None:
            return steps
        log.warning("iterations_per_loop=%d: one step at a time, since %s.", steps, reason)
        return 1

    def _record(self, batch: Any, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Log what a step has computed of a batch, as if the module did it now."""
        self.metrics.batch = batch
        self.module.log(name, value, **options)

    def replace_schedulers(self, configs: list[optim.SchedulerConfig]) -> None:
        """Let other schedulers set the learning rates from here on, in checkpoints too."""
        self.lr_scheduler_configs = configs
        self._state.schedulers = [config.scheduler for config in configs]

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, only for what layers gather by themselves. At the end of
        training, on all ranks.
        """
        assert self._loop is not None
        self._loop.run_forward()

    def read_from(self, name: str, loaders: list[Any]) -> None:
        """Remember what this call reads from, so that no worker process outlives it; end those of replaced loaders.

        Args:
            name: "train", "val", "test" or "predict".
            loaders: adapted.
        """
        for replaced in self._read_from.get(name, []):
            end_workers(replaced)
        self._read_from[name] = loaders

    def use_loader(self, loader: Any) -> None:
        """Let checkpoints say where this loader is."""
        self._state.loader = loader

    def keep_collected(self) -> None:
        """Let checkpoints say what torchmetrics objects hold now, whatever hooks at the end of an epoch reset."""
        self._state.collected = states_of(self.module)

    def _weight_now(self, batch: int) -> float:
        weight = None if self._loop is None else self._loop.weight
        return 1.0 if weight is None else weight(batch)

    def _lend_weights(self) -> None:
        if hasattr(self, "step"):
            self.step.lend()

    def _count_step(self) -> None:
        self.progress.global_step += 1

    # Checkpoints

    def _prepare_state(self) -> None:
        """A fresh state; optimizers, step and loader come into it when there are some."""
        self.progress = Progress()
        self.failed_in_step = False
        self.reports = Reports(self.recorders)
        self.metrics = self._training_metrics = MetricLog(self.module, by_step=True, group=self.group)
        self._state = RunState(
            module=self.module,
            seed=self.seed,
            progress=self.progress,
            metrics=self.metrics,
            callbacks=self.callbacks,
            loggers=self.recorders,
            datamodule=self.datamodule,
            callback_metrics=self.reports.callback,
        )

    def _call_load_hooks(self, loaded: dict[str, Any]) -> None:
        """The beginning of resuming: hooks that may still build layers, which then are moved and optimised as all are."""
        for owner in (self.datamodule, self.module):
            if owner is not None and overrides(owner, "on_load_checkpoint"):
                owner.on_load_checkpoint(loaded)

    def _resume_module(self, loaded: dict[str, Any], source: str) -> None:
        """The middle of resuming, in Lightning's order: weights, then callbacks, which may change them."""
        self._state.load_module(loaded, source)
        for callback in self.callbacks:
            if overrides(callback, "on_load_checkpoint"):
                callback.on_load_checkpoint(self, self.module, loaded)
        self._state.load_callbacks(loaded)
        self._state.load_loggers(loaded)

    def _resume_training(self, loaded: dict[str, Any], source: str) -> None:
        """The end of resuming, after `on_fit_start`, where callbacks may still add parameter groups."""
        self._state.load_training(loaded, source)
        if "rng" in loaded:
            rng.restore(loaded["rng"], self.device)
        self.print(f"Continuing from {source} (epoch {self.progress.epoch + 1}, step {self.progress.global_step}).")
        if loaded["footplate"].get("failed_in_step"):
            self.print(
                "It was saved when a step had failed: what that forward pass changed, such as the running statistics of "
                "batch norm or the state of a torchmetrics object, is in it."
            )

    def write_checkpoint(
        self, path: Place, weights_only: bool = False, then: Callable[[], None] = lambda: None
    ) -> None:
        """Copy the run state and write it in the background; `then()` is called once it is complete.

        All ranks call it, since a state holds something of each. Rank 0 writes; of a sharded model, each rank writes what
        it has, onto a disk that they share. Into an object store rank 0 writes it whole.

        Raises:
            CheckpointError: the save before this one failed.
        """
        if self.group.several:
            self.wait_for_save()
        if self._make_loaders is not None and not weights_only:
            self.ask_for_loaders()  # since where the loader is belongs to the state
        state = self._state.state_dict(weights_only)
        shared = path if self.parallel.sharded and isinstance(path, Path) else None  # the disk that all ranks write to
        if shared is None:
            state = self.parallel.whole(state)
        if self.group.several and not weights_only:
            own = {name: state[name] for name in OWN if name != "step" or self.parallel.own_gradients}
            state["ranks"] = self.group.gather_to_first(to_device(own, CPU))
        if not weights_only:
            self.hooks.call("on_save_checkpoint", state)
        else:
            for callback in self.callbacks:
                if isinstance(callback, Callback):
                    state["state_dict"] = callback.weights_to_save(state["state_dict"])
            if overrides(self.module, "on_save_checkpoint"):
                self.module.on_save_checkpoint(state)
        joint = None
        if shared is not None:
            state, parts = cut_out(state)
            token = self.group.ask_first(lambda: begin(shared))
            joint = Joint(shared, token, self.world.rank, self.world.size, parts)
            without = blind(self.group, joint.directory)
            if without:
                self.group.ask_first(lambda: abandon(shared, token))
                raise CheckpointError(
                    f"The checkpoint {shared} could not be written: {without} can't see its directory, which all ranks of "
                    "a sharded model write into. Set default_root_dir to a disk that all machines share, or "
                    'ModelCheckpoint(dirpath="s3://…").'
                )
            self._writer.save_part(joint)
        if self.world.rank != 0:
            return
        state["footplate"]["failed_in_step"] = self.failed_in_step
        meta = {**describe(state, self.progress), "metrics": finite(self.reports.callback), "launch": self.launch_id}
        meta["job_fit"] = self.job_fit
        if joint is None:
            self._writer.save(state, path, meta, then, first=self._before_write)
        else:
            self._writer.complete(joint, state, meta, then, first=self._before_write)

    def wait_for_save(self) -> None:
        """Until what was saved last is complete. All ranks call it.

        Of a sharded model, they first tell each other whether their parts are written, so that none waits for the part of
        one that has died, or whose disk is full.

        Raises:
            CheckpointError: it could not be written, on whichever rank.
        """
        if self.parallel.sharded:
            faults = [fault for fault in self.group.gather(self._writer.part_fault()) if fault]
            if faults:
                self._writer.make_haste()
                raise CheckpointError(faults[0])
        self.group.ask_each(self._writer.wait)

    def _before_write(self) -> None:
        """In the writing thread: refuse to write beside a later attempt, then write what the loggers still have."""
        check_writer(self.run_dir)
        for logger in self.recorders:
            logger.flush()

    def end_on_signal(self) -> None:
        """Save and end, between two steps, because a signal came."""
        if self.training_in_progress:
            said = save_before_end(self)
            self.wait_for_save()
            self.group.barrier()  # all ranks end together, so that none is taken for lost while another saves
            self.print(f"{self.signals.reason} after step {self.global_step}: {said}")
        raise self.signals.end()

    def _save_before_failing(self, error: BaseException) -> None:
        self.failed_in_step = moment_of(error) != "between steps"
        self._training_metrics.take_back()
        try:
            said = save_before_end(self, failing=True)
            self._writer.wait()
        except Exception as failure:  # the first one is what the user is to see
            log.warning("The run could not be saved as it was when it failed: %s", failure)
        else:
            self.print(f"{type(error).__name__} after step {self.global_step}: {said}")

    # What the loop, the module and callbacks ask of it

    @contextlib.contextmanager
    def logging_to(self, metrics: MetricLog) -> Iterator[None]:
        """Let `self.log` of the module go to these metrics for a while."""
        before, self.metrics = self.metrics, metrics
        try:
            yield
        finally:
            self.metrics = before

    @property
    def checkpoint_dir(self) -> Place:
        """Where checkpoints go whose saver doesn't say."""
        return job.checkpoints(self.run_dir)

    @property
    def ranks_meant(self) -> int:
        """How many ranks the run was asked for; some of them may have been given up."""
        return self.world.size if self.launch_id is None else self.ranks_asked

    @property
    def ranks_asked(self) -> int:
        """How many processes `num_nodes` and `devices` stand for."""
        return self.nodes * (1 if self.accelerator.drives_all else len(self.device_ids))

    @property
    def starts_ranks(self) -> bool:
        """Whether a call is made in processes that this one starts and looks after."""
        return self.ranks_asked > 1 and not self.world.launched and not self.parallel.copies

    def for_all(self, place: Place) -> Place:
        """A place as it can be told to the other ranks, which may have another working directory."""
        return place.absolute() if self.group.several and isinstance(place, Path) else place

    def log_now(self, values: dict[str, float]) -> None:
        """Send host floats to the loggers with the next report: for callbacks that measure something themselves."""
        self.reports.log_now(values)

    def transfer(self, moved: bool = False) -> Callable[[Any, int], Any] | None:
        """The function that brings a batch to the device, or does what is left to do with one that has been `moved`; None
        where that is nothing.
        """
        return make_transfer(self.module, self.datamodule, self.device, moved)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress display. Rich renderables are rendered."""
        if self.world.rank != 0:
            return
        for callback in self.callbacks:
            if is_kind(callback, ProgressBar):
                callback.print(*args, **kwargs)
                return
        log.info(" ".join(map(str, args)))

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """`data` of every rank (tensors and numbers, of one shape, in any nesting), stacked in a new first dimension;
        with one process, `data` itself.
        """
        if not self.group.several:
            return data
        return map_tensors(as_tensors(data, self.device), lambda tensor: self.group.stack(tensor, sync_grads))

    def clock(self) -> float:
        """Monotonic seconds, the same on every rank: rank 0's when the ranks last agreed on anything, or met."""
        return self.agreement.now_s

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        """Itself: a copy of a module, or of what holds one, is still this trainer's."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a trainer is a process's own, and what travels to another is trained there by another."""
        return _no_trainer, ()

    def __getattr__(self, name: str) -> Any:
        """Names that Lightning's trainer has and ours gives otherwise."""
        return compat().trainer_attribute(self, name)

    def _hparams(self) -> dict[str, Any]:
        settings = {
            "accelerator": self.accelerator.name,
            "precision": self.precision.name,
            "max_epochs": self.max_epochs,
            "max_steps": self.max_steps,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "gradient_clip_val": self.gradient_clip_val,
            "seed": self.seed,
        }
        saved = hparams_to_log(self.module, self.datamodule)
        return {**saved, **{f"trainer/{name}": value for name, value in settings.items()}}


def _no_trainer() -> None:
    """What a trainer becomes in another process."""
