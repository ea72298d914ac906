"""The callback that records one step of a replay: its batches, losses and gradients, and the state before it.

    on_train_batch_start       the step's first batch: copy weights, optimizers and generators; every batch: copy it
    on_before_optimizer_step   copy the gradients, before any other hook and before clipping
    on_train_batch_end         keep the loss; at the end of the step, gather from all ranks, and let training end

It runs on every rank. With several processes, what it has recorded comes back with rank 0's attributes.
"""

from __future__ import annotations

import copy
import pdb
from collections.abc import Callable, Mapping
from typing import Any

import torch

from footplate.core import rng
from footplate.hardware.transfer import to_device
from footplate.replaying.retraining import Retraining, end_here

CPU = torch.device("cpu")


class StepRecorder(Retraining):
    """Records one step, and ends training after it.

    Args:
        step: the optimizer step, from 1.
        initial: see `Retraining`.

    Attributes:
        done: the step was recorded.
        epoch: its epoch.
        first_step: the number of steps before the first one that was trained.
        begins_inside: the checkpoint was made between two batches of the step, so the first batches are missing.
        batch_indices: the indices of its batches in the epoch.
        batches: its batches, for each rank.
        losses: the losses of these batches, for each rank; None for a batch that `training_step` skipped.
        gradients: by the names of parameters.
        weights: the module's state before the step.
        optimizer_states: before the step.
        generators: the states of the generators when the first batch was handed to `training_step`.
    """

    def __init__(self, step: int, initial: str = "") -> None:
        super().__init__(initial)
        self.step = step
        self.done = False
        self.epoch = 0
        self.first_step: int | None = None
        self.begins_inside = False
        self.batch_indices: list[int] = []
        self.batches: list[list[Any]] = []
        self.losses: list[list[torch.Tensor | None]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.weights: dict[str, Any] = {}
        self.optimizer_states: list[dict[str, Any]] = []
        self.generators: dict[str, Any] = {}

        self._own_batches: list[Any] = []
        self._own_losses: list[torch.Tensor | None] = []
        # The present batch is expected to make the step. With manual optimisation, this goes by the batch before.
        self._due = False
        self._steps_before, self._steps_of_batch = 0, 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first_step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        # With manual optimisation, a batch may make any number of steps. So each batch may be the one.
        by_hand = not pl_module.automatic_optimization
        if self.done or not (by_hand or self._is_next(trainer)):
            return
        self._due = trainer.global_step + (self._steps_of_batch if by_hand else 1) >= self.step
        self._steps_before = trainer.global_step

        # A window begins.
        accumulated = trainer.step.accumulated
        if not accumulated or not self._own_batches:
            self.begins_inside = bool(accumulated)
            self._begin(trainer, pl_module)
        self.batch_indices.append(batch_idx)
        self._own_batches.append(_copied(batch))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self._is_next(trainer):
            return
        of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.gradients = {
            name: _copied(trainer.parallel.whole(parameter.grad))
            for name, parameter in pl_module.named_parameters()
            if parameter.grad is not None and id(parameter) in of_optimizer
        }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.done or not self._own_batches:
            return
        self._own_losses.append(_copied(_loss_of(outputs)))
        self._steps_of_batch = max(1, trainer.global_step - self._steps_before)
        if trainer.global_step < self.step:
            return

        # All ranks end this step at this batch.
        self.done = True
        self.batches = trainer.group.gather_to_first(self._own_batches)
        self.losses = trainer.group.gather_to_first(self._own_losses)
        end_here(trainer)

    def under_debugger(self, training_step: Callable[..., Any], *arguments: Any) -> Any:
        """Call `training_step`, in the debugger if this is a batch of the step."""
        if self.done or not self._due:
            return training_step(*arguments)
        return pdb.Pdb().runcall(training_step, *arguments)

    def _is_next(self, trainer: Any) -> bool:
        return not self.done and trainer.global_step == self.step - 1

    def _begin(self, trainer: Any, module: Any) -> None:
        """Copy the state before the step."""
        self.epoch = trainer.current_epoch
        self.batch_indices, self._own_batches, self._own_losses = [], [], []
        parallel = trainer.parallel
        self.weights = _copied(parallel.whole(parallel.state_dict(module)))
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        self.optimizer_states = _copied(parallel.whole(states))
        self.generators = rng.capture(trainer.run.device)


def _copied(value: Any) -> Any:
    """Return a copy on the CPU that shares no memory with the original."""
    return copy.deepcopy(to_device(value, CPU))


def _loss_of(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
