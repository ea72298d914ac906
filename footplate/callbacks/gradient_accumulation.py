"""Another number of accumulated batches from certain epochs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView


class GradientAccumulationScheduler(Callback):
    """Change `accumulate_grad_batches` at the beginning of epochs.

    Args:
        scheduling: from which epoch (from 0) on how many batches make a step, such as `{0: 8, 4: 2}`; one until the first.

    Raises:
        ConfigError: something else.
    """

    sees_weights = False

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        counts = [(epoch, 0) for epoch in scheduling] + [(batches, 1) for batches in scheduling.values()]
        if not scheduling or any(type(count) is not int or count < least for count, least in counts):
            raise ConfigError(
                f"GradientAccumulationScheduler({scheduling!r}): expected a dict of epochs, from 0, to batches, such as "
                "{0: 8, 4: 2}."
            )
        self.scheduling = {0: 1, **scheduling}

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """How many batches make a step in an epoch."""
        return self.scheduling[max(one for one in self.scheduling if one <= epoch)]

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} beside a GradientAccumulationScheduler: leave "
                "out one of them."
            )
        self.on_train_epoch_start(trainer, pl_module)  # which an epoch that is resumed doesn't call

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            trainer.accumulate_grad_batches = 1
