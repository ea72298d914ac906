"""The trainer: runs a module over batches, and writes down what comes of it.

Read from the top: what it is made of (`__init__`), what it is asked for (`fit`, `validate`, `test`, `predict`), how one
run is put together (`_fit`), the loop (`_train_epoch`), and what happens between two steps (`_between_steps`).

    table → loader → batch → step (forward, backward, optimizer) → metrics → loggers, callbacks, checkpoints

The loop's rule: nothing in it reads from the device. Metrics are read every `log_every_n_steps`; the progress display is
bound to time; hooks were looked up once (`hooks.py`). The order of what happens between two steps is the order in which
it can be resumed: first what changes the state (schedulers, callbacks), then what reports it, last what saves it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from footplate import checkpoint, optim, rng
from footplate.callbacks import Callback, EarlyStopping, ModelCheckpoint, ModelSummary, ProgressBar, Timer
from footplate.callbacks.timer import Duration
from footplate.data.adapt import adapt
from footplate.errors import CheckpointError, ConfigError, DataError, did_you_mean
from footplate.evaluation import evaluate
from footplate.hardware.base import Accelerator, Devices
from footplate.hardware.legacy import modernise
from footplate.hardware.registry import get_accelerator
from footplate.hooks import Hooks, overrides
from footplate.metrics import EpochValues, MetricLog, to_floats
from footplate.module import Module
from footplate.parallel.world import World
from footplate.settings import (
    Limit,
    as_list,
    check_count,
    check_limit,
    count_batches,
    limit_batches,
    validation_interval,
)
from footplate.signals import Signals
from footplate.state import Progress, RunState
from footplate.step.base import Step, StepSpec
from footplate.step.precision import Precision
from footplate.tracking.base import Logger, Status

log = logging.getLogger(__name__)

Stage = Literal["fit", "validate", "test", "predict"]


class Trainer:
    """Trains a `Module` (or a `LightningModule`), evaluates it, and predicts with it.

    Args:
        accelerator: "auto", "cpu", "cuda" (or "gpu"), "mps", a name that an installed package adds, or an `Accelerator`.
        devices: "auto", a count, a list of indices, or text such as "0,2".
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
        overfit_batches: train and validate on so many training batches (or such a part), unshuffled.
        val_check_interval: validate after so many batches, or such a part of an epoch (default: once an epoch).
        check_val_every_n_epoch: only in every so many-th epoch; None counts `val_check_interval` over epochs.
        num_sanity_val_steps: validation batches tried before training; -1 for all.
        log_every_n_steps: how often metrics are read from the device and reported.
        enable_checkpointing: without a `ModelCheckpoint` of your own, save after each validation or epoch.
        enable_progress_bar: show progress.
        enable_model_summary: show the layers before training.
        accumulate_grad_batches: batches whose gradients are summed before an optimizer step.
        gradient_clip_val: clip gradients to this norm, or value.
        gradient_clip_algorithm: "norm" (default) or "value".
        deterministic: only deterministic algorithms; "warn" to be told of the others.
        benchmark: let cuDNN try algorithms for the shapes at hand.
        inference_mode: evaluate under `torch.inference_mode` rather than `torch.no_grad`.
        detect_anomaly: find the operation that made a NaN in the backward pass (slow).
        compile: compile the layers with `torch.compile`; a dict gives its options.
        seed: of all randomness; the one of `seed_everything`, or a fresh one that checkpoints remember.
        default_root_dir: the run's directory: checkpoints, metrics, logs. A new one under `runs/` by default.
        gpus: the older spelling of `accelerator="cuda", devices=…`.
        tpu_cores: the older spelling of `accelerator="tpu", devices=…`.

    Attributes:
        module: the module that is run, or was run last.
        callback_metrics: the latest value of every metric, by name, as tensors.
        should_stop: set it to end training after the present step.

    Raises:
        ConfigError: an argument that can't be used, by name, with what to write instead.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        devices: Devices = "auto",
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
        val_check_interval: int | float | None = None,
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
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        compile: bool | dict[str, Any] = False,
        seed: int | None = None,
        default_root_dir: str | Path | None = None,
        gpus: int | str | list[int] | None = None,
        tpu_cores: int | str | list[int] | None = None,
    ) -> None:
        accelerator, devices, given_precision = modernise(
            accelerator, devices, None if precision is None else str(precision), gpus, tpu_cores, os.environ
        )
        self.precision = Precision.parse(given_precision or "32-true")
        self.accelerator = get_accelerator(accelerator)
        self.accelerator.check_precision(self.precision.name)
        self.device_ids = self.accelerator.parse_devices(devices)
        self.world = World.from_environ()
        if len(self.device_ids) > 1 or self.world.size > 1:
            raise ConfigError(
                f"devices={len(self.device_ids)}, WORLD_SIZE={self.world.size}: this version trains on one device in one "
                "process. Use devices=1."
            )
        self.device = self.accelerator.torch_device(self.device_ids[0])

        self.fast_dev_run = int(check_count("fast_dev_run", int(fast_dev_run), 0))
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
        self.num_sanity_val_steps = check_count("num_sanity_val_steps", num_sanity_val_steps, -1)
        self.log_every_n_steps = check_count("log_every_n_steps", log_every_n_steps, 1)
        self.accumulate_grad_batches = check_count("accumulate_grad_batches", accumulate_grad_batches, 1)
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm or "norm"
        if self.gradient_clip_algorithm not in ("norm", "value"):
            raise ConfigError(f'gradient_clip_algorithm="{gradient_clip_algorithm}": expected "norm" or "value".')
        if gradient_clip_val is not None and (isinstance(gradient_clip_val, bool) or gradient_clip_val < 0):
            raise ConfigError(f"gradient_clip_val={gradient_clip_val!r}: expected a number of at least 0.")
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        self.compile = {} if compile is True else compile if isinstance(compile, dict) else None
        self.seed = rng.default_seed() if seed is None else check_count("seed", seed, 0)
        self.run_dir = Path(default_root_dir or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S"))

        if self.fast_dev_run:
            self.max_steps, self.max_epochs, self.num_sanity_val_steps = self.fast_dev_run, 1, 0
            self._limits = dict.fromkeys(self._limits, self.fast_dev_run)
            self.val_check_interval, self.check_val_every_n_epoch = None, 1
        elif self.max_epochs is None and self.max_steps == -1 and max_time is None:
            warnings.warn(
                "Nothing limits this run: max_epochs=1000 is assumed. Say max_epochs=-1 for no limit.", stacklevel=2
            )
            self.max_epochs = 1000
        if deterministic is not None:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if benchmark is not None:
            torch.backends.cudnn.benchmark = benchmark

        self.loggers = self._choose_loggers(logger)
        self.callbacks = self._choose_callbacks(
            as_list(callbacks), max_time, enable_checkpointing, enable_progress_bar, enable_model_summary
        )
        self._given_callbacks = list(self.callbacks)

        self.module: Any = None
        self.datamodule: Any = None
        self.stage: Stage | None = None
        self.sanity_checking = False
        self.training_in_progress = False
        self.should_stop = False
        self.not_finite: tuple[str, int] | None = None
        self.progress = Progress()
        self.logged_metrics: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.num_training_batches: float = 0
        self.num_val_batches: list[float] = []
        self.num_test_batches: list[float] = []
        self.num_predict_batches: list[float] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[optim.SchedulerConfig] = []
        self.step_optimizers: list[optim.StepOptimizer] = []
        self.metrics: MetricLog
        self.hooks: Hooks
        self.step: Step
        self._state: RunState
        self._callback_metrics: dict[str, float] = {}
        self._row: dict[str, float] = {}
        self._losses: list[Any] = []
        self._signals = Signals()
        self._writer = checkpoint.CheckpointWriter()

    # What it is asked for

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train.

        Args:
            model: a `Module` or a `LightningModule`.
            train_dataloaders: a loader, or a `DataModule`.
            val_dataloaders: a loader or several.
            datamodule: a `DataModule` or a `LightningDataModule`.
            ckpt_path: continue from this checkpoint; "last" from the newest complete one of this run's directory, or from
                the beginning when there is none; "best" from the best.

        Raises:
            FootplateError: something that can be mended, said before training begins wherever it can be known then.
            SystemExit: 143, after SIGTERM: the step was finished and the run saved.
            KeyboardInterrupt: after SIGINT, likewise; or at once after a second one.
        """
        train_dataloaders, datamodule = _split_datamodule(train_dataloaders, datamodule)
        self._attach("fit", model, datamodule)
        with self._running("fit"):
            self._fit(train_dataloaders, val_dataloaders, ckpt_path)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation loaders.

        Args:
            model: by default the module that was trained last, with its best weights if they were kept.
            dataloaders: a loader, several, or a `DataModule`.
            ckpt_path: load these weights first: "best", "last" or a path.
            verbose: print the results.
            datamodule: a `DataModule`.

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
    ) -> Any:
        """Run `predict_step` over the prediction loaders.

        Args:
            model: see `validate`.
            dataloaders: a loader, several, or a `DataModule`.
            datamodule: a `DataModule`.
            return_predictions: keep and return what `predict_step` returns. Default: unless `output` is given.
            ckpt_path: see `validate`.
            output: a directory: write the predictions as a Parquet table, batch by batch. `predict_step` then returns a
                tensor or a dict of tensors or lists, whose first dimension is the batch.

        Returns:
            The predictions, a list for each loader (just the list when there is one); the `Table` when there is an
            `output` and they are not to be returned.
        """
        from footplate.predictions import PredictionWriter

        dataloaders, datamodule = _split_datamodule(dataloaders, datamodule)
        self._attach("predict", self._given_or_last(model), datamodule)
        keep = output is None if return_predictions is None else return_predictions
        with self._running("predict"):
            loaders, limits = self._prepare_evaluation("predict", dataloaders, ckpt_path, model)
            found: list[list[Any]] = [[] for _ in loaders]
            writer = None if output is None else PredictionWriter(Path(output))

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

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint of the run as it stands, and return when it is on the disk."""
        self.write_checkpoint(Path(filepath), weights_only)
        self._writer.wait()

    # How one run is put together

    def _fit(self, train_dataloaders: Any, val_dataloaders: Any, ckpt_path: str | Path | None) -> None:
        module = self.module
        self._check_writable()
        self._prepare_stage("fit")
        found = self._find_checkpoint(ckpt_path)
        loaded = None if found is None else checkpoint.load(found)
        if loaded is not None and "seed" in loaded:
            self.seed = loaded["seed"]

        loader, val_loaders = self._prepare_loaders(train_dataloaders, val_dataloaders)
        self._prepare_module()
        self.optimizers, self.lr_scheduler_configs = optim.configure(module)
        self.hooks = Hooks(self, module, self.datamodule, self.callbacks)
        self.step = self._make_step()
        self.step_optimizers = [optim.StepOptimizer(one, self.step.optimizer_step) for one in self.optimizers]
        self.metrics = MetricLog(module, by_step=True)
        self.progress = Progress()
        self._callback_metrics = {}
        self._state = RunState(
            module, self.seed, self.progress, self.optimizers, [config.scheduler for config in self.lr_scheduler_configs],
            self.step, self.metrics, self.callbacks, self.loggers, loader, self.datamodule, self._callback_metrics,
        )  # fmt: skip
        if loaded is not None:
            self._resume(loaded, str(found))
        for logger in self.loggers:
            logger.setup(self.run_dir, self._hparams())

        self.hooks.call("on_fit_start")
        if loaded is None:
            self._sanity_check(val_loaders)
        elif "rng" in loaded:
            rng.restore(loaded["rng"])
        self.should_stop = False
        self.training_in_progress = True
        self.hooks.call("on_train_start")
        began = time.monotonic() - self.progress.seconds
        while not self._finished():
            self._train_epoch(loader, val_loaders)
            self.progress.seconds = time.monotonic() - began
        self.training_in_progress = False
        self.hooks.call("on_train_end")
        self._writer.wait()
        if not self.fast_dev_run:
            for logger in self.loggers:
                logger.log_model(self)
        self.hooks.call("on_fit_end")

    def _finished(self) -> bool:
        progress = self.progress
        if self.max_epochs not in (None, -1) and progress.epoch >= self.max_epochs:
            return True
        if self.max_steps != -1 and progress.global_step >= self.max_steps:
            return True
        return self.should_stop and self._may_stop()

    def _may_stop(self) -> bool:
        """Whether `min_epochs` and `min_steps` allow an early stop."""
        enough_epochs = self.min_epochs is None or self.progress.epoch >= self.min_epochs
        return enough_epochs and (self.min_steps is None or self.progress.global_step >= self.min_steps)

    # The loop

    def _train_epoch(self, loader: Any, val_loaders: list[Any]) -> None:
        module, progress, metrics, step, hooks = self.module, self.progress, self.metrics, self.step, self.hooks
        batch_start = hooks.get("on_train_batch_start")
        total, epoch, first_epoch_batch = self.num_training_batches, progress.epoch, progress.batch_idx
        transfer = self._transfer()
        seed = rng.mix(self.seed, self.world.rank)

        loader.set_epoch(epoch)
        if first_epoch_batch == 0:
            metrics.by_step = False
            hooks.call("on_train_epoch_start")
        elif self._validation_due(first_epoch_batch) and progress.validated_at != progress.batches:
            self._validate(val_loaders)
        module.train() if first_epoch_batch == 0 and progress.batches == 0 else None
        metrics.by_step = True

        ended = first_epoch_batch >= total or self._stops_here()
        batches = iter(()) if ended else iter(loader)
        for chunk in _chunks(batches, step.chunk_size):
            first = progress.batch_idx
            if transfer is not None:
                chunk = [transfer(batch, 0) for batch in chunk]
            metrics.batch = chunk[0]
            if batch_start and any(
                hook(batch, first + i) == -1 for i, batch in enumerate(chunk) for hook in batch_start
            ):
                break
            rng.seed_step(rng.mix(seed, progress.batches), self.device)
            steps_before = progress.global_step
            outputs = step.train(chunk, first, first + len(chunk) >= total, epoch).outputs
            for batch, output in zip(chunk, outputs, strict=True):
                progress.batch_idx += 1
                progress.batches += 1
                self._between_steps(batch, output, progress.batch_idx - 1, steps_before, val_loaders)
            if progress.batch_idx >= total or self._stops_here():
                break
        else:
            if not ended:
                self._source_ran_out(total, steps_before=progress.global_step, val_loaders=val_loaders)
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        self._end_epoch(val_loaders)

    def _between_steps(
        self, batch: Any, output: Any, batch_idx: int, steps_before: int, val_loaders: list[Any]
    ) -> None:
        """What follows a batch: schedulers, callbacks, reports, checkpoints, validation, in this order."""
        progress, hooks = self.progress, self.hooks
        stepped = progress.global_step != steps_before
        if stepped and self._step_schedulers:
            self._step_lr_schedulers("step", plateau=False)
        self.logs_this_step = stepped and (
            progress.global_step // self.log_every_n_steps > steps_before // self.log_every_n_steps
        )
        if output is not None:
            self._losses.append(output["loss"] if type(output) is dict else output)
        if self.logs_this_step:
            self._check_finite()
        for hook in hooks.get("on_train_batch_end"):
            hook(output, batch, batch_idx)
        if self.logs_this_step:
            self._report_step()
        if progress.batches == 1:
            self._check_monitors()
        for hook in hooks.savers("on_train_batch_end"):
            hook(output, batch, batch_idx)
        if self._validation_due(progress.batch_idx):
            self._validate(val_loaders)
        if stepped and self._step_schedulers:
            self._step_lr_schedulers("step", plateau=True)
        if self._signals.received is not None:
            self._end_on_signal()

    def _stops_here(self) -> bool:
        """Whether the epoch is to end before its last batch."""
        if self.max_steps != -1 and self.progress.global_step >= self.max_steps:
            return True
        return self.should_stop and self._may_stop()

    def _source_ran_out(self, total: float, steps_before: int, val_loaders: list[Any]) -> None:
        """The loader gave fewer batches than it may have promised: end the accumulation window and validate."""
        progress = self.progress
        if progress.batch_idx == 0:
            raise DataError("The training loader gave no batch in this epoch.")
        if math.isfinite(total):
            log.warning("The training loader ended after %d of %d batches.", progress.batch_idx, total)
        self.step.finish_window(progress.epoch, progress.batch_idx - 1)
        if progress.global_step != steps_before:
            self._step_lr_schedulers("step", plateau=False)
        self.num_training_batches = progress.batch_idx if math.isinf(total) else total
        if math.isinf(self._val_check_batches) and self.has_validation and self._validates_in_epoch(progress.epoch):
            self._validate(val_loaders)
        self.num_training_batches = total

    def _end_epoch(self, val_loaders: list[Any]) -> None:
        """The end of an epoch: metrics, callbacks, schedulers, reports, checkpoints, in this order."""
        metrics, hooks, progress = self.metrics, self.hooks, self.progress
        metrics.batch, metrics.by_step = None, False
        self._check_finite()
        values = metrics.epoch_values()
        self.publish(values)
        self._row.update(values.logger)
        for hook in hooks.get("on_train_epoch_end"):
            hook()
        later = metrics.epoch_values()
        self.publish(later)
        self._row.update(later.logger)
        self._step_lr_schedulers("epoch", plateau=False)
        self._step_lr_schedulers("epoch", plateau=True)
        self._send_row()
        progress.epoch_ended = True
        for hook in hooks.savers("on_train_epoch_end"):
            hook()
        progress.next_epoch()

    # Validation inside training

    def _validation_due(self, batch_idx: int) -> bool:
        every = self._val_check_batches
        if not self.has_validation or math.isinf(every):
            return False
        if self.check_val_every_n_epoch is None:
            return self.progress.batches % every == 0
        return self._validates_in_epoch(self.progress.epoch) and batch_idx % every == 0

    def _validates_in_epoch(self, epoch: int) -> bool:
        every = self.check_val_every_n_epoch
        return every is None or (epoch + 1) % every == 0

    def _validate(self, loaders: list[Any]) -> None:
        values = evaluate(self, "validate", loaders, self.num_val_batches)
        self._row.update(values.logger)
        for hook in self.hooks.get("on_validation_end"):
            hook()
        self._send_row()
        self.progress.validated_at = self.progress.batches
        for hook in self.hooks.savers("on_validation_end"):
            hook()

    def _sanity_check(self, loaders: list[Any]) -> None:
        """Try a few validation batches, so that a mistake there is found now and not after an epoch."""
        steps = self.num_sanity_val_steps
        self._sanity_names: set[str] = set()
        if not self.has_validation or steps == 0:
            return
        self.sanity_checking = True
        self.hooks.call("on_sanity_check_start")
        limits = [limit if steps == -1 else min(steps, limit) for limit in self.num_val_batches]
        evaluate(self, "validate", loaders, limits)
        self.hooks.call("on_validation_end")
        self._sanity_names = set(self._callback_metrics)
        self.hooks.call("on_sanity_check_end")
        self.sanity_checking = False
        for kept in (self._callback_metrics, self.progress_bar_metrics, self.logged_metrics, self._row):
            kept.clear()

    # Learning-rate schedulers

    def _step_lr_schedulers(self, interval: str, plateau: bool) -> None:
        if not self.module.automatic_optimization:
            return
        now = self.progress.global_step if interval == "step" else self.progress.epoch + 1
        for config in self.lr_scheduler_configs:
            if config.interval != interval or config.reduce_on_plateau != plateau or now % config.frequency:
                continue
            metric = None
            if config.reduce_on_plateau:
                value = self._callback_metrics.get(config.monitor or "")
                if value is None:
                    if config.strict:
                        raise ConfigError(
                            f'{type(config.scheduler).__name__} monitors "{config.monitor}", which has not been logged. '
                            f"{did_you_mean(config.monitor or '', self._callback_metrics)}"
                        )
                    continue
                metric = torch.tensor(value)
            self.module.lr_scheduler_step(config.scheduler, metric)

    # Metrics and loggers

    @contextlib.contextmanager
    def logging_to(self, metrics: MetricLog) -> Iterator[None]:
        """Let `self.log` of the module go to these metrics for a while."""
        before = getattr(self, "metrics", None)
        self.metrics = metrics
        try:
            yield
        finally:
            if before is not None:
                self.metrics = before

    def publish(self, values: EpochValues) -> None:
        """Let callbacks and the progress display see reduced metrics."""
        self._callback_metrics.update(values.callback)
        self.progress_bar_metrics.update(values.progress)
        self.logged_metrics.update(values.logger)

    def log_now(self, values: dict[str, float]) -> None:
        """Send host floats to the loggers with the next report: for callbacks that measure something themselves."""
        self._row.update(values)
        self._callback_metrics.update(values)

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric by name. Reads from the device what was logged since it was last asked."""
        if self.training_in_progress and hasattr(self, "metrics"):
            self._callback_metrics.update(self.metrics.latest_values())
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self._callback_metrics.items()}

    def _report_step(self) -> None:
        self._row.update(self.metrics.step_values())
        self._callback_metrics.update(self.metrics.latest_values())
        self.progress_bar_metrics.update(self.metrics.step_values(prog_bar=True))
        self.logged_metrics.update(self._row)
        self._send_row()

    def _send_row(self) -> None:
        if self._row and not self.fast_dev_run:
            for logger in self.loggers:
                logger.log_metrics(dict(self._row), self.progress.global_step, self.progress.epoch)
        self._row.clear()

    def _check_finite(self) -> None:
        """Read the losses since the last look; note the first that is no number."""
        losses = to_floats([loss for loss in self._losses if loss is not None], "the training loss")
        self._losses.clear()
        if self.not_finite is not None or all(map(math.isfinite, losses)):
            return
        after = len(losses) - next(i for i, value in enumerate(losses) if not math.isfinite(value)) - 1
        step = max(1, self.progress.global_step - after // self.accumulate_grad_batches)
        self.not_finite = ("the training loss", step)
        log.warning("The training loss became NaN or infinite, first at step %d.", step)

    def _check_monitors(self) -> None:
        """After the first batch, name a monitored metric that nothing can log, rather than after the first epoch."""
        later = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end", "on_validation_end")
        untried = self.has_validation and not self._sanity_names and not self.fast_dev_run
        if untried or any(overrides(self.module, name) for name in later) or self.fast_dev_run:
            return
        known = set(self._sanity_names)
        for name in self.metrics.names():
            known |= {name, f"{name}_step", f"{name}_epoch"}
        watchers = [(type(one).__name__, getattr(one, "monitor", None)) for one in self.callbacks]
        watchers += [(type(config.scheduler).__name__, config.monitor) for config in self.lr_scheduler_configs
                     if config.reduce_on_plateau]  # fmt: skip
        if any(not type(one).__module__.startswith("footplate.") for one in self.callbacks):
            return  # a callback of somebody else's may log anything later
        for who, monitor in watchers:
            if monitor is not None and monitor not in known:
                raise ConfigError(f'{who} monitors "{monitor}", which nothing logs. {did_you_mean(monitor, known)}')

    # Checkpoints

    def write_checkpoint(self, path: Path, weights_only: bool = False, then: Any = None) -> None:
        """Copy the run state and write it in the background; `then()` is called once it is complete.

        Raises:
            CheckpointError: the save before this one failed.
        """
        if self.world.rank != 0:
            return
        progress = self.progress
        state = self._state.state_dict(weights_only)
        if not weights_only:
            self.hooks.call("on_save_checkpoint", state)
        meta = {
            "format": state["footplate"]["format"],
            "footplate": state["footplate"]["version"],
            "torch": state["footplate"]["torch"],
            "module": state["module"],
            "epoch": progress.epoch,
            "global_step": progress.global_step,
            "batches": progress.batches,
            "weights_only": weights_only,
            "metrics": {name: value for name, value in self._callback_metrics.items() if math.isfinite(value)},
        }
        self._writer.save(state, path, meta, then)

    def _resume(self, loaded: dict[str, Any], source: str) -> None:
        self.hooks.call("on_load_checkpoint", loaded)
        self._state.load_module(loaded, source)
        self._state.load_training(loaded, source)
        self._state.load_loggers(loaded)
        self.print(f"Continuing from {source} (epoch {self.progress.epoch + 1}, step {self.progress.global_step}).")

    def _find_checkpoint(self, ckpt_path: str | Path | None) -> Path | None:
        if ckpt_path is None:
            return None
        savers = [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]
        directories = list({callback.dirpath for callback in savers if callback.dirpath is not None})
        if ckpt_path == "last":
            found = checkpoint.newest([directory for directory in directories if directory.is_dir()])
            if found is None and self.stage == "fit":
                self.print(f"There is no checkpoint in {', '.join(map(str, directories))} yet: beginning anew.")
            elif found is None:
                raise CheckpointError(
                    f'ckpt_path="last": there is no checkpoint in {", ".join(map(str, directories))}.'
                )
            return found
        if ckpt_path == "best":
            for callback in savers:
                for candidate in (callback.best_model_path, (callback.dirpath or self.run_dir) / "best.ckpt"):
                    if candidate and Path(candidate).exists():
                        return Path(candidate)
            raise CheckpointError(
                'ckpt_path="best": no best checkpoint was kept. Use ModelCheckpoint(monitor=…), or ckpt_path="last".'
            )
        return Path(ckpt_path)

    def _end_on_signal(self) -> None:
        """Save and end, between two steps, because a signal came."""
        received = self._signals.received
        assert received is not None
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint):
                path = callback.save_now(self)
                self._writer.wait()
                if path is not None:
                    self.print(f'{received.name}: saved {path}; continue with ckpt_path="last".')
                break
        raise self._signals.end()

    # Preparing

    def _attach(self, stage: Stage, model: Any, datamodule: Any) -> None:
        if model is None:
            raise ConfigError(f"trainer.{stage}() needs a model: none was given, and none has been trained yet.")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"trainer.{stage}(model): expected a footplate.Module, got {type(model).__name__}.")
        self.callbacks = list(self._given_callbacks)
        if not isinstance(model, Module):
            _compat().attach_module(model, self)
        for needed in {"fit": ("training_step", "configure_optimizers"), "validate": ("validation_step",),
                       "test": ("test_step",), "predict": ()}[stage]:  # fmt: skip
            if not overrides(model, needed):
                raise ConfigError(
                    f"{type(model).__name__} has no {needed}(), which trainer.{stage}() needs. Define it on the class."
                )
        self.stage, self.module, self.datamodule = stage, model, datamodule
        model.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        for callback in as_list(model.configure_callbacks()):
            self.callbacks = [one for one in self.callbacks if type(one) is not type(callback)] + [callback]
        self._order_callbacks()

    @contextlib.contextmanager
    def _running(self, stage: Stage) -> Iterator[None]:
        """Whatever happens inside: hooks of an exception, loggers closed, threads joined, and errors made plain."""
        status: Status = "failed"
        anomaly = torch.autograd.set_detect_anomaly(self.detect_anomaly) if self.detect_anomaly else None
        try:
            with self._signals if stage == "fit" else contextlib.nullcontext():
                yield
            status = "success"
        except BaseException as error:
            status = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
            if hasattr(self, "hooks"):
                self.hooks.call("on_exception", error)
            plain = _explain(error)
            if plain is not None:
                raise plain from error
            raise
        finally:
            self.training_in_progress = self.sanity_checking = False
            if anomaly is not None:
                torch.autograd.set_detect_anomaly(False)
            with contextlib.suppress(CheckpointError) if status != "success" else contextlib.nullcontext():
                self._writer.wait()
            if stage == "fit":
                for logger in self.loggers:
                    logger.finalize(status)
            if hasattr(self, "hooks"):
                self.hooks.call("teardown", stage)

    def _prepare_stage(self, stage: Stage) -> None:
        hooks = self.hooks = Hooks(self, self.module, self.datamodule, self.callbacks)
        hooks.call("prepare_data")
        for hook in (*hooks.savers("setup"), *hooks.get("setup")):
            hook(stage)
        self.module.configure_model()

    def _prepare_module(self) -> None:
        self.precision.convert_module(self.module)
        if self.device.type != "cpu" or any(p.device.type != "cpu" for p in self.module.parameters()):
            self.module.to(self.device)

    def _prepare_loaders(self, train_dataloaders: Any, val_dataloaders: Any) -> tuple[Any, list[Any]]:
        given = self._ask("train_dataloader", train_dataloaders)
        if given is None:
            raise ConfigError(
                "trainer.fit() has no training data: pass train_dataloaders=… or datamodule=…, or define train_dataloader()."
            )
        overfit = bool(self.overfit_batches)
        loader = adapt(given, self.seed, shuffle=not overfit)
        name = "overfit_batches" if overfit else "limit_train_batches"
        limit = self.overfit_batches if overfit else self._limits["fit"]
        total = count_batches(loader)
        if total == 0:
            raise ConfigError("The training loader has no batches: is the data empty, or drop_last with too few rows?")
        self.num_training_batches = limit_batches(name, limit, total)
        if self.num_training_batches == 0:
            raise ConfigError(f"{name}={limit}: nothing is left to train on.")

        validates = overrides(self.module, "validation_step") and self._limits["validate"] != 0
        val_loaders = as_list(self._ask("val_dataloader", val_dataloaders)) if validates else []
        if overfit and val_loaders:
            val_loaders = [adapt(given, self.seed, shuffle=False)]
        limit = self.overfit_batches if overfit else self._limits["validate"]
        self.num_val_batches = [limit_batches("limit_val_batches", limit, count_batches(one)) for one in val_loaders]
        for index, batches in enumerate(self.num_val_batches):
            if batches == 0:
                raise ConfigError(f"Validation loader {index} has no batches: is the data empty?")
        self.has_validation = bool(val_loaders)
        self._val_check_batches = validation_interval(
            self.val_check_interval, self.check_val_every_n_epoch, self.num_training_batches
        )
        return loader, val_loaders

    def _ask(self, name: str, given: Any) -> Any:
        """A loader: what was given, or the data module's, or the module's own; None when nobody has one."""
        if given is not None:
            return given
        for owner in (self.datamodule, self.module):
            if owner is not None and overrides(owner, name):
                return getattr(owner, name)()
        return None

    def _make_step(self) -> Step:
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
        )
        self._step_schedulers = any(config.interval == "step" for config in self.lr_scheduler_configs)
        return self.accelerator.make_step(spec)

    def _count_step(self) -> None:
        self.progress.global_step += 1

    def _transfer(self) -> Any:
        """The function that brings a batch to the device, or None where there is nothing to do."""
        owners = [owner for owner in (self.datamodule, self.module) if owner is not None]
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        changed = any(overrides(owner, name) for owner in owners for name in names)
        return self.to_device if changed or self.device.type != "cpu" else None

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """A batch on the device, through the hooks of the data module or the module."""

        def owner(name: str) -> Any:
            return self.datamodule if self.datamodule is not None and overrides(self.datamodule, name) else self.module

        batch = owner("on_before_batch_transfer").on_before_batch_transfer(batch, dataloader_idx)
        mover = owner("transfer_batch_to_device")
        if overrides(mover, "transfer_batch_to_device"):
            batch = mover.transfer_batch_to_device(batch, self.device, dataloader_idx)
        elif self.device.type != "cpu":
            batch = Module.transfer_batch_to_device(mover, batch, self.device, dataloader_idx)
        return owner("on_after_batch_transfer").on_after_batch_transfer(batch, dataloader_idx)

    # Evaluation outside training

    def _evaluate(
        self, stage: Stage, model: Any, dataloaders: Any, ckpt_path: str | Path | None, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        dataloaders, datamodule = _split_datamodule(dataloaders, datamodule)
        self._attach(stage, self._given_or_last(model), datamodule)
        with self._running(stage):
            loaders, limits = self._prepare_evaluation(stage, dataloaders, ckpt_path, model)
            self._callback_metrics = {}
            values = evaluate(self, stage, loaders, limits)
            self.hooks.call(f"on_{'validation' if stage == 'validate' else stage}_end")
        suffix = re.compile(r"/dataloader_idx_(\d+)$")
        results: list[dict[str, float]] = [{} for _ in loaders]
        for name, value in values.logger.items():
            found = suffix.search(name)
            for index, result in enumerate(results):
                if found is None or int(found.group(1)) == index:
                    result[name] = value
        if verbose and self.world.rank == 0:
            for index, result in enumerate(results):
                where = f" (loader {index})" if len(results) > 1 else ""
                self.print(f"{stage}{where}: " + "  ".join(f"{name} {value:.6g}" for name, value in result.items()))
        return results

    def _prepare_evaluation(
        self, stage: Stage, dataloaders: Any, ckpt_path: str | Path | None, given_model: Any
    ) -> tuple[list[Any], list[float]]:
        self._prepare_stage(stage)
        if ckpt_path is None and given_model is None:
            with contextlib.suppress(CheckpointError):
                ckpt_path = self._find_checkpoint("best")
        found = self._find_checkpoint(ckpt_path)
        names = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}
        loaders = as_list(self._ask(names[stage], dataloaders))
        if not loaders:
            raise ConfigError(
                f"trainer.{stage}() has no data: pass dataloaders=… or datamodule=…, or define {names[stage]}()."
            )
        argument = names[stage].replace("_dataloader", "")
        limits = [
            limit_batches(f"limit_{argument}_batches", self._limits[stage], count_batches(loader)) for loader in loaders
        ]
        for index, limit in enumerate(limits):
            if limit == 0:
                raise ConfigError(f"trainer.{stage}(): loader {index} has no batches.")
        setattr(self, f"num_{argument}_batches", limits)
        self._prepare_module()
        self.hooks = Hooks(self, self.module, self.datamodule, self.callbacks)
        if found is not None:
            RunState(self.module, self.seed).load_module(checkpoint.load(found), str(found))
        self.optimizers = []
        self.step = self._make_step()
        return loaders, limits

    def _given_or_last(self, model: Any) -> Any:
        return self.module if model is None else model

    # What it has, and what it is asked about

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far, over all attempts."""
        return self.progress.global_step

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def validates_once_per_epoch(self) -> bool:
        """Whether validation comes at the end of every epoch, and nowhere else."""
        whole = self.val_check_interval is None or self.val_check_interval == 1.0
        return whole and self.check_val_every_n_epoch == 1

    @property
    def has_step_limit(self) -> bool:
        """Whether `max_steps` limits the run."""
        return self.max_steps != -1

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole run, for schedulers; infinite when nothing limits it."""
        if self.max_epochs in (None, -1):
            return float("inf") if self.max_steps == -1 else self.max_steps
        if math.isinf(self.num_training_batches):
            return float("inf") if self.max_steps == -1 else self.max_steps
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint`."""
        return next((one for one in self.callbacks if isinstance(one, ModelCheckpoint)), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first `EarlyStopping`."""
        return next((one for one in self.callbacks if isinstance(one, EarlyStopping)), None)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked this run to end."""
        return self._signals.received is not None

    def __getattr__(self, name: str) -> Any:
        """Names that Lightning's trainer has and ours gives otherwise."""
        return _compat().trainer_attribute(self, name)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress display. Rich renderables are rendered."""
        if self.world.rank != 0:
            return
        for callback in self.callbacks:
            if isinstance(callback, ProgressBar):
                callback.print(*args, **kwargs)
                return
        log.info(" ".join(map(str, args)))

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """`data` of every rank, stacked; with one process, `data` itself."""
        return data

    def _hparams(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for owner in (self.datamodule, self.module):
            if owner is not None and getattr(owner, "_log_hyperparams", True):
                found.update(getattr(owner, "hparams", None) or {})
        settings = {
            "accelerator": self.accelerator.name,
            "precision": self.precision.name,
            "max_epochs": self.max_epochs,
            "max_steps": self.max_steps,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "gradient_clip_val": self.gradient_clip_val,
            "seed": self.seed,
        }
        return {**found, **{f"trainer/{name}": value for name, value in settings.items()}}

    def _choose_loggers(self, logger: Any) -> list[Logger]:
        if logger is False or self.fast_dev_run:
            return []
        if logger is None or logger is True:
            from footplate.tracking.csv import CSV

            return [CSV()]
        return as_list(logger) if not isinstance(logger, Logger) else [logger]

    def _choose_callbacks(
        self, given: list[Any], max_time: Any, enable_checkpointing: bool, enable_progress_bar: bool, summary: bool
    ) -> list[Any]:
        callbacks = given if all(isinstance(one, Callback) for one in given) else _compat().translate_callbacks(given)
        for callback in callbacks:
            if isinstance(callback, type) or not hasattr(callback, "on_train_batch_end"):
                raise ConfigError(f"callbacks: expected Callback objects, got {callback!r}.")
        if max_time is not None:
            callbacks.append(Timer(max_time))
        savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        if savers and not enable_checkpointing:
            raise ConfigError(
                "enable_checkpointing=False, but callbacks holds a ModelCheckpoint: leave out one of them."
            )
        if not savers and enable_checkpointing and not self.fast_dev_run:
            callbacks.append(ModelCheckpoint())
        if enable_progress_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks.append(ProgressBar())
        if summary and not any(isinstance(callback, ModelSummary) for callback in callbacks):
            callbacks.append(ModelSummary())
        return callbacks

    def _order_callbacks(self) -> None:
        self.callbacks.sort(key=lambda callback: isinstance(callback, ModelCheckpoint))

    def _check_writable(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            probe = self.run_dir / ".footplate-probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"default_root_dir={str(self.run_dir)!r} can't be written to: {error.strerror}. Choose another directory."
            ) from None


def _compat() -> Any:
    """What knows Lightning; loaded only for those who bring its classes."""
    from footplate.compat import lightning

    return lightning


def _chunks(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    if size == 1:
        for batch in batches:
            yield [batch]
        return
    chunk: list[Any] = []
    for batch in batches:
        chunk.append(batch)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _split_datamodule(loaders: Any, datamodule: Any) -> tuple[Any, Any]:
    """A data module may be given in the loaders' place."""
    if loaders is not None and hasattr(loaders, "train_dataloader") and hasattr(loaders, "prepare_data"):
        if datamodule is not None:
            raise ConfigError("Both a data module in the loaders' place and datamodule=… were given: give one.")
        return None, loaders
    return loaders, datamodule


def _explain(error: BaseException) -> Exception | None:
    """A plain error for a traceback that many users have met."""
    found = re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error)) if isinstance(error, IndexError) else None
    if found is None:
        return None
    return DataError(
        f"A label is {found.group(1)}, which is outside the range of the model's outputs. "
        "Labels must be 0 … outputs - 1: give the model more outputs, or map the labels."
    )
