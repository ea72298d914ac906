"""The order of a training step, written once. The eager step and the captured step both follow it.

With automatic optimisation, each batch goes through these phases:

    forward → on_before_zero_grad, zero the gradients      (the first batch of an accumulation window only)
            → on_before_backward → backward pass → on_after_backward

At the end of an accumulation window follow:

    finish the gradients → on_before_optimizer_step → clip the gradients → optimizer step

To finish the gradients means to undo the loss scale and to divide by the weight of the window, where losses are sums
(`distributed/loss_sum.py`). If `training_step` returns None, the batch is skipped: no backward pass follows.

With manual optimisation, `training_step` itself calls `backward` and `optimizer_step`. Both run their hooks in the same
order.

`Phases` has the order as its own methods. Its abstract methods are the operations that the two steps do differently:

    eager.py                    runs the user's code for each batch
    xla/capture/traced_step.py  runs it once, with traced tensors, to make a graph of it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from footplate.distributed.gradient_norm import clip_by_torch

Hooks = tuple[Callable[..., Any], ...]


class Phases(ABC):
    """The order of a training step over the operations of one kind of step.

    Attributes:
        optimizer: the optimizer of automatic optimisation; None with manual optimisation.
        steps_by_closure: the optimizer evaluates the loss itself, through a closure (see `closure.py`).
        accumulated: batches of the current window that have added their gradients.
        changing: gradients, weights or optimizers may have changed since the batch began.
        bare: a window is one batch on one rank, and nothing is between forward, clearing, backward and step: no hook,
            no clipping, no loss scale, nothing that the module overrides.
        clips: the gradients are clipped.
        before_zero_grad: the overridden `on_before_zero_grad` hooks; the other hooks likewise.
        loss_of: the operation that takes the loss out of the output of `training_step`, or the sum of losses with its
            weight. The loss is None if the batch is skipped.
        contribution: the operation that weighs a loss, or a sum with its weight, as it counts in the window. It gives
            None if there is nothing to differentiate.
        all_skipped: the operation that tells if every rank has skipped every batch of the window.
        clear_gradients: the operation that clears the gradients of the optimizer's parameters.
        make_step: the operation that steps the optimizer.
        count_step: the operation that counts a step of `global_step`.
    """

    optimizer: Optimizer | None = None
    steps_by_closure: bool = False
    accumulated: int = 0
    changing: bool = False
    bare: bool = False
    clips: bool = True
    before_zero_grad: Hooks = ()
    before_backward: Hooks = ()
    after_backward: Hooks = ()
    before_optimizer_step: Hooks = ()

    # Attributes, since a method that only calls another object would cost each eager step a call.
    loss_of: Callable[[Any], tuple[Tensor | None, Tensor | None]]
    contribution: Callable[[Tensor | None, Tensor | None], Tensor | None]
    all_skipped: Callable[[], bool]
    clear_gradients: Callable[[], Any]
    make_step: Callable[[], Any]
    count_step: Callable[[], None]

    # The order with automatic optimisation

    def train_batch(self, batch: Any, batch_idx: int, ends_window: bool) -> Any:
        """Train on one batch; return what `training_step` returned."""
        if self.optimizer is None:
            return self.forward(batch, batch_idx)
        if self.steps_by_closure and ends_window:
            return self.step_by_closure(self.optimizer, batch, batch_idx)

        output = self.forward(batch, batch_idx)

        # The same order, where all phases between are empty: to find each of them empty would cost 1.5 µs a step.
        if self.bare and type(output) is Tensor:
            self.clear_gradients()
            self.changing = True
            output.backward()
            self.make_step()
            self.count_step()
            return output

        self.backpropagate(output, batch_idx)
        if ends_window:
            self.end_window()
        return output

    def backpropagate(self, output: Any, batch_idx: int) -> None:
        """Add the gradients of a batch to those of its window. A window begins with cleared gradients."""
        loss, weight = self.loss_of(output)
        if not self.accumulated:
            for hook in self.before_zero_grad:
                hook(self.optimizer)
            self.zero_gradients(batch_idx)

        loss = self.contribution(loss, weight)
        if loss is None:
            return
        for hook in self.before_backward:
            hook(loss)
        self.backward_pass(loss)
        for hook in self.after_backward:
            hook()
        self.accumulated += 1

    def end_window(self) -> None:
        """Step with the gradients of the window. Nothing happens if every batch of it was skipped on every rank."""
        if not self.accumulated:
            return
        if self.all_skipped():
            self.accumulated = 0
            return
        self.prepare_gradients()
        self.make_step()
        self.accumulated = 0
        self.count_step()

    def prepare_gradients(self) -> None:
        """Make the gradients of a window ready for the optimizer."""
        self.finish_gradients()
        for hook in self.before_optimizer_step:
            hook(self.optimizer)
        if self.clips:
            self.clip()

    # The order with manual optimisation

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run `self.manual_backward(loss)`."""
        loss = self.begin_manual_backward(loss)
        for hook in self.before_backward:
            hook(loss)
        self.differentiate(loss, *args, **kwargs)
        for hook in self.after_backward:
            hook()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        """Run the `step()` of an optimizer from `self.optimizers()`; `arguments` go to the optimizer."""
        closure = self.begin_manual_step(optimizer, closure, arguments)
        for hook in self.before_optimizer_step:
            hook(optimizer)
        result = self.make_manual_step(optimizer, closure, arguments)
        self.count_step()
        return result

    # The operations

    @abstractmethod
    def forward(self, batch: Any, batch_idx: int) -> Any:
        """Call `training_step`."""

    @abstractmethod
    def zero_gradients(self, batch_idx: int) -> None:
        """Clear the gradients at the beginning of a window, by the module's `optimizer_zero_grad` if it has one."""

    @abstractmethod
    def backward_pass(self, loss: Tensor) -> None:
        """Differentiate the loss of a batch, and average the gradients where several devices meet."""

    @abstractmethod
    def differentiate(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call `loss.backward()`, or the module's own `backward`."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Undo the loss scale, and divide by the weight of the window."""

    @abstractmethod
    def clip(self) -> None:
        """Clip the gradients as the trainer's arguments or the module's `configure_gradient_clipping` say."""

    @abstractmethod
    def begin_manual_backward(self, loss: Tensor) -> Tensor:
        """Prepare a backward pass of manual optimisation; return the loss to differentiate."""

    @abstractmethod
    def begin_manual_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """Average and unscale the gradients before a step of manual optimisation; return the closure to step with."""

    @abstractmethod
    def make_manual_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> Any:
        """Call `optimizer.step()` with manual optimisation; return its result."""

    def step_by_closure(self, optimizer: Optimizer, batch: Any, batch_idx: int) -> Any:
        """Train on the last batch of a window through a closure; return what `training_step` returned."""
        raise NotImplementedError


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradients(optimizer: Any, value: float | None, algorithm: str) -> None:
    """Clip the gradients of an optimizer's parameters in place, by "norm" or by "value"; None or 0 clips nothing."""
    if value:
        clip_by_torch(parameters_of(optimizer), value, algorithm)
