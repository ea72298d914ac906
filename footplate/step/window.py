"""The accumulation window of the eager step: how much each batch counts, and what the gradients are divided by.

A window is the batches between two optimizer steps. Three things decide how a batch counts in it:

- A plain loss is divided by the number of batches in the window.
- A sum of losses isn't. Its weight is added to the window's, and the gradients are divided by that in the end
  (`distributed/loss_sum.py`).
- With several ranks, a loss is multiplied by the rank's share of the global batch.

With several ranks, a rank that skips a batch runs a backward pass of zeros, since other ranks may wait for its
gradients. If all ranks skip all batches of a window, there is no optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.distributed.loss_sum import loss_sum_of, mean
from footplate.step.base import StepSpec
from footplate.step.optimizers import wants_closure


class Window:
    """The current accumulation window on this rank.

    Attributes:
        batches: the batches of a window, `accumulate_grad_batches`.
        single: True if a window is one batch on one rank, so that nothing is summed.
        batch_weight: the factor of the current batch's loss.
        counts: True if this rank has not skipped every batch of the window so far.
        weight: the sum of the weights so far; None if losses are plain.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._module, self._name = spec.module, type(spec.module).__name__
        self._strategy, self._group, self._device = spec.strategy, spec.group, spec.device
        self._distributed = spec.strategy.is_distributed
        # The mps device has no float64.
        self._dtype = torch.float32 if spec.device.type == "mps" else torch.float64
        self.set_batches(spec.accumulate_grad_batches)
        self.batch_weight = 1.0
        self.counts = False
        self.weight: Tensor | None = None
        # True if this rank's first batch with a loss returned a sum, and if any rank's did.
        self._returned_sum: bool | None = None
        self._ranks_return_sums: bool | None = None

    def set_batches(self, batches: int) -> None:
        """Set how many batches a window has."""
        self.batches = batches
        self.single = batches == 1 and not self._distributed

    def begin(self) -> None:
        """Begin a window."""
        self.weight = None
        self.counts = False

    # The loss of a batch

    def loss_of(self, output: Any) -> tuple[Tensor | None, Tensor | None]:
        """The loss of a batch, or its sum of losses with its weight; see `Phases.loss_of`."""
        # Plain losses and sums may only be mixed where nothing is summed.
        if self.single and type(output) is Tensor:
            return output, None
        loss_sum = self._loss_sum(output)
        return (self._plain_loss(output), None) if loss_sum is None else loss_sum

    def _loss_sum(self, output: Any) -> tuple[Tensor, Tensor] | None:
        """The sum of losses and its weight, if the step returns these: from every batch, or from none."""
        loss_sum = loss_sum_of(output, self._name, self._dtype)
        if output is None:
            return None
        returns_sum = loss_sum is not None
        if self._returned_sum is None:
            self._returned_sum = returns_sum
        if self._returned_sum != returns_sum:
            now, before = ("loss_sum", "a loss") if returns_sum else ("a loss", "loss_sum")
            raise ConfigError(
                f"{self._name}.training_step() returned {now} for this batch and {before} for earlier ones: "
                'return {"loss_sum": …, "weight": …} for every batch, or for none.'
            )
        return loss_sum

    def _plain_loss(self, output: Any) -> Tensor | None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and not isinstance(output, Mapping):
            return None
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"{self._name}.training_step() returned {type(output).__name__}: expected the loss as a tensor, a dict "
                'with the key "loss", or None to skip the batch.'
            )
        return loss

    def with_mean(self, output: Any) -> Any:
        """The output of `training_step`. If it has a sum of losses, the batch's mean is added as "loss"."""
        loss_sum = self._loss_sum(output)
        return output if loss_sum is None else {**output, "loss": mean(*loss_sum)}

    def closure_loss(self, optimizer: Optimizer, output: Any) -> Any:
        """The loss that the closure of automatic optimisation returns to the optimizer."""
        loss_sum = self._loss_sum(output)
        if loss_sum is None:
            return self.shared_loss(optimizer, self._plain_loss(output))
        total, weight = loss_sum
        if self._distributed and wants_closure(optimizer):
            counts = float(self.batch_weight != 0.0)
            total, weight = (self._strategy.mean(number.detach().double() * counts) for number in (total, weight))
        return mean(total, weight)

    def shared_loss(self, optimizer: Optimizer, loss: Any) -> Any:
        """The loss for an optimizer that decides by it whether to go on (LBFGS): the loss over all ranks."""
        if not self._distributed or not wants_closure(optimizer):
            return loss
        own = torch.zeros((), device=self._device) if loss is None else torch.as_tensor(loss, device=self._device)
        return self._strategy.mean(own.detach().double() * self.batch_weight)

    # What a batch adds to its window

    def contribution(self, loss: Tensor | None, weight: Tensor | None) -> Tensor | None:
        """The loss to differentiate; None if this process alone decides to skip the batch."""
        if loss is None and not self._distributed:
            return None
        if self.single and weight is None:
            return loss
        self.counts = self.counts or (loss is not None and self.batch_weight != 0.0)
        if loss is None:
            loss = self._zero_loss()
        if weight is not None:
            return self._add_weight(loss, weight)
        if self.batches != 1:
            loss = loss / self.batches
        if self.batch_weight != 1.0:
            loss = loss * self.batch_weight
        return loss

    def _zero_loss(self) -> Tensor:
        """A loss of 0 for a batch that this rank skips: other ranks may wait for its gradients."""
        if not self._strategy.skips:
            raise ConfigError(
                f'training_step() returned None: with strategy="{self._strategy.name}" every rank needs a loss from every '
                "batch. Return a loss times 0 instead."
            )
        learning = (parameter for parameter in self._module.parameters() if parameter.requires_grad)
        return torch.stack([parameter.sum() * 0.0 for parameter in learning]).sum()

    def _add_weight(self, total: Tensor, weight: Tensor) -> Tensor:
        # A batch weight of 0 means that this rank was given the rows of another rank.
        if self.batch_weight == 0.0:
            total, weight = total * 0.0, weight * 0.0
        if self._distributed and not self._strategy.own_gradients:
            weight = self._strategy.mean(weight)
        self.weight = weight if self.weight is None else self.weight + weight
        return total

    # The end of a window

    def total_weight(self) -> Tensor | None:
        """The weight of the window, averaged over the ranks as the gradients are; None if losses are plain."""
        if not self._distributed or not self._strategy.own_gradients:
            return self.weight
        # A rank that has skipped all its batches can't know whether the step returns sums: the ranks tell each other.
        if self._ranks_return_sums is None:
            self._ranks_return_sums = bool(self._group.maximum([int(self.weight is not None)])[0])
        if not self._ranks_return_sums:
            return None
        nothing = torch.zeros((), dtype=self._dtype, device=self._device)
        return self._strategy.mean(nothing if self.weight is None else self.weight)

    def all_skipped(self) -> bool:
        """Return True if all ranks have skipped all batches of the window."""
        return self._distributed and not self.counts and not self._strategy.anyone_counts()

    def agree_on_counts(self) -> None:
        """Make the window count on every rank if it counts on any rank."""
        if self._distributed:
            self.counts = bool(self._group.maximum([int(self.counts)])[0])

    def state_dict(self) -> dict[str, Any]:
        """The state of a window in progress."""
        state: dict[str, Any] = {"counts": self.counts}
        return state if self.weight is None else {**state, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.counts = state.get("counts", state.get("accumulated", 0) > 0)
        weight = state.get("weight")
        self.weight = None if weight is None else weight.to(self._device, self._dtype)
