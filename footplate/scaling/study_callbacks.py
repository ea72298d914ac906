"""What a study adds to the trainers inside it: one callback that sets the learning rate, one that takes the time.

`Pace` multiplies the rates of optimizers and schedulers once, before training. So a schedule stays what it was, on another
scale. During the warm-up, an optimizer steps with a part of its rate, and has the whole of it back right after, before a
scheduler looks.

`Probe` puts every moment of the training into one of four phases, by the clock of its rank:

    step         from a batch to the end of its step: forward, backward, the exchange of gradients, the optimizer
    data         from the end of a step to the next batch
    validation   validation, its start and its end included
    other        the beginnings and ends of epochs: metrics, savers

On an accelerator steps run behind the clock: there, what a phase waits for may be the steps before it.
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
from footplate.scaling.results import PHASES
from footplate.scaling.learning_rates import Rate, asked

if TYPE_CHECKING:
    from footplate.training.module import Module
    from footplate.training.trainer import Trainer

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # the last two are OneCycleLR's
SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")


class Pace(Callback):
    """Gives every trainer the learning rate of this size.

    Args:
        rate: what becomes of the rate of one process.
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
        """The factor of an optimizer's rates; its groups keep their ratios."""
        if self._rate.base is None:
            return self._rate.factor
        first = optimizer.param_groups[0]
        own = float(first.get("initial_lr", first["lr"]))
        if own == 0.0:
            raise ConfigError(
                f"lr={self._rate.base:g}: the first parameter group of {type(optimizer).__name__} has the rate 0, so the "
                "others can't keep their ratio to it. Leave lr out."
            )
        return self._rate.at(own) / own

    def _warm_up(self, trainer: Trainer) -> None:
        if math.isinf(trainer.num_training_batches):
            raise ConfigError(
                f"warmup={self._rate.warmup:g} epochs: the training loader doesn't know how long an epoch is. Use "
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
            self._end()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end()

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


class Probe(Callback):
    """Takes the time and counts the rows of every training in this process, and reads its final validation loss.

    Args:
        monitor: the metric that is the validation loss.

    Attributes:
        trainings: how many were finished.
        seconds: what they took, from the first epoch's beginning to the last one's end.
        phases: the same seconds, by phase.
        samples: rows that were trained on, on all ranks.
        batches: that this rank trained on.
        steps: of the optimizer, of the last training; likewise `epochs`.
        loss: the monitored metric at the end of the last; None when it was not logged.
        logged: the names of its metrics.
        threads: that torch computed with on the CPU.
        device: what it was trained on, `"cpu"` or `"cuda"`.
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
        trainer.group.barrier()  # the slowest to start is the start of all
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
        found = trainer.latest_metrics()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        self._mark("other")
        self.seconds += self._since - self._began
        self.trainings += 1
        self.samples += sum(trainer.group.gather(self._rows))
        self.steps, self.epochs = trainer.global_step, trainer.current_epoch
        self.loss = found.get(self._monitor)
        self.logged = tuple(sorted(found))
        self.threads, self.device = torch.get_num_threads(), trainer.device.type

    def _mark(self, phase: str) -> None:
        """The time since the last mark was spent in this phase."""
        now = time.perf_counter()
        self.phases[phase] += now - self._since
        self._since = now


def refuse_continued(trainer: Trainer) -> None:
    """See that a training begins at its beginning.

    Raises:
        ConfigError: it continues from a checkpoint, of another size perhaps.
    """
    if trainer.global_step or trainer.progress.batches:
        raise ConfigError(
            f"The training continues from a checkpoint (step {trainer.global_step}), so it can't be compared with one that "
            "doesn't. In a study, train without ckpt_path."
        )


def _scale_groups(groups: list[dict[str, Any]], by: float) -> None:
    for group in groups:
        group.update({name: group[name] * by for name in GROUP_RATES if group.get(name) is not None})


def _scale_scheduler(scheduler: Any, by: float) -> None:
    """Scale what a scheduler, and the schedulers that it is made of, have noted of their optimizer's rates."""
    own = vars(scheduler)
    own.update({name: [lr * by for lr in own[name]] for name in SCHEDULER_RATES if own.get(name) is not None})
    for part in own.get("_schedulers", ()):
        _scale_scheduler(part, by)
