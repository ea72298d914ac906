"""Manual optimisation in the eager step: average and unscale each optimizer's gradients once, at the right time.

`training_step` may call `manual_backward`, `clip_gradients` and `step()` in many orders, for several optimizers. Two
rules keep the gradients right:

- With several ranks, an optimizer's gradients are averaged once after each backward pass: before the first use of them,
  which is clipping or a step.
- With a loss scale (`precision="16-mixed"`), an optimizer's gradients are unscaled once between two updates of the
  scale. The scale is updated when all optimizers have stepped: before the next backward pass, or after the batch. An
  update between the steps of two optimizers would give the second another scale than its gradients have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.step.base import StepSpec
from footplate.step.phases import parameters_of
from footplate.step.window import Window

SCALED_CLOSURE = 'precision="16-mixed" can\'t scale a loss inside a closure: use "bf16-mixed".'


class ManualOptimisation:
    """The state between the calls of manual optimisation.

    Args:
        spec: what the step is made of.
        scaler: the `GradScaler`; None without a loss scale.
        window: knows how much the current batch counts.
    """

    def __init__(self, spec: StepSpec, scaler: Any, window: Window) -> None:
        self._strategy, self._distributed = spec.strategy, spec.strategy.is_distributed
        self._module, self._scaler, self._window = spec.module, scaler, window
        self._backward_passes = 0
        # Optimizers by id: averaged since the last backward pass; stepped since the last update of the scale; and the
        # number of backward passes after which the gradients were unscaled.
        self._averaged: set[int] = set()
        self._stepped: set[int] = set()
        self._unscaled: dict[int, int] = {}

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Prepare a backward pass; return the loss as this rank's batch counts."""
        self._averaged.clear()
        self.update_scale()
        self._backward_passes += 1
        return loss if self._window.batch_weight == 1.0 else loss * self._window.batch_weight

    def begin_clipping(self, optimizer: Any) -> None:
        """Average and unscale gradients before they are clipped."""
        self._average(optimizer)
        self._unscale(getattr(optimizer, "optimizer", optimizer), clips=True)

    def begin_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Average and unscale gradients before a step; return the closure to step with.

        Raises:
            ConfigError: a closure together with a loss scale.
        """
        if closure is None:
            self._average(optimizer)
        elif self._distributed:
            closure = self._averaging(optimizer, closure)
        if self._scaler is not None:
            if closure is not None:
                raise ConfigError(SCALED_CLOSURE)
            if id(optimizer) in self._stepped:
                self.update_scale()
            self._unscale(optimizer)
        return closure

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        """Call `optimizer.step()`, through the loss scale if there is one."""
        if self._scaler is None:
            return optimizer.step(**arguments) if closure is None else optimizer.step(closure, **arguments)
        result = self._scaler.step(optimizer, **arguments)
        self._stepped.add(id(optimizer))
        return result

    def update_scale(self) -> None:
        """Update the loss scale if an optimizer has stepped since the last update."""
        if self._scaler is not None and self._stepped:
            self._scaler.update()
            self._stepped.clear()
            self._unscaled.clear()

    def _unscale(self, optimizer: Optimizer, clips: bool = False) -> None:
        """Unscale an optimizer's gradients once between two updates of the scale.

        A later backward pass would add scaled gradients to unscaled ones. To clip these is an error of torch's.
        """
        if self._scaler is None:
            return
        unscaled_after = self._unscaled.get(id(optimizer))
        if unscaled_after is None or (clips and unscaled_after != self._backward_passes):
            self._scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = self._backward_passes

    def _average(self, optimizer: Any) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self._distributed and id(optimizer) not in self._averaged:
            self._averaged.add(id(optimizer))
            self._strategy.average(parameters_of(optimizer))
            self._strategy.examine_gradients(self._module)

    def _averaging(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are averaged whenever the optimizer runs it."""

        def averaged() -> Any:
            loss = closure()
            self._average(optimizer)
            return self._window.shared_loss(optimizer, loss)

        return averaged
