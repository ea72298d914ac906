"""The attributes of a `Trainer` that callbacks, loggers and modules read while it runs.

Most attributes are in one of four groups:

    trainer.max_epochs     an argument (`Setting`): assign it between two calls; arguments without one are `Fixed`
    trainer.module         an attribute of the present run (`OfRun`)
    trainer.current_epoch  computed from the run (a property)
    trainer.world_size     computed too (`Computed`), but a program may assign a value of its own in its place

Attributes that only another library's trainer has come from its adapter; see `core/adapters.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch

from footplate.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, ProgressBar
from footplate.callbacks.base import is_kind
from footplate.callbacks.timer import Duration
from footplate.checkpoint.run_state import Progress
from footplate.checkpoint.storage import Place
from footplate.core import adapters
from footplate.core.hooks import Hooks
from footplate.data.adapters.combined import is_combined
from footplate.distributed.agreement import Agreement
from footplate.distributed.base import Strategy
from footplate.distributed.group import Group
from footplate.distributed.world import World
from footplate.hardware.base import Accelerator
from footplate.step.base import Step
from footplate.step.optimizers import SchedulerConfig, StepOptimizer
from footplate.step.precision import Precision
from footplate.tracking.base import Logger
from footplate.training import job
from footplate.training.config import NAMES, Fixed, Setting, TrainerConfig
from footplate.training.metrics import MetricLog
from footplate.training.monitor import Monitor
from footplate.training.status import RunStatus

if TYPE_CHECKING:
    from footplate.training.run import Run

T = TypeVar("T")


class OfRun(Generic[T]):
    """An attribute of the trainer that its run has under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> OfRun[T]: ...
    @overload
    def __get__(self, trainer: Any, owner: type) -> T: ...
    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else getattr(trainer.run, self.name)

    def __set__(self, trainer: Any, value: T) -> None:
        setattr(trainer.run, self.name, value)


class Computed(Generic[T]):
    """An attribute that is computed when it is read, until a program assigns a value to it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, trainer: None, owner: type) -> Computed[T]: ...
    @overload
    def __get__(self, trainer: Any, owner: type) -> T: ...
    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else self.compute(trainer)


def _all_if_none(limit: int | float | None) -> int | float:
    """A limit on batches; 1.0, all of them, if none was given."""
    return 1.0 if limit is None else limit


class TrainerAttributes:
    """The attributes of a `Trainer`: its arguments, and the state of its present or last run."""

    run: Run
    callbacks: list[Any]
    loggers: list[Any]

    config = OfRun[TrainerConfig]()
    accelerator = OfRun[Accelerator]()
    precision = OfRun[Precision]()
    world = OfRun[World]()
    device = OfRun[torch.device]()
    parallel = OfRun[Strategy]()
    group = OfRun[Group]()
    seed = OfRun[int]()
    run_dir = OfRun[Path]()
    recorders = OfRun[list[Logger]]()
    profiler = OfRun[Any]()

    stage = OfRun[Literal["fit", "validate", "test", "predict"] | None]()
    status = OfRun[RunStatus]()
    module = OfRun[Any]()
    datamodule = OfRun[Any]()
    should_stop = OfRun[bool]()
    sanity_checking = OfRun[bool]()
    training_in_progress = OfRun[bool]()
    has_validation = OfRun[bool]()
    progress = OfRun[Progress]()
    metrics = OfRun[MetricLog]()
    hooks = OfRun[Hooks]()
    step = OfRun[Step]()
    agreement = OfRun[Agreement]()
    resumed_from = OfRun[Place | None]()
    dataloaders = OfRun[dict[str, Any]]()
    optimizers = OfRun[list[torch.optim.Optimizer]]()
    step_optimizers = OfRun[list[StepOptimizer]]()
    lr_scheduler_configs = OfRun[list[SchedulerConfig]]()
    num_training_batches = OfRun[float]()
    num_val_batches = OfRun[list[float]]()
    num_test_batches = OfRun[list[float]]()
    num_predict_batches = OfRun[list[float]]()
    data_wait_s = OfRun[float]()
    monitor = OfRun[Monitor]()

    max_epochs = Setting[int | None]()
    min_epochs = Setting[int | None]()
    max_steps = Setting[int]()
    min_steps = Setting[int | None]()
    limit_train_batches = Setting[int | float](_all_if_none)
    limit_val_batches = Setting[int | float](_all_if_none)
    limit_test_batches = Setting[int | float](_all_if_none)
    limit_predict_batches = Setting[int | float](_all_if_none)
    overfit_batches = Setting[int | float]()
    val_check_interval = Setting[int | float | Duration | None]()
    check_val_every_n_epoch = Setting[int | None]()
    log_every_n_steps = Setting[int]()
    accumulate_grad_batches = Setting[int]()
    num_sanity_val_steps = Setting[float](lambda steps: math.inf if steps == -1 else steps)
    gradient_clip_val = Setting[float | None]()
    gradient_clip_algorithm = Setting[str](lambda algorithm: algorithm or "norm")
    use_distributed_sampler = Setting[bool]()
    reload_dataloaders_every_n_epochs = Setting[int]()
    max_restarts = Setting[int]()
    max_host_restarts = Setting[int]()
    min_devices = Setting[int | None]()
    heartbeat_timeout = Setting[float]()
    inference_mode = Setting[bool]()
    detect_anomaly = Setting[bool]()
    compile = Setting[bool | dict[str, Any] | str]()
    iterations_per_loop = Setting[int]()
    enable_monitor = Setting[bool]()

    # Arguments and metrics

    @property
    def fast_dev_run(self) -> int | bool:
        """The number of batches of every loader that are run; True for one, False for all."""
        batches = int(self.config.fast_dev_run)
        return batches if batches > 1 else bool(batches)

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric by name. Reads the values logged since the last read from the device."""
        self.latest_metrics()
        return self.run.reports.tensors()

    def latest_metrics(self) -> dict[str, float]:
        """`callback_metrics` as host floats."""
        return self.run.latest_metrics()

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The values that were last sent to the loggers, by name."""
        return self.run.reports.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the progress display shows, by name."""
        return self.run.reports.progress

    @property
    def not_finite(self) -> tuple[str, int] | None:
        """The first value that became NaN or infinite, and its step; None while all values are finite."""
        return self.run.reports.not_finite

    @property
    def logs_this_step(self) -> bool:
        """True if metrics are reported after the present step."""
        return self.run.loop is not None and self.run.loop.logs_this_step

    @property
    def logs_next_step(self) -> bool:
        """True if metrics are reported after the next batch.

        With manual optimisation, a batch is assumed to step each of the module's optimizers once.
        """
        step = self.progress.global_step
        steps = 1 if self.module.automatic_optimization else max(1, len(self.optimizers))
        return (step + steps) // self.log_every_n_steps != step // self.log_every_n_steps

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
        """The first logger. Assign a logger to make it the only one, or None or False to have no logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def validates_once_per_epoch(self) -> bool:
        """True if validation runs at the end of every epoch, and at no other time."""
        interval = self.val_check_interval
        whole = interval is None or (isinstance(interval, float) and interval == 1.0)
        return whole and self.check_val_every_n_epoch == 1

    def validation_ends_epoch(self, batch_idx: int) -> bool:
        """Return True if a training batch is the last of its epoch and validation follows it at once."""
        return self.run.loop is not None and self.run.loop.validation_ends_epoch(batch_idx)

    @property
    def has_step_limit(self) -> bool:
        """True if `max_steps` limits the run."""
        return self.max_steps != -1

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps of the whole run, for schedulers; infinite if nothing limits the run."""
        if self.max_epochs in (None, -1):
            return float("inf") if self.max_steps == -1 else self.max_steps
        if math.isinf(self.num_training_batches):
            return float("inf") if self.max_steps == -1 else self.max_steps
        schedules = (callback for callback in self.callbacks if isinstance(callback, GradientAccumulationScheduler))
        schedule = next(schedules, None)
        if schedule is None:
            steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * self.max_epochs
        else:
            windows = map(schedule.get_accumulate_grad_batches, range(self.max_epochs))
            steps = sum(math.ceil(self.num_training_batches / batches) for batches in windows)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint`."""
        return next((callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)), None)

    @property
    def early_stopping_callback(self) -> Any:
        """The first `EarlyStopping`."""
        return next(iter(self.callbacks_of_kind(EarlyStopping)), None)

    @property
    def interrupted(self) -> bool:
        """True if a signal has asked this run to end, or an exception has ended the last run."""
        return self.agreement.interrupted or self.status == "interrupted"

    @property
    def device_ids(self) -> list[int]:
        """The devices that the processes of this machine use, by local rank."""
        return self.run.placement.device_ids

    @property
    def nodes(self) -> int:
        """The number of machines that the run was asked for."""
        return self.run.placement.nodes

    @property
    def ranks_asked(self) -> int:
        """The number of processes that `num_nodes` and `devices` ask for."""
        return self.run.placement.ranks_asked

    @property
    def checkpoint_dir(self) -> Place:
        """The directory of checkpoints that are saved without a directory of their own."""
        return job.checkpoints(self.run_dir)

    @property
    def running_stage(self) -> str | None:
        """The stage that runs now: "train", "sanity_check", "validate", "test", "predict" or None.

        `stage` is "fit" during a whole fit; `running_stage` tells its training from its validation.
        """
        if self.status != "running":
            return None
        if self.stage != "fit":
            return self.stage
        if self.sanity_checking:
            return "sanity_check"
        return "train" if self.metrics is self.run.training_metrics else "validate"

    # Computed attributes that a program may replace by a value of its own

    model = Computed[Any](lambda trainer: trainer.module)
    global_rank = Computed[int](lambda trainer: _rank_and_size(trainer)[0])
    local_rank = Computed[int](lambda trainer: trainer.world.local_rank)
    node_rank = Computed[int](lambda trainer: trainer.world.rank // trainer.world.local_size)
    world_size = Computed[int](lambda trainer: _rank_and_size(trainer)[1])
    num_devices = Computed[int](lambda trainer: len(trainer.device_ids))
    num_nodes = Computed[int](lambda trainer: trainer.world.size // trainer.world.local_size)
    is_global_zero = Computed[bool](lambda trainer: trainer.world.rank == 0)
    default_root_dir = Computed[str](lambda trainer: str(trainer.run_dir))

    training = Computed[bool](lambda trainer: trainer.running_stage == "train")
    validating = Computed[bool](lambda trainer: trainer.running_stage == "validate")
    testing = Computed[bool](lambda trainer: trainer.running_stage == "test")
    predicting = Computed[bool](lambda trainer: trainer.running_stage == "predict")
    evaluating = Computed[bool](lambda trainer: trainer.running_stage in ("validate", "test", "sanity_check"))
    enable_validation = Computed[bool](lambda trainer: trainer.has_validation)
    received_sigterm = Computed[bool](lambda trainer: trainer.agreement.interrupted)
    is_last_batch = Computed[bool](lambda trainer: trainer.progress.batch_idx + 1 >= trainer.num_training_batches)
    num_sanity_val_batches = Computed[list[float]](
        lambda trainer: [min(trainer.num_sanity_val_steps, batches) for batches in trainer.num_val_batches]
    )

    checkpoint_callbacks = Computed[list[Any]](lambda trainer: trainer.callbacks_of_kind(ModelCheckpoint))
    early_stopping_callbacks = Computed[list[Any]](lambda trainer: trainer.callbacks_of_kind(EarlyStopping))
    progress_bar_callback = Computed[Any](lambda trainer: next(iter(trainer.callbacks_of_kind(ProgressBar)), None))

    train_dataloader = Computed[Any](lambda trainer: _loaders(trainer, "train"))
    val_dataloaders = Computed[Any](lambda trainer: _loaders(trainer, "val"))
    test_dataloaders = Computed[Any](lambda trainer: _loaders(trainer, "test"))
    predict_dataloaders = Computed[Any](lambda trainer: _loaders(trainer, "predict"))

    def callbacks_of_kind(self, kind: type) -> list[Any]:
        """The trainer's callbacks of a class, or of another library's class of the same name."""
        return [callback for callback in self.callbacks if is_kind(callback, kind)]

    # Otherwise a type checker would accept every misspelt attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read an attribute that only another library's trainer has, from the library's adapter."""
            return adapters.trainer_attribute(self, name)


for _name in NAMES:
    if not hasattr(TrainerAttributes, _name) and _name not in TrainerAttributes.__annotations__:
        setattr(TrainerAttributes, _name, Fixed(_name))


def _rank_and_size(trainer: TrainerAttributes) -> tuple[int, int]:
    """The rank of this process and the number of processes, or those of logical ranks."""
    world, logical = trainer.world, trainer.run.logical
    return (world.rank, world.size) if logical is None else (logical.rank, logical.total)


def _loaders(trainer: TrainerAttributes, stage: str) -> Any:
    """The user's loaders of a stage: a loader, or a collection of loaders."""
    loaders: Any = trainer.dataloaders.get(stage)
    return loaders.iterables if is_combined(loaders) else loaders
