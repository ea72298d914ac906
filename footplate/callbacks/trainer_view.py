"""The contract between callbacks and training: the attributes of a trainer that a callback may use.

Every hook gets the trainer as its first argument. A trainer has more attributes, under Lightning's names. The attributes
here are those that Footplate's own callbacks need, so they don't change without a note in the changelog. This file doesn't
import the trainer, because callbacks are a layer below training. Any object with these attributes works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from footplate.checkpoint.run_state import Progress
from footplate.checkpoint.storage import Place
from footplate.core.hooks import Hooks
from footplate.distributed.base import Strategy
from footplate.distributed.group import Group
from footplate.distributed.world import World
from footplate.hardware.base import Accelerator
from footplate.step.base import Step
from footplate.step.optimizers import SchedulerConfig
from footplate.step.precision import Precision


class TrainerView(Protocol):
    """The attributes of a trainer that callbacks use."""

    # Attributes that a callback may assign. Their types are open, because the trainer's are descriptors.

    should_stop: Any  # bool
    max_epochs: Any  # int; -1 for no limit; None before `fit`
    accumulate_grad_batches: Any  # int

    # Devices and processes

    @property
    def accelerator(self) -> Accelerator: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def world(self) -> World: ...
    @property
    def parallel(self) -> Strategy: ...
    @property
    def group(self) -> Group: ...
    @property
    def device_ids(self) -> Sequence[int]: ...

    # Module and parts of the run

    @property
    def module(self) -> Any: ...
    @property
    def callbacks(self) -> list[Any]: ...
    @property
    def recorders(self) -> list[Any]: ...
    @property
    def data_wait_s(self) -> float: ...
    @property
    def hooks(self) -> Hooks: ...
    @property
    def step(self) -> Step: ...
    @property
    def optimizers(self) -> list[Optimizer]: ...
    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]: ...
    @property
    def fast_dev_run(self) -> int | bool: ...

    # Progress

    @property
    def progress(self) -> Progress: ...
    @property
    def current_epoch(self) -> int: ...
    @property
    def global_step(self) -> int: ...
    @property
    def has_step_limit(self) -> bool: ...
    @property
    def num_training_batches(self) -> float: ...
    @property
    def num_val_batches(self) -> list[float]: ...
    @property
    def num_test_batches(self) -> list[float]: ...
    @property
    def num_predict_batches(self) -> list[float]: ...
    @property
    def has_validation(self) -> bool: ...
    @property
    def validates_once_per_epoch(self) -> bool: ...
    def validation_ends_epoch(self, batch_idx: int) -> bool:
        """Return True if a training batch is the last of its epoch and validation follows immediately."""
        ...

    @property
    def sanity_checking(self) -> bool: ...
    @property
    def training_in_progress(self) -> bool: ...
    def clock(self) -> float:
        """Return monotonic seconds, the same on every rank."""
        ...

    # Metrics

    @property
    def log_every_n_steps(self) -> int: ...
    @property
    def logs_this_step(self) -> bool: ...
    @property
    def logs_next_step(self) -> bool: ...
    @property
    def callback_metrics(self) -> dict[str, Tensor]: ...
    @property
    def progress_bar_metrics(self) -> dict[str, float]: ...
    @property
    def not_finite(self) -> tuple[str, int] | None: ...
    def latest_metrics(self) -> dict[str, float]:
        """Return `callback_metrics` as floats on the host."""
        ...

    def log_now(self, values: dict[str, float]) -> None:
        """Send floats to the loggers with the next report."""
        ...

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress display."""
        ...

    # Directories and checkpoints

    default_root_dir: Any  # str; the run's directory

    @property
    def checkpoint_dir(self) -> Place: ...
    @property
    def resumed_from(self) -> Place | None: ...
    def for_all(self, place: Place) -> Place:
        """Return a path in a form that all ranks can use."""
        ...

    def write_checkpoint(self, path: Place, weights_only: bool = ..., then: Callable[[], None] = ...) -> None:
        """Copy the run's state and write it in the background. All ranks must call this."""
        ...

    # Weight averaging

    def replace_schedulers(self, configs: list[SchedulerConfig]) -> None:
        """Replace the learning-rate schedulers."""
        ...

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, to update running statistics of layers."""
        ...
