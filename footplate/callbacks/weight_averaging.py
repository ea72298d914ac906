"""Average the weights over the steps of training: validate, save and end with the average, train on with the weights.

    trained     w₁ → w₂ → w₃ → …               what the optimizer goes on with
    average     a₁ → a₂ → a₃ → …               aᵢ₊₁ = decay · aᵢ + (1 - decay) · wᵢ₊₁

While the average is in the module (in a validation, and after training), the trained weights are kept aside. A checkpoint's
`state_dict` is always the average, so that whoever loads it gets the better model; the trained weights stand beside it,
as `current_model_state`, and a run that continues goes on with them. The names are those of Lightning's callback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

TRAINED = "current_model_state"
Pairs = tuple[list[Tensor], list[Tensor]]


class EMAWeightAveraging(Callback):
    """Keep an exponential moving average of the weights.

    Args:
        decay: what the average keeps of itself at an update; between 0 and 1.
        update_every_n_steps: update after every so many optimizer steps.
        update_starting_at_step: the step (from 0) whose weights the average begins with; until then it is what has been
            trained.
        use_buffers: average floating-point buffers too, such as running statistics; else they are the trained ones.

    Raises:
        ConfigError: a number that can't be, or a model that is sharded over ranks.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        use_buffers: bool = True,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMAWeightAveraging(decay={decay}): expected 0 or more and less than 1, such as 0.999.")
        if update_every_n_steps < 1:
            raise ConfigError(f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps}): expected 1 or more.")
        if update_starting_at_step < 0:
            raise ConfigError(
                f"EMAWeightAveraging(update_starting_at_step={update_starting_at_step}): expected 0 or more."
            )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.use_buffers = use_buffers
        self._forget()

    def _forget(self) -> None:
        self._aside: dict[str, Tensor] = {}  # the average; while that is in the module, the trained weights
        self._in_use = False  # whether the average is in the module
        self._steps = 0  # when the average was last looked at
        self._moving: Pairs = ([], [])  # what is averaged: aside, and in the module
        self._following: Pairs = ([], [])  # what is not, such as a count
        self._buffers: list[tuple[dict[str, Tensor | None], str, list[Tensor], int]] = []  # a step may put others there

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.parallel.sharded:
            raise ConfigError(
                'EMAWeightAveraging can\'t average a model whose weights are sharded over ranks: use strategy="ddp".'
            )

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        trained = pl_module.state_dict()
        if not self._aside:
            self._aside = _copied(trained)
        parameters = dict(pl_module.named_parameters(remove_duplicate=False))
        live = {**trained, **parameters}  # the parameters themselves, since their data may be replaced
        modules = dict(pl_module.named_modules())
        for name, value in trained.items():
            moves = value.is_floating_point() and (self.use_buffers or name in parameters)
            aside, here = self._moving if moves else self._following
            place, _, own = name.rpartition(".")
            if place in modules and own in modules[place]._buffers:
                self._buffers.append((modules[place]._buffers, own, here, len(here)))
            aside.append(self._aside[name])
            here.append(live[name])

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._steps:
            return  # inside an accumulation window
        self._steps = step
        index, (average, trained) = step - 1, self._moving
        if index > self.update_starting_at_step and index % self.update_every_n_steps:
            return
        for buffers, name, here, at in self._buffers:
            here[at] = buffers[name]  # pyright: ignore[reportArgumentType, reportCallIssue]
        if average and index <= self.update_starting_at_step:
            torch._foreach_copy_(average, trained)  # pyright: ignore[reportPrivateImportUsage]
        elif average:
            torch._foreach_lerp_(average, trained, 1.0 - self.decay)  # pyright: ignore[reportPrivateImportUsage]
        for kept, value in zip(*self._following, strict=True):
            kept.copy_(value)

    def on_validation_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.training_in_progress:
            self._exchange(pl_module)

    def on_validation_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.training_in_progress:
            self._exchange(pl_module)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._exchange(pl_module)

    def on_save_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if not self._aside:
            return  # nothing has been averaged yet
        if self._in_use:
            checkpoint[TRAINED] = self._aside
        else:
            checkpoint[TRAINED], checkpoint["state_dict"] = checkpoint["state_dict"], self._aside

    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        return weights if self._in_use or not self._aside else self._aside

    def on_load_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if TRAINED in checkpoint:
            self._aside = _copied(pl_module.state_dict())
            pl_module.load_state_dict(checkpoint[TRAINED])

    @torch.no_grad()
    def _exchange(self, module: Module) -> None:
        """The average into the module and what has been trained aside, or the other way round."""
        here = module.state_dict()
        kept = _copied(here)
        for name, value in here.items():
            value.copy_(self._aside[name])
            self._aside[name].copy_(kept[name])
        self._in_use = not self._in_use


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
