"""A training step by closure: the optimizer runs the forward and the backward pass itself.

Three kinds of step need a closure:

- An optimizer that evaluates the loss several times, as LBFGS does.
- An optimizer of another package whose `step` uses its closure, as SAM does.
- A module that overrides `optimizer_step`, which is given one.

The phases and their order are those of `phases.py`:

    optimizer.step(evaluate)
        evaluate:  the closure (forward → backpropagate)  →  prepare the gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.step.optimizers import StepOptimizer
from footplate.step.phases import Phases


def step_by_closure(
    phases: Phases,
    optimizer: Optimizer,
    batch: Any,
    batch_idx: int,
    call: Callable[[StepOptimizer, Callable[[], Any]], None],
    closure_loss: Callable[[Any], Any],
    name: str,
) -> Any:
    """Train on the last batch of a window, through a closure.

    Args:
        phases: the step.
        optimizer: its optimizer.
        batch: the batch.
        batch_idx: its index in the epoch.
        call: steps an optimizer with a closure, through the module's `optimizer_step` if it has one.
        closure_loss: the loss that the closure returns to the optimizer, from the output of `training_step`.
        name: the module's class, for the error.

    Returns:
        What `training_step` returned the last time.

    Raises:
        ConfigError: the module's `optimizer_step` didn't run the closure.
    """
    outputs: list[Any] = []

    @torch.enable_grad()
    def closure() -> Any:
        # The optimizer may evaluate the loss again: the window then begins again.
        if outputs:
            phases.accumulated = 0
        output = phases.forward(batch, batch_idx)
        outputs.append(output)
        phases.backpropagate(output, batch_idx)

        # As with one process, the optimizer must find no gradients of a batch that was skipped.
        if phases.all_skipped():
            optimizer.zero_grad(set_to_none=True)
        return closure_loss(output)

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        def evaluate() -> Any:
            loss = None if closure is None else closure()
            phases.prepare_gradients()
            return loss

        return optimizer.step(evaluate, **arguments)

    call(StepOptimizer(optimizer, step), closure)
    if not outputs:
        raise ConfigError(
            f"{name}.optimizer_step() never ran its optimizer_closure: call optimizer.step(closure=optimizer_closure)."
        )
    phases.accumulated = 0
    phases.count_step()
    return outputs[-1]
