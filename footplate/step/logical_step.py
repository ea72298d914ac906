"""The eager step with logical ranks: one batch of each of this process's logical ranks makes one batch of the step.

    on_before_zero_grad, zero the gradients                (the first batch of an accumulation window only)
    for each logical rank of this process:                 with its own random draws, and `self.log` as that rank
        forward → on_before_backward → backward pass
    sum the gradients of all logical ranks, on all processes                   (`distributed/logical_ddp.py`)
    on_after_backward
    finish the gradients → on_before_optimizer_step → clip → optimizer step    (the last batch of a window only)

So `training_step` and `on_before_backward` run once for each logical rank, and all other hooks once on each process. They
find the same gradients on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from footplate.core.errors import ConfigError
from footplate.distributed.logical_ddp import LogicalDDP
from footplate.hardware.transfer import detach
from footplate.step.base import StepSpec
from footplate.step.eager import EagerStep


class LogicalStep(EagerStep):
    """See the module's docstring.

    Args:
        spec: its strategy is a `LogicalDDP`.
        enter: called with the position of a logical rank among those of this process, before its forward pass; with None,
            before anything that is not a logical rank's. It seeds the generators.
    """

    def __init__(self, spec: StepSpec, enter: Callable[[int | None], None]) -> None:
        super().__init__(spec)
        assert isinstance(spec.strategy, LogicalDDP)
        self._logical = spec.strategy
        self._enter = enter
        self._sums: bool | None = None
        _check(self, spec)
        # As with a loss scale, an optimizer that can do without a closure gets none.
        self.steps_by_closure = self._optional_closure = False

    def _train(self, batch: Sequence[Any], batch_idx: int, ends_window: bool) -> Any:
        logical, window, begins_window = self._logical, self._window, not self.accumulated
        logical.begin_batch(ends_window)
        if begins_window:
            for hook in self.before_zero_grad:
                hook(self.optimizer)
            self.zero_gradients(batch_idx)

        # From here on, a failure leaves a state that can't be saved.
        self.changing = True
        logical.set_gradients_aside(begins_window)
        outputs, weights = [], []
        for position, own_batch in enumerate(batch):
            self._enter(position)
            logical.begin_leaf(position)
            window.batch_weight = 1.0 if self.spec.weight is None else self.spec.weight(batch_idx)
            output = self.forward(own_batch, batch_idx)
            weights.append(self._differentiate_leaf(output))
            logical.end_leaf()
            outputs.append(output)
        self._enter(None)
        logical.end_batch()
        self._add_weight(weights)
        for hook in self.after_backward:
            hook()
        self.accumulated += 1

        if ends_window:
            self.end_window()
        else:
            # A checkpoint inside the window has this once, for all processes.
            window.counts = window.counts or logical.anyone_counts()
        self.changing = False
        self.outputs = [
            output.detach() if type(output) is Tensor else detach(window.with_mean(output)) for output in outputs
        ]
        return self.outputs[0]

    def _differentiate_leaf(self, output: Any) -> Tensor | None:
        """Run the backward pass of a logical rank. Return the weight of its sum of losses; None if its loss is plain."""
        window = self._window
        loss, weight = self.loss_of(output)
        if weight is None:
            loss = self.contribution(loss, None)
        else:
            assert loss is not None
            window.counts = window.counts or window.batch_weight != 0.0
            if window.batch_weight == 0.0:
                # This logical rank was given the rows of another.
                loss, weight = loss * 0.0, weight * 0.0
        for hook in self.before_backward:
            hook(loss)
        assert loss is not None
        self.backward_pass(loss)
        return weight

    def _add_weight(self, weights: list[Tensor | None]) -> None:
        """Add the weight of this batch, over all logical ranks, to that of the window."""
        window = self._window
        if self._sums is None:
            # A process whose logical ranks have all skipped can't know it.
            known = window._returned_sum
            plain, sums = self.spec.group.maximum([int(known is False), int(known is True)])
            if plain and sums:
                raise ConfigError(
                    f'{type(self.spec.module).__name__}.training_step() returned "loss_sum" on one logical rank and a '
                    'plain loss on another: return {"loss_sum": …, "weight": …} for every batch, or for none.'
                )
            if plain or sums:
                self._sums = bool(sums)
        if not self._sums:
            return
        nothing = torch.zeros((), dtype=window._dtype, device=self.spec.device)
        mean = self._logical.mean_of_leaves([nothing if weight is None else weight for weight in weights])
        window.weight = mean if window.weight is None else window.weight + mean


def _check(step: LogicalStep, spec: StepSpec) -> None:
    """Refuse a step that needs the gradients in another way.

    Raises:
        ConfigError: an optimizer that evaluates the loss itself, or manual optimisation.
    """
    name, ranks = type(spec.module).__name__, f"logical_ranks={step._logical.total}"
    if step.optimizer is None and not spec.module.automatic_optimization:
        raise ConfigError(
            f"{ranks}: {name} optimises by hand, so its gradients can't be kept apart. Use automatic optimisation, or "
            "leave logical_ranks out."
        )
    if step._own_step:
        raise ConfigError(
            f"{ranks}: {name} overrides optimizer_step(), whose closure would have to evaluate all logical ranks. Use the "
            "hook on_before_optimizer_step() or a scheduler, or leave logical_ranks out."
        )
    if step.steps_by_closure and not step._optional_closure:
        raise ConfigError(
            f"{ranks}: {type(step.optimizer).__name__} evaluates the loss itself, through a closure. Use an optimizer that "
            "steps with given gradients, or leave logical_ranks out."
        )
