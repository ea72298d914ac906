"""What can be read of a run while it runs: by callbacks, loggers and modules, mostly under Lightning's names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from footplate.callbacks.base import is_kind
from footplate.callbacks.timer import Duration
from footplate.tracking.base import Logger
from footplate.training.config import Setting, TrainerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from footplate.metrics import MetricLog
    from footplate.parallel.agreement import Agreement
    from footplate.state import Progress
    from footplate.training.loop import TrainingLoop
    from footplate.training.reports import Reports
    from footplate.training.status import RunStatus


def _all_if_none(limit: int | float | None) -> int | float:
    """A limit as Lightning shows it: 1.0, all batches, where none was given."""
    return 1.0 if limit is None else limit


class View:
    """The attributes of a `Trainer`: its arguments, which may be assigned between two calls, and what a run has reached."""

    config: TrainerConfig
    progress: Progress
    reports: Reports
    agreement: Agreement
    status: RunStatus
    callbacks: list[Any]
    module: Any
    optimizers: list[Any]
    loggers: list[Any]
    training_in_progress: bool
    _loop: TrainingLoop | None
    _num_training_batches: float
    _make_loaders: Callable[[], Any] | None
    _training_metrics: MetricLog

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

    def ask_for_loaders(self) -> Any:
        """See `Trainer`."""
        raise NotImplementedError

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of every metric by name. Reads from the device what was logged since it was last asked."""
        self.latest_metrics()
        return self.reports.tensors()

    def latest_metrics(self) -> dict[str, float]:
        """`callback_metrics` as host floats."""
        if self.training_in_progress:
            self.reports.callback.update(self._training_metrics.step_values().callback)
        return self.reports.callback

    @property
    def logged_metrics(self) -> dict[str, float]:
        """What the loggers were told last, by name."""
        return self.reports.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress display shows."""
        return self.reports.progress

    @property
    def not_finite(self) -> tuple[str, int] | None:
        """What became NaN or infinite, and the first step at which it was; None as long as all is well."""
        return self.reports.not_finite

    @property
    def logs_this_step(self) -> bool:
        """Whether metrics are reported after the present step."""
        return self._loop is not None and self._loop.logs_this_step

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
        return self._loop is not None and self._loop.validation_ends_epoch(batch_idx)

    @property
    def num_training_batches(self) -> float:
        """Batches of a training epoch; infinite where the loader doesn't know. In `fit`, this makes the loaders."""
        if self._make_loaders is not None:
            self.ask_for_loaders()
        return self._num_training_batches

    @num_training_batches.setter
    def num_training_batches(self, batches: float) -> None:
        self._num_training_batches = batches

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
