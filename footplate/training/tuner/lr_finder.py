"""`LRFinder`: the losses of a search for a learning rate, and the callback that records them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from footplate.training.trainer import Trainer


log = logging.getLogger(__name__)

_SMOOTHING = 0.98


class LRFinder:
    """The result of `Tuner.lr_find`.

    Attributes:
        results: "lr" and "loss" (smoothed) of each step.
        mode: as in `Tuner.lr_find`.
        lr_min: `min_lr` of `Tuner.lr_find`.
        lr_max: `max_lr` of `Tuner.lr_find`.
        num_training: as in `Tuner.lr_find`.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        part = (step + 1) / self.num_training if step else 0.0
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return self.lr_min * (self.lr_max / self.lr_min) ** part

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls most steeply. None if fewer than two losses are left.

        Args:
            skip_begin: leave out this many of the first losses.
            skip_end: leave out this many of the last losses.
        """
        stop = len(self.results["loss"]) - skip_end
        steps = [step for step in range(skip_begin, stop) if math.isfinite(self.results["loss"][step])]
        if len(steps) < 2:
            log.error(
                "There are too few losses to suggest a learning rate: %d. Use a larger num_training, or more data.",
                len(steps),
            )
            self._optimal_idx = None
            return None
        losses, rates = (torch.tensor([self.results[name][step] for step in steps]) for name in ("loss", "lr"))
        slopes = torch.gradient(losses, spacing=[rates])[0]
        self._optimal_idx = steps[int(slopes.argmin())]
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a figure of the losses over the learning rates. Needs matplotlib.

        Args:
            suggest: mark the suggestion.
            show: show the figure.
            ax: the matplotlib axes to draw on. By default those of a new figure.
        """
        import matplotlib.pyplot as plt

        figure, ax = plt.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            point = [self.results[name][self._optimal_idx] for name in ("lr", "loss")]
            ax.plot(*point, markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure


class RisingRate(Callback):
    """Sets the learning rate of each step, records the losses, and stops training when they diverge."""

    sees_weights = False

    def __init__(self, finder: LRFinder, threshold: float | None) -> None:
        self._finder, self._threshold = finder, threshold
        self._average = self._best = 0.0
        self._batches = 0
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ConfigError(
                f"lr_find(): {type(pl_module).__name__} has {len(trainer.optimizers)} optimizer(s)"
                f"{'' if pl_module.automatic_optimization else ' and optimises by hand'}: expected one, with automatic "
                "optimisation."
            )
        own = {id(parameter) for parameter in pl_module.parameters()}
        if any(
            id(parameter) not in own for group in trainer.optimizers[0].param_groups for parameter in group["params"]
        ):
            raise ConfigError(
                "lr_find(): configure_optimizers() gives an optimizer of parameters that aren't those of self, so that the "
                "search would change the model. Use self.parameters() there."
            )
        trainer.replace_schedulers([])

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = self._finder.rate(trainer.global_step)
        for group in trainer.optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self._batches >= self._finder.num_training * trainer.accumulate_grad_batches:
            # Skipped steps don't count, so `max_steps` may never be reached.
            trainer.should_stop = True
        step = trainer.global_step
        if step == len(self.rates):
            # This batch is inside an accumulation window.
            return
        self.rates.append(self._finder.rate(step - 1))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:
            self.losses.append(math.nan)
            return
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * float(loss)
        smoothed = self._average / (1 - _SMOOTHING ** (step + 1))
        if self._threshold is not None and step > 1 and smoothed > self._threshold * self._best:
            trainer.should_stop = True
        if step == 1 or smoothed < self._best:
            self._best = smoothed
        self.losses.append(smoothed)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.rates, self.losses = trainer.group.from_first((self.rates, self.losses))
