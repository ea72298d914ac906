"""Stochastic weight averaging: train the last epochs at another learning rate, and end with the average of their weights.

    epoch      0 … swa_start - 1          swa_start … max_epochs - 1                    end of training
    rate       your scheduler's           SWALR: annealed to swa_lrs                    –
    average    –                          updated at the start of each epoch            into the module; batch norm updated

Names, numbers and order are those of Lightning's callback. During training, the module and a checkpoint's `state_dict` have
the trained weights. A checkpoint also holds the average, and a resumed run continues with both.

The running statistics of batch norm belong to the trained weights. So after training, `training_step` runs once more over
the training data, without gradients and logging, and batch norm collects the statistics of the average. (Lightning does
this in an additional epoch, with hooks and logging.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError
from footplate.step.optimizers import SchedulerConfig

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class StochasticWeightAveraging(Callback):
    """Average the weights of the last epochs. The module's docstring shows the schedule.

    Args:
        swa_lrs: the learning rate of these epochs, or one for each parameter group.
        swa_epoch_start: the first of these epochs, from 1; or a fraction of `max_epochs`.
        annealing_epochs: the number of epochs over which the learning rate changes to `swa_lrs`.
        annealing_strategy: "cos" or "linear".
        avg_fn: a function of (average, weights, number of averaged models) that returns the new average; the mean by
            default.
        device: the device of the average; None for the device of the weights.

    Raises:
        ConfigError: a number is out of range, there are several optimizers or schedulers, optimisation is manual, or the
            model is sharded.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=4, callbacks=[fp.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=3)])
        >>> trainer.fit(model, train)
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or any(not isinstance(rate, float) or rate <= 0 for rate in rates):
            raise ConfigError(
                f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}): expected a float above 0, or a list of them."
            )
        if (
            swa_epoch_start < 0
            or (type(swa_epoch_start) is int and swa_epoch_start < 1)
            or (isinstance(swa_epoch_start, float) and swa_epoch_start > 1)
        ):
            raise ConfigError(
                f"StochasticWeightAveraging(swa_epoch_start={swa_epoch_start!r}): expected an epoch, from 1, or a fraction "
                "of max_epochs, from 0.0 to 1.0."
            )
        if annealing_strategy not in ("cos", "linear"):
            raise ConfigError(
                f'StochasticWeightAveraging(annealing_strategy="{annealing_strategy}"): expected "cos" or "linear".'
            )
        self._swa_lrs = swa_lrs
        self._swa_epoch_start = swa_epoch_start
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy: Literal["cos", "linear"] = annealing_strategy
        self._avg_fn = avg_fn or _mean
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self.n_averaged = 0
        self._latest_update_epoch = -1
        self._begun = False
        self._average: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": self.n_averaged,
            "latest_update_epoch": self._latest_update_epoch,
            "begun": self._begun,
            "average_model_state": self._average,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_averaged = state_dict["n_averaged"]
        self._latest_update_epoch = state_dict["latest_update_epoch"]
        self._begun = state_dict["begun"]
        self._average = {name: value.clone() for name, value in state_dict["average_model_state"].items()}

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._reset()

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        limited = trainer.max_epochs not in (None, -1)
        faults = {
            'strategy="fsdp": the weights are sharded over ranks': trainer.parallel.sharded,
            f'accelerator="{trainer.accelerator.name}": it keeps the weights': trainer.accelerator.owns_weights,
            "manual optimisation": not pl_module.automatic_optimization,
            f"{len(trainer.optimizers)} optimizers": len(trainer.optimizers) != 1,
            f"{len(trainer.lr_scheduler_configs)} schedulers": len(trainer.lr_scheduler_configs) > 1,
            "a fraction of max_epochs=-1": isinstance(self._swa_epoch_start, float) and not limited,
        }
        fault = next((name for name, holds in faults.items() if holds), None)
        if fault is not None:
            raise ConfigError(
                f"StochasticWeightAveraging can't be used with {fault}. It needs one optimizer, at most one scheduler, "
                "weights that aren't sharded and, for a float, max_epochs."
            )
        if self._begun:
            # The states of optimizer and scheduler are restored next, and must match.
            self._take_over(trainer)

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        epoch = trainer.current_epoch
        if not self._first(trainer) <= epoch < self._epochs(trainer):
            return
        if not self._begun:
            self._begun = True
            self._take_over(trainer)
        if epoch > self._latest_update_epoch:
            self._latest_update_epoch = epoch
            self._update(pl_module)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        limited = trainer.max_epochs not in (None, -1)
        if not self.n_averaged or (limited and trainer.current_epoch != trainer.max_epochs):
            return

        for name, parameter in pl_module.named_parameters():
            parameter.detach().copy_(self._average[name])
        norms = [part for part in pl_module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
        if norms and limited:
            _update_running_stats(trainer, norms)

    def _first(self, trainer: TrainerView) -> int:
        start = self._swa_epoch_start
        return max((int((trainer.max_epochs or 0) * start) if isinstance(start, float) else start) - 1, 0)

    def _epochs(self, trainer: TrainerView) -> float:
        return float("inf") if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)

    def _take_over(self, trainer: TrainerView) -> None:
        """Replace the scheduler by SWALR."""
        optimizer = trainer.optimizers[0]
        rates = self._swa_lrs if isinstance(self._swa_lrs, list) else [self._swa_lrs] * len(optimizer.param_groups)
        for rate, group in zip(rates, optimizer.param_groups, strict=True):
            group["initial_lr"] = rate
        last = trainer.max_epochs if self._annealing_strategy == "cos" and trainer.max_epochs is not None else -1
        scheduler = SWALR(optimizer, rates, self._annealing_epochs, self._annealing_strategy, last_epoch=last)  # pyright: ignore[reportArgumentType]
        trainer.replace_schedulers([SchedulerConfig(scheduler)])

    @torch.no_grad()
    def _update(self, module: Module) -> None:
        for name, parameter in module.named_parameters():
            weights = parameter.detach().to(self._device or parameter.device)
            if self.n_averaged:
                number = torch.tensor(self.n_averaged, device=weights.device)
                weights = self._avg_fn(self._average[name].to(weights.device), weights, number)
            self._average[name] = weights.clone()
        self.n_averaged += 1


def _mean(average: Tensor, weights: Tensor, number: Tensor) -> Tensor:
    return average + (weights - average) / (number + 1)


def _update_running_stats(trainer: TrainerView, norms: list[_BatchNorm]) -> None:
    """Collect the running statistics of batch norm over one pass of the training data."""
    momenta = [part.momentum for part in norms]
    for part in norms:
        part.reset_running_stats()
        # None means the mean over all batches.
        part.momentum = None
    try:
        trainer.run_forward()
    finally:
        for part, momentum in zip(norms, momenta, strict=True):
            part.momentum = momentum
