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
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from footplate import checkpoint, optim, rng
from footplate.callbacks import Callback, ModelSummary, ProgressBar
from footplate.callbacks.base import is_kind
from footplate.callbacks.everywhere import present
from footplate.callbacks.timer import Duration
from footplate.checkpoint.shards import cut_out
from footplate.checkpoint.storage import Place, to_place
from footplate.checkpoint.storage.joint import abandon, begin
from footplate.checkpoint.writer import CheckpointWriter, Joint
from footplate.data.adapt import end_workers
from footplate.errors import CheckpointError, ConfigError
from footplate.hardware.base import Accelerator, Devices
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
from footplate.training.environment import with_environment
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
    shown_path,
    split_datamodule,
    training_loader,
    translate_callbacks,
)
from footplate.training.profiling import make_profiler, profile_step, profiling, recorder
from footplate.training.reloading import check_same_ranks, making_loaders, resumed_epoch
from footplate.training.reports import Reports, finite
from footplate.training.settings import (
    Limit,
    as_list,
    check_clipping,
    check_compile,
    check_count,
    check_fewest,
    check_flag,
    check_limit,
    check_replicas,
    check_seconds,
    check_sync_batchnorm,
    local_directory,
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

    Args:
        accelerator: "auto", "cpu", "cuda" (or "gpu"), "mps", "tpu", "torch_tpu", "xla", a name that an installed package
            adds, or an `Accelerator`.
        devices: "auto" (one, in this version), a count, a list of indices, or text such as "0,2". In processes that were
            started by torchrun or the like, each takes one.
        num_nodes: machines with so many devices each. More than one needs a cluster that this process is connected to (Ray,
            Spark), whose engine chooses the machines; in processes that were started already it must fit their number.
        strategy: how several processes train one model: "auto" or "ddp" (each has all of it), "fsdp" (each has a part),
            "ddp_find_unused_parameters_true"; or "replicas": one process, with a thread for each device.
        precision: "32-true" (default), "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true".
        logger: a logger or several; True (default) for `CSV`; False for none.
        callbacks: a callback or several.
        fast_dev_run: run so many batches (True: one) of every loader, without saving or logging: does it work at all?
        max_epochs: stop after so many epochs; -1 for no limit. Default: 1000 when nothing else limits the run.
        min_epochs: don't stop early before.
        max_steps: stop after so many optimizer steps; -1 for no limit.
        min_steps: don't stop early before.
        max_time: stop after so much time: "DD:HH:MM:SS", a timedelta or a dict of its arguments.
        limit_train_batches: a number of batches, or a part of them as a float; the same for the other three.
        limit_val_batches: see above.
        limit_test_batches: see above.
        limit_predict_batches: see above.
        overfit_batches: train and validate on so many batches (or such a part), the same ones, unshuffled.
        val_check_interval: validate after so many batches, such a part of an epoch (default: once an epoch), or so much
            time: "DD:HH:MM:SS", "HH:MM:SS", a timedelta or a dict of its arguments.
        check_val_every_n_epoch: only in every so many-th epoch; None counts `val_check_interval` over epochs.
        num_sanity_val_steps: validation batches tried before training; -1 for all.
        log_every_n_steps: how often metrics are read from the device and reported.
        enable_checkpointing: without a `ModelCheckpoint` of your own, save after each epoch or validation.
        enable_progress_bar: show progress.
        enable_model_summary: show the layers before training.
        accumulate_grad_batches: batches whose gradients are summed before an optimizer step.
        gradient_clip_val: clip gradients to this norm, or value.
        gradient_clip_algorithm: "norm" (default) or "value".
        deterministic: only deterministic algorithms; "warn" to be told of the others.
        benchmark: let cuDNN try algorithms for the shapes at hand.
        sync_batchnorm: let batch norm see the batches of all processes.
        use_distributed_sampler: share the rows of a torch DataLoader out among the processes. False uses its sampler as it
            is, in each process.
        reload_dataloaders_every_n_epochs: ask the module or data module for its loaders again at the beginning of every so
            many-th epoch; 0 never does.
        profiler: "simple", "advanced", "pytorch" or "xla", for Lightning's profiler of that name, or a profiler object.
        max_restarts: with several devices: how often processes that failed are started again, to continue from the newest
            checkpoint.
        max_host_restarts: likewise, when a machine was lost, or what starts processes on it.
        min_devices: with several devices: go on with fewer, but no fewer than this, when one fails for good; None to
            keep all. Global batches stay what they were.
        heartbeat_timeout: with several devices: seconds of silence after which a process counts as frozen.
        inference_mode: `validate`, `test` and `predict` run under `torch.inference_mode` rather than `torch.no_grad`.
            Validation inside `fit` always runs under `torch.no_grad`.
        detect_anomaly: find the operation that made a NaN in the backward pass (slow).
        compile: compile the layers with `torch.compile`; a dict gives its options.
        iterations_per_loop: with accelerator "xla" or "tpu": how many steps a call of the compiled program makes, where
            nothing is due between them. Hooks that every step has are called after the call.
        seed: of all randomness; the one of `seed_everything`, or a fresh one that checkpoints remember.
        default_root_dir: the run's directory, on this machine: checkpoints, metrics, logs. Default: a new one in `runs/`;
            in a job, the job's.
        gpus: the older spelling of `accelerator="cuda", devices=…`.
        tpu_cores: the older spelling of `accelerator="tpu", devices=…`.
        **others: Lightning's other arguments, which are refused with a word on what to do instead.

    Attributes:
        module: the module that is run, or was run last.
        should_stop: set it to end training after the present step.

    Raises:
        ConfigError: an argument that can't be used, by name, with what to write instead.
    """

    @with_environment
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        strategy: str = "auto",
        precision: str | int | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | Duration | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        sync_batchnorm: bool = False,
        use_distributed_sampler: bool = True,
        reload_dataloaders_every_n_epochs: int = 0,
        profiler: Any = None,
        max_restarts: int = 3,
        max_host_restarts: int = 10,
        min_devices: int | None = None,
        heartbeat_timeout: float = 30.0,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        compile: bool | dict[str, Any] = False,
        iterations_per_loop: int = 1,
        seed: int | None = None,
        default_root_dir: str | Path | None = None,
        gpus: int | str | list[int] | None = None,
        tpu_cores: int | str | list[int] | None = None,
        **others: Any,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name not in ("self", "others")} | others
        if others:
            refuse_arguments(others)
        if not isinstance(strategy, str):
            strategy = self.given["strategy"] = compat().strategy_name(strategy)
        accelerator, devices, given_precision = modernise(
            accelerator, devices, None if precision is None else str(precision), gpus, tpu_cores, os.environ
        )
        self.accelerator = get_accelerator(accelerator)
        self.precision = choose_precision(given_precision or "32-true", self.accelerator)
        self.iterations_per_loop = check_count("iterations_per_loop", iterations_per_loop, 1)
        self.accelerator.check_arguments(self.given)
        self.world = World.from_environ()
        self.device_ids = choose_devices(self.accelerator, devices, self.world)
        drives_all = self.accelerator.drives_all
        self.nodes = check_nodes(num_nodes, 1 if drives_all else len(self.device_ids), self.world)
        own = slot() if self.world.launched and not drives_all else 0
        self.device = self.accelerator.torch_device(self.device_ids[own])
        self.group = ALONE  # until there is work to do
        refused = {"compile": compile, "sync_batchnorm": sync_batchnorm, "min_devices": min_devices}
        check_replicas(check_strategy(strategy), self.world.size, self.nodes, refused)
        every_device = [self.accelerator.torch_device(index) for index in self.device_ids]
        ranks = 1 if drives_all else self.world.size  # that torch is to bring together
        self.parallel = make_strategy(strategy, ranks, every_device)
        self.reload_dataloaders_every_n_epochs = check_count(
            "reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, 0
        )
        self.profiler = make_profiler(profiler)
        self.use_distributed_sampler = check_flag("use_distributed_sampler", use_distributed_sampler)
        self.sync_batchnorm = check_sync_batchnorm(sync_batchnorm, self.device, ranks)
        self._syncs_statistics = sync_batchnorm and drives_all
        self._shards = strategy == "fsdp" and drives_all

        dry_batches = int(check_count("fast_dev_run", int(fast_dev_run), 0))
        self.fast_dev_run: int | bool = dry_batches if dry_batches > 1 else bool(dry_batches)
        self.max_epochs = check_count("max_epochs", max_epochs, -1, none=True)
        self.max_steps = check_count("max_steps", max_steps, -1)
        self.min_epochs = check_count("min_epochs", min_epochs, 0, none=True)
        self.min_steps = check_count("min_steps", min_steps, 0, none=True)
        self._limits: dict[str, Limit] = {
            "fit": check_limit("limit_train_batches", limit_train_batches),
            "validate": check_limit("limit_val_batches", limit_val_batches),
            "test": check_limit("limit_test_batches", limit_test_batches),
            "predict": check_limit("limit_predict_batches", limit_predict_batches),
        }
        self.overfit_batches = check_limit("overfit_batches", overfit_batches) or 0
        self.val_check_interval = val_check_interval
        self.check_val_every_n_epoch = check_count("check_val_every_n_epoch", check_val_every_n_epoch, 1, none=True)
        validation_interval(val_check_interval, None, 1 << 62)
        check_count("num_sanity_val_steps", num_sanity_val_steps, -1)
        self.num_sanity_val_steps: float = math.inf if num_sanity_val_steps == -1 else num_sanity_val_steps
        self.log_every_n_steps = check_count("log_every_n_steps", log_every_n_steps, 1)
        self.accumulate_grad_batches = check_count("accumulate_grad_batches", accumulate_grad_batches, 1)
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = check_clipping(gradient_clip_val, gradient_clip_algorithm)
        self.max_restarts = check_count("max_restarts", max_restarts, 0)
        self.max_host_restarts = check_count("max_host_restarts", max_host_restarts, 0)
        self.min_devices = check_fewest(min_devices, self.ranks_asked)
        self.heartbeat_timeout = check_seconds("heartbeat_timeout", heartbeat_timeout)
        self.failed_in_step = False
        self.launch_id: str | None = None  # of the launch that this process is of, where the trainer started it
        self.job_fit: str | None = None  # of a job: which call of fit this is
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        self.compile = check_compile(compile)
        self.seed = rng.default_seed() if seed is None else check_count("seed", seed, 0)
        self.run_dir = local_directory(
            default_root_dir or job.directory() or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        )

        if self.fast_dev_run:
            self.max_steps, self.max_epochs, self.num_sanity_val_steps = dry_batches, 1, 0
            self._limits = dict.fromkeys(self._limits, dry_batches)
            self.val_check_interval, self.check_val_every_n_epoch = None, 1
        set_deterministic(deterministic)
        if benchmark is not None:
            torch.backends.cudnn.benchmark = benchmark

        self.loggers: list[Any] = choose_loggers(logger)
        self.recorders: list[Logger] = record_with(self.loggers)  # the same, behind our contract
        if self.fast_dev_run or self.world.rank != 0:
            self.loggers = [Silent() for _ in self.loggers]
        self._recording = False  # since `recorders` were set up
        self.own_callbacks = choose_callbacks(
            as_list(callbacks), max_time, enable_checkpointing, enable_progress_bar,
            enable_model_summary, bool(self.fast_dev_run),
        )  # fmt: skip
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
            with torch.autograd.set_detect_anomaly(self.detect_anomaly), self.signals, profiling(self, stage):
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
        loader, self.num_training_batches = training_loader(self, train_dataloaders, self._limits["fit"], place)
        val_loaders: list[Any] = []
        if overrides(self.module, "validation_step") and self._limits["validate"] != 0:
            limit = self.overfit_batches or self._limits["validate"]
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
        loaders, limits = evaluation_loaders(self, stage, dataloaders, self._limits[stage])
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
            compile=self.compile,
            on_optimizer_step=self._count_step,
            strategy=self.parallel,
            group=self.group,
            weight=weight,
            device_ids=self.device_ids,
            iterations_per_loop=self._steps_per_call(),
            sync_batchnorm=self._syncs_statistics,
            sharded=self._shards,
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
        if self.iterations_per_loop == 1 or self.stage != "fit":
            return self.iterations_per_loop
        reasons = self.group.gather(between_any_two(self))  # a callback that one rank alone has counts for all
        reason = next((one for one in reasons if one is not None), None)
        if reason is None:
            return self.iterations_per_loop
        log.warning("iterations_per_loop=%d: one step at a time, since %s.", self.iterations_per_loop, reason)
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
