"""Change the number of accumulated batches at certain epochs."""

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
        scheduling: the number of batches of an optimizer step by the epoch, from 0, at which it begins, such as
            `{0: 8, 4: 2}`. Before the first epoch of the dict, it is 1.

    Raises:
        ConfigError: `scheduling` is no such dict.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=2, callbacks=[fp.GradientAccumulationScheduler({0: 4, 1: 2})])
        >>> trainer.fit(model, train)
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
        """Return the number of batches of an optimizer step in an epoch."""
        return self.scheduling[max(begin for begin in self.scheduling if begin <= epoch)]

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} together with a GradientAccumulationScheduler: "
                "remove one of them."
            )
        # If training resumes in the middle of an epoch, the trainer doesn't call this hook.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            trainer.accumulate_grad_batches = 1
