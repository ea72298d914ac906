"""The state of one call of a trainer: of `fit`, `validate`, `test` or `predict`.

    trainer.fit(model, loader)
        run = trainer.run = the last run .next("fit", model, …)     the state at the beginning of the call
        fitting.fit(run, …)                                         adds module, loaders, optimizers, step, loop
    trainer.global_step → trainer.run.progress.global_step          users read it during the call and after it

Code that does a part of the work receives the run: the loop, evaluation, checkpoints, loaders. Hooks, callbacks and loggers
receive the trainer, which is the front of the run. `next` keeps a field if users may ask for it after a later call (the
metrics of training after a test), or if it belongs to the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from footplate.callbacks import ProgressBar
from footplate.callbacks.base import is_kind
from footplate.checkpoint.metric_states import states_of
from footplate.checkpoint.run_state import Progress, RunState
from footplate.checkpoint.storage import Place
from footplate.checkpoint.writer import CheckpointWriter
from footplate.core.errors import ConfigError
from footplate.core.hooks import Hooks
from footplate.core.signals import Signals
from footplate.data.adapters.workers import end_workers
from footplate.distributed.agreement import Agreement
from footplate.distributed.base import Strategy
from footplate.distributed.group import Group
from footplate.distributed.world import World
from footplate.hardware.base import Accelerator
from footplate.hardware.transfer import make_transfer
from footplate.step.base import Step
from footplate.step.optimizers import SchedulerConfig, StepOptimizer
from footplate.step.precision import Precision
from footplate.tracking.base import Logger
from footplate.training.config import TrainerConfig
from footplate.training.logical import LogicalRanks
from footplate.training.metrics import LogicalMetricLog, MetricLog
from footplate.training.monitor import Monitor
from footplate.training.placement import Placement
from footplate.training.reports import Reports
from footplate.training.status import RunStatus

if TYPE_CHECKING:
    from footplate.training.loop import TrainingLoop
    from footplate.training.profiler.step_profiles import StepProfiles
    from footplate.training.trainer import Trainer

log = logging.getLogger(__name__)

Stage = Literal["fit", "validate", "test", "predict"]
# The training loader, and the validation loaders.
LoaderPair = tuple[Any, list[Any]]


@dataclass(eq=False)
class Run:
    """The state of one call.

    Attributes:
        trainer: hooks, callbacks and loggers receive it.
        config: the trainer's arguments. A callback may change one during the run.
        placement: devices, precision and ranks.
        seed: of all randomness. A resumed run has the checkpoint's.
        run_dir: for checkpoints, metrics and logs.
        recorders: the loggers, behind our contract.
        profiler: see `training/profiling.py`.
        launch_id: the launch of this process, if a trainer started it.
        job_fit: in a job, the name of this call of `fit`.
        origin: the checkpoint of another training that this call of `fit` begins from; None without one.
        stage: the call.
        module: the module that runs.
        datamodule: the data module. None without one.
        callbacks: of the call, in the order of their hooks.
        progress: epochs, batches and steps so far.
        reports: the latest metrics.
        state: what a checkpoint of the training holds. None before the first `fit`.
        failed_in_step: the run was saved after an exception in a step.
        writer: writes checkpoints in the background.
        dataloaders: as passed or made, by "train", "val", "test", "predict".
        training_batches: batches of a training epoch, as far as known. `num_training_batches` makes the loaders to know it.
        num_val_batches: batches of each validation loader. The other two likewise.
        val_check_batches: training batches between two validations.
        should_stop: set to stop training after this step.
        status: the state of the call, as `trainer.state.status` shows it.
        sanity_checking: a few validation batches are being tried.
        in_step: a step trains on a batch. It stays set if the step raises.
        training_in_progress: `fit` has begun to train.
        has_validation: there is something to validate on.
        resumed_from: the checkpoint that the user chose to continue from. It isn't deleted.
        begins_from_origin: this call begins from `origin`. False if it continues from a checkpoint of its own.
        optimizers: as the module configured them.
        step_optimizers: the same, for a module that optimises manually.
        lr_scheduler_configs: as the module configured them.
        metrics: collects `self.log` of the module at this moment.
        training_metrics: collects it in training.
        hooks: of data module, module and callbacks.
        step: trains on batches. None before it is built.
        loop: of a `fit`. None before it is built.
        profiles: the profiles of steps of a `fit`. Set before the loop.
        logical: the logical ranks of this process. None without `logical_ranks`.
        make_loaders: makes the loaders of a `fit`. None once they are made.
        found_loaders: the loaders that were made, until the loop has them.
        monitor: measures where the time goes.
        signals: signals that this process received.
        agreement: the ranks' agreement on signals and on stopping.
    """

    trainer: Trainer
    config: TrainerConfig
    placement: Placement
    seed: int
    run_dir: Path
    recorders: list[Logger]
    profiler: Any
    launch_id: str | None = None
    job_fit: str | None = None
    origin: str | None = None
    stage: Stage | None = None
    module: Any = None
    datamodule: Any = None
    callbacks: list[Any] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    reports: Reports = field(default_factory=lambda: Reports([]))
    state: RunState | None = None
    failed_in_step: bool = False
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    dataloaders: dict[str, Any] = field(default_factory=dict)
    training_batches: float = 0
    num_val_batches: list[float] = field(default_factory=list)
    num_test_batches: list[float] = field(default_factory=list)
    num_predict_batches: list[float] = field(default_factory=list)
    val_check_batches: float = math.inf
    should_stop: bool = False

    status: RunStatus = field(init=False, default="initializing")
    sanity_checking: bool = field(init=False, default=False)
    in_step: bool = field(init=False, default=False)
    training_in_progress: bool = field(init=False, default=False)
    has_validation: bool = field(init=False, default=False)
    resumed_from: Place | None = field(init=False, default=None)
    begins_from_origin: bool = field(init=False, default=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False, default_factory=list)
    step_optimizers: list[StepOptimizer] = field(init=False, default_factory=list)
    lr_scheduler_configs: list[SchedulerConfig] = field(init=False, default_factory=list)
    metrics: MetricLog = field(init=False)
    training_metrics: MetricLog = field(init=False)
    hooks: Hooks = field(init=False)
    step: Step = field(init=False)
    loop: TrainingLoop | None = field(init=False, default=None)
    profiles: StepProfiles = field(init=False)
    logical: LogicalRanks | None = field(init=False, default=None)
    make_loaders: Callable[[], LoaderPair] | None = field(init=False, default=None)
    found_loaders: LoaderPair | None = field(init=False, default=None)
    monitor: Monitor = field(init=False, default_factory=lambda: Monitor(enabled=False))
    signals: Signals = field(init=False, default_factory=Signals)
    agreement: Agreement = field(init=False)
    _read_from: dict[str, list[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = self.training_metrics = MetricLog(torch.nn.Module(), by_step=True)
        self.hooks = Hooks(self.trainer, None, None, self.callbacks)
        if self.config.logical_ranks is not None:
            self.logical = LogicalRanks(self.config.logical_ranks, self.world)
        self.agree()

    def next(self, stage: Stage, module: Any, datamodule: Any) -> Run:
        """Return the run of the trainer's next call."""
        run = dataclasses.replace(self, stage=stage, module=module, datamodule=datamodule)
        if stage == "fit":
            run.should_stop, run.training_batches, run.failed_in_step = False, math.inf, False
            run.progress, run.reports, run.state = Progress(), Reports(self.recorders), None
            run.monitor = Monitor(self.config.enable_monitor)
        return run

    # Where the work is done

    @property
    def accelerator(self) -> Accelerator:
        return self.placement.accelerator

    @property
    def precision(self) -> Precision:
        return self.placement.precision

    @property
    def world(self) -> World:
        return self.placement.world

    @property
    def device(self) -> torch.device:
        return self.placement.device

    @property
    def parallel(self) -> Strategy:
        return self.placement.parallel

    @property
    def group(self) -> Group:
        return self.placement.group

    @property
    def ranks_meant(self) -> int:
        """The number of ranks that the run was asked for. Some of them may have been given up."""
        return self.world.size if self.launch_id is None else self.placement.ranks_asked

    @property
    def data_world(self) -> World:
        """The share of the rows that this process reads. With tensor parallelism, several ranks read the same share."""
        return self.parallel.data_world(self.world)

    @property
    def ranks_of_a_share(self) -> int:
        """The number of ranks that read the same rows."""
        return self.world.size // self.data_world.size

    @property
    def data_ranks(self) -> int:
        """The number of shares of a global batch: of logical ranks, or of processes that read different rows."""
        return self.data_world.size if self.logical is None else self.logical.total

    def agree(self) -> None:
        """Begin to agree with the other ranks on signals, `should_stop` and the clock."""
        self.agreement = Agreement(self.group, self.signals, lambda: self.should_stop)

    # Loaders

    @property
    def num_training_batches(self) -> float:
        """Batches of a training epoch. Infinite if the loader doesn't know. In `fit`, this makes the loaders."""
        if self.make_loaders is not None:
            self.ask_for_loaders()
        return self.training_batches

    def ask_for_loaders(self) -> LoaderPair:
        """Return the loaders of a `fit`, made at the first call.

        While they are made, a hook that asks for their lengths gets those of the last call.
        """
        make, self.make_loaders = self.make_loaders, None
        if make is not None:
            self.found_loaders = make()
            self.use_loader(self.found_loaders[0])
        assert self.found_loaders is not None
        return self.found_loaders

    def use_loader(self, loader: Any) -> None:
        """Let checkpoints keep the position of this loader."""
        assert self.state is not None
        self.state.loader = loader

    def read_from(self, name: str, loaders: list[Any]) -> None:
        """Remember the loaders of this call, so that no worker process outlives it. End the workers of replaced loaders.

        Args:
            name: "train", "val", "test" or "predict".
            loaders: adapted loaders.
        """
        for replaced in self._read_from.get(name, []):
            end_workers(replaced)
        self._read_from[name] = loaders

    def end_workers(self) -> None:
        """End the worker processes of all loaders."""
        for name in [*self._read_from]:
            self.read_from(name, [])

    def transfer(self, moved: bool = False) -> Callable[[Any, int], Any] | None:
        """Return the function that brings a batch to the device. None if there is nothing to do.

        With `moved`, the batch is on the device already, and only `on_after_batch_transfer` is left.
        """
        return make_transfer(self.module, self.datamodule, self.device, moved)

    # Metrics

    @property
    def data_wait_s(self) -> float:
        """Seconds for which the device has waited for training batches."""
        return self.monitor.times.total().get("input", 0.0)

    def latest_metrics(self) -> dict[str, float]:
        """Return the latest value of every metric, as host floats. Reads new values from the device."""
        if self.training_in_progress:
            self.reports.callback.update(self.training_metrics.step_values().callback)
        return self.reports.callback

    @contextlib.contextmanager
    def logging_to(self, metrics: MetricLog) -> Iterator[None]:
        """Let `self.log` of the module go to these metrics, for a `with` block."""
        before, self.metrics = self.metrics, metrics
        try:
            yield
        finally:
            self.metrics = before

    def new_metrics(self, by_step: bool) -> MetricLog:
        """Return an empty log of metrics."""
        if self.logical is None or self.stage == "predict":
            return MetricLog(self.module, by_step, self.placement.data_group)
        return LogicalMetricLog(self.module, by_step, len(self.logical.own), self.group)

    def keep_collected(self) -> None:
        """Let checkpoints keep the present state of torchmetrics objects, even if hooks reset them later."""
        assert self.state is not None
        self.state.collected = states_of(self.module)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress display. Rich renderables are rendered."""
        if self.world.rank != 0:
            return
        for callback in self.callbacks:
            if is_kind(callback, ProgressBar):
                callback.print(*args, **kwargs)
                return
        log.info(" ".join(map(str, args)))

    # Optimizers

    def replace_schedulers(self, configs: list[SchedulerConfig]) -> None:
        """Let other schedulers set the learning rates from now on, in checkpoints too."""
        assert self.state is not None
        self.lr_scheduler_configs = configs
        self.state.schedulers = [config.scheduler for config in configs]

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, to collect statistics. On all ranks."""
        assert self.loop is not None
        if self.logical is not None:
            raise ConfigError(
                f"logical_ranks={self.logical.total}: the statistics of batch norm can't be collected again in one order. "
                "Leave out the callback that does this (StochasticWeightAveraging), or logical_ranks."
            )
        self.loop.run_forward()
