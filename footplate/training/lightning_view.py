"""What can be read of a run while it runs: by callbacks, loggers and modules, mostly under Lightning's names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch

from footplate.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from footplate.callbacks.base import is_kind
from footplate.callbacks.timer import Duration
from footplate.checkpoint.run_state import Progress
from footplate.checkpoint.storage import Place
from footplate.core.hooks import Hooks
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
from footplate.training.config import Setting, TrainerConfig
from footplate.training.metrics import MetricLog
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


def _all_if_none(limit: int | float | None) -> int | float:
    """A limit as Lightning shows it: 1.0, all batches, where none was given."""
    return 1.0 if limit is None else limit


class View:
    """The attributes of a `Trainer`: its arguments, which may be assigned between two calls, and what a run has reached."""

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
    data_wait_s = OfRun[float | None]()

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
    compile = Setting[bool | dict[str, Any]]()
    iterations_per_loop = Setting[int]()

    @property
    def fast_dev_run(self) -> int | bool:
        """How many batches of every loader are run; True for one, False for all."""
        batches = int(self.config.fast_dev_run)
        return batches if batches > 1 else bool(batches)

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric by name. Reads from the device what was logged since it was last asked."""
        self.latest_metrics()
        return self.run.reports.tensors()

    def latest_metrics(self) -> dict[str, float]:
        """`callback_metrics` as host floats."""
        return self.run.latest_metrics()

    @property
    def logged_metrics(self) -> dict[str, float]:
        """What the loggers were told last, by name."""
        return self.run.reports.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress display shows."""
        return self.run.reports.progress

    @property
    def not_finite(self) -> tuple[str, int] | None:
        """What became NaN or infinite, and the first step at which it was; None as long as all is well."""
        return self.run.reports.not_finite

    @property
    def logs_this_step(self) -> bool:
        """Whether metrics are reported after the present step."""
        return self.run.loop is not None and self.run.loop.logs_this_step

    @property
    def logs_next_step(self) -> bool:
        """Whether metrics are reported after the next batch, if that takes as many optimizer steps as its module has
        optimizers, with manual optimisation, or one.
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
        """The first logger. Assigning one makes it the only one; None or False leaves none."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def validates_once_per_epoch(self) -> bool:
        """Whether validation comes at the end of every epoch, and nowhere else."""
        interval = self.val_check_interval
        whole = interval is None or (isinstance(interval, float) and interval == 1.0)
        return whole and self.check_val_every_n_epoch == 1

    def validation_ends_epoch(self, batch_idx: int) -> bool:
        """Whether a training batch is the epoch's last, and validation follows it at once."""
        return self.run.loop is not None and self.run.loop.validation_ends_epoch(batch_idx)

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
        plan = next((one for one in self.callbacks if isinstance(one, GradientAccumulationScheduler)), None)
        if plan is None:
            steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * self.max_epochs
        else:
            windows = map(plan.get_accumulate_grad_batches, range(self.max_epochs))
            steps = sum(math.ceil(self.num_training_batches / batches) for batches in windows)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint`."""
        return next((one for one in self.callbacks if isinstance(one, ModelCheckpoint)), None)

    @property
    def early_stopping_callback(self) -> Any:
        """The first `EarlyStopping`."""
        return next((one for one in self.callbacks if is_kind(one, EarlyStopping)), None)

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked this run to end, or an exception has ended the last one."""
        return self.agreement.interrupted or self.status == "interrupted"

    @property
    def device_ids(self) -> list[int]:
        """The devices that the processes of this machine use, in the order of their local ranks."""
        return self.run.placement.device_ids

    @property
    def nodes(self) -> int:
        """How many machines the run was asked for."""
        return self.run.placement.nodes

    @property
    def ranks_asked(self) -> int:
        """How many processes `num_nodes` and `devices` stand for."""
        return self.run.placement.ranks_asked

    @property
    def checkpoint_dir(self) -> Place:
        """Where checkpoints go whose saver doesn't say."""
        return job.checkpoints(self.run_dir)
