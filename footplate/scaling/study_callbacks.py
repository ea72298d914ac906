"""The callbacks that a study adds to each trainer: one sets the learning rate, one measures time.

`Pace` multiplies the rates of optimizers and schedulers once, before training, so a schedule keeps its shape. During the
warm-up, an optimizer steps with a part of its rate. It gets the whole rate back right after the step, before a scheduler
reads it.

`Probe` assigns each moment of the training to one of four phases, by the clock of its rank:

    step         from a batch to the end of its step: forward, backward, the exchange of gradients, the optimizer
    data         from the end of a step to the next batch
    validation   validation, with its start and its end
    other        the beginnings and ends of epochs: metrics, checkpoints

An accelerator runs steps asynchronously. There, a phase may include the wait for the steps before it.
"""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError
from footplate.hardware.transfer import batch_rows
from footplate.scaling.learning_rates import Rate, asked
from footplate.scaling.results import PHASES

if TYPE_CHECKING:
    from footplate.training.module import Module
    from footplate.training.trainer import Trainer

# The rates in a parameter group; OneCycleLR adds the last two.
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")


class Pace(Callback):
    """Gives every trainer the learning rate of this size.

    Args:
        rate: the change of the learning rate of one process.
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        refuse_continued(trainer)
        if asked():
            return
        factors = {id(optimizer): self._factor(optimizer) for optimizer in trainer.optimizers}
        for optimizer in trainer.optimizers:
            _scale_groups(optimizer.param_groups, factors[id(optimizer)])
        for config in trainer.lr_scheduler_configs:
            driven = getattr(config.scheduler, "optimizer", trainer.optimizers[0])
            _scale_scheduler(config.scheduler, factors[id(driven)])
        if self._rate.warmup and self._rate.factor != 1.0:
            self._warm_up(trainer)

    def _factor(self, optimizer: Any) -> float:
        """Compute the factor of an optimizer's rates. Its groups keep their ratios."""
        if self._rate.base is None:
            return self._rate.factor
        first = optimizer.param_groups[0]
        own = float(first.get("initial_lr", first["lr"]))
        if own == 0.0:
            raise ConfigError(
                f"lr={self._rate.base:g}: the first parameter group of {type(optimizer).__name__} has the rate 0, so other "
                "groups can't keep their ratio to it. Leave lr out."
            )
        return self._rate.at(own) / own

    def _warm_up(self, trainer: Trainer) -> None:
        if math.isinf(trainer.num_training_batches):
            raise ConfigError(
                f"warmup={self._rate.warmup:g} epochs: the training loader doesn't know the length of an epoch. Use "
                "warmup=0, or Trainer(limit_train_batches=…)."
            )
        for optimizer in trainer.optimizers:
            full: list[Any] = []
            self._hooks += [
                optimizer.register_step_pre_hook(functools.partial(self._lower, trainer, full)),
                optimizer.register_step_post_hook(functools.partial(self._raise, full)),
            ]

    def _lower(self, trainer: Trainer, full: list[Any], optimizer: Any, *_: Any) -> None:
        ramp = self._rate.ramp(trainer.progress.batches / trainer.num_training_batches)
        full[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * ramp

    def _raise(self, full: list[Any], optimizer: Any, *_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = lr

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.current_epoch >= self._rate.warmup:
            self._end_warm_up()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_warm_up()

    def _end_warm_up(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


class Probe(Callback):
    """Measures the time and counts the rows of every training in this process, and reads the final validation loss.

    Args:
        monitor: the metric that is the validation loss.

    Attributes:
        trainings: the number of finished trainings.
        seconds: their time, from the beginning of the first epoch to the end of the last.
        phases: the same seconds, by phase.
        samples: the rows that all ranks trained on.
        batches: the batches that this rank trained on.
        steps: the optimizer steps of the last training.
        epochs: the epochs of the last training.
        loss: the monitored metric at the end of the last training; None if it wasn't logged.
        logged: the names of the metrics of the last training.
        threads: the number of torch's CPU threads.
        device: the kind of device, `"cpu"` or `"cuda"`.
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self.trainings = 0
        self.seconds = 0.0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.samples = 0
        self.batches = 0
        self.steps = 0
        self.epochs = 0
        self.loss: float | None = None
        self.logged: tuple[str, ...] = ()
        self.threads = torch.get_num_threads()
        self.device = ""
        self._since = 0.0
        self._began = 0.0
        self._rows = 0

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        # The training begins when the last rank is ready.
        trainer.group.barrier()
        self._rows = 0
        self._began = self._since = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._mark("other")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._mark("data")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._mark("step")
        self.batches += 1
        if trainer.metrics.counts:
            self._rows += batch_rows(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.training_in_progress:
            self._mark("other")

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.training_in_progress:
            self._mark("validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._mark("other")

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        metrics = trainer.latest_metrics()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        self._mark("other")
        self.seconds += self._since - self._began
        self.trainings += 1
        self.samples += sum(trainer.group.gather(self._rows))
        self.steps, self.epochs = trainer.global_step, trainer.current_epoch
        self.loss = metrics.get(self._monitor)
        self.logged = tuple(sorted(metrics))
        self.threads, self.device = torch.get_num_threads(), trainer.device.type

    def _mark(self, phase: str) -> None:
        """Add the time since the last mark to this phase."""
        now = time.perf_counter()
        self.phases[phase] += now - self._since
        self._since = now


def refuse_continued(trainer: Trainer) -> None:
    """Raise if a training continues from a checkpoint, which may come from another size.

    Raises:
        ConfigError: it does.
    """
    if trainer.global_step or trainer.progress.batches:
        raise ConfigError(
            f"The training continues from a checkpoint (step {trainer.global_step}), so it can't be compared with "
            "trainings from the beginning. In a study, train without ckpt_path."
        )


def _scale_groups(groups: list[dict[str, Any]], factor: float) -> None:
    for group in groups:
        group.update({name: group[name] * factor for name in GROUP_RATES if group.get(name) is not None})


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    """Scale the copies of the optimizer's rates that a scheduler and its inner schedulers keep."""
    attributes = vars(scheduler)
    for name in SCHEDULER_RATES:
        if attributes.get(name) is not None:
            attributes[name] = [lr * factor for lr in attributes[name]]
    for inner in attributes.get("_schedulers", ()):
        _scale_scheduler(inner, factor)
