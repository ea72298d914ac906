"""The training step while it is captured: the operations of `step/phases.py` with traced tensors, run once.

The order is the one of `phases.py`. Three things differ from the eager step:

- A batch that is skipped leaves nothing behind, not even cleared gradients: each captured step begins without
  gradients. What a window has summed so far is part of the state, and is added after the backward pass.
- Where several devices run the step, the gradients are averaged after the backward pass, before they are added to the
  window's sum. The result is the same, and every device has the same state after every batch.
- With manual optimisation, no gradient outlives the step. A step that needs one from the batch before is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.distributed.loss_sum import loss_sum_of, mean, refuse_loss_sum
from footplate.step.optimizers import StepOptimizer
from footplate.step.phases import Phases, clip_gradients, parameters_of
from footplate.step.precision import Precision
from footplate.step.xla.capture import optimizer_replay, torch_tracing
from footplate.step.xla.capture.averaging_op import average_gradients, average_logs, average_step
from footplate.step.xla.capture.eager_operations import kernels_of
from footplate.step.xla.capture.module_view import Logs, call_step, viewed_module
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.state import Installed
from footplate.step.xla.capture.torch_optimizers import TensorRates, begin_momentum


@dataclass(frozen=True)
class Settings:
    """The trainer's settings of a step.

    Attributes:
        gradient_clip_val: the norm or value to clip to; None or 0 for none.
        gradient_clip_algorithm: "norm" or "value".
        averages: several devices will run the step.
        precision: of the forward pass.
        accumulate_grad_batches: the batches of a window.
        ends_window: the optimizer steps after this batch.
        parts: the number of parts that the rows of the batch are cut into. A sum over the rows is the average over the
            parts times this number.
    """

    gradient_clip_val: float | None
    gradient_clip_algorithm: str
    averages: bool
    precision: Precision
    accumulate_grad_batches: int
    ends_window: bool
    parts: int


class TracedStep(Phases):
    """A training step that is traced. The traced tensors are already installed in the module.

    Args:
        name: the step's name for errors, such as `"Classifier.training_step"`.
        module: the user's module.
        optimizers: its optimizers.
        settings: see `Settings`.
        logs: collects what the step logs.
    """

    def __init__(self, name: str, module: Any, optimizers: list[Optimizer], settings: Settings, logs: Logs) -> None:
        self._name, self._module, self._optimizers = name, module, optimizers
        self._settings, self._logs = settings, logs
        self._kernels = {id(optimizer): kernels_of(optimizer) for optimizer in optimizers}
        self.optimizer = optimizers[0] if module.automatic_optimization else None
        self.before_zero_grad = _own_hook(module, "on_before_zero_grad")
        self.before_backward = _own_hook(module, "on_before_backward")
        self.after_backward = _own_hook(module, "on_after_backward")
        self.before_optimizer_step = _own_hook(module, "on_before_optimizer_step")
        self._own_backward = overrides(module, "backward")
        self._own_zero_grad = overrides(module, "optimizer_zero_grad")
        self._own_clipping = overrides(module, "configure_gradient_clipping")

        # Automatic optimisation: the loss that comes back, with the weight beside it where it is a sum.
        self._sums = False
        self._loss_type = torch.get_default_dtype()
        self._result: Tensor
        self._averaged_logs: dict[str, Tensor] = {}

        # Manual optimisation: optimizers by id whose gradients are averaged, and cleared.
        self._averaged: set[int] = set()
        self._cleared: set[int] = set()
        self._stepped_uncleared: list[Optimizer] = []
        self._frozen: list[Tensor] = []

    def run(self, installed: Installed, batch: Any) -> Any:
        """Run the whole step.

        Returns:
            The detached loss, in a dictionary if `training_step` returned one; None if the batch is skipped.
        """
        self._installed = installed
        methods: dict[str, Callable[..., Any]] = {
            "clip_gradients": self._clip_by_hand,
            "lr_schedulers": self._refuse_schedulers,
        }
        if not self._module.automatic_optimization:
            methods |= {
                "optimizers": self._optimizers_by_hand,
                "manual_backward": self.backward,
                "toggle_optimizer": self._toggle,
                "untoggle_optimizer": self._untoggle,
                "toggled_optimizer": self._toggled,
            }
        with viewed_module(self._module, self._logs, methods), torch.enable_grad():
            output = self.train_batch(batch, 0, self._settings.ends_window)
            return self._automatic_result(output) if self.optimizer is not None else self._manual_result(output)

    def forward(self, batch: Any, batch_idx: int) -> Any:
        precision = self._settings.precision
        with precision.forward_context(torch.device("cpu")):
            batch = precision.convert_batch(batch)
            return call_step(self._module.training_step, "training_step", batch, self._logs.counters)

    # Automatic optimisation

    def backpropagate(self, output: Any, batch_idx: int) -> None:
        if output is not None:
            super().backpropagate(output, batch_idx)
        elif self._settings.averages:
            # Buffers and logs are averaged also of a batch that is skipped.
            self._average_step([], torch.zeros(()))

    def loss_of(self, output: Any) -> tuple[Tensor | None, Tensor | None]:
        sums = loss_sum_of(output, type(self._module).__name__, self._logs.counters.floating)
        self._sums = sums is not None
        if sums is None:
            loss = _loss_in(output)
            if not isinstance(loss, Tensor):
                raise ConfigError(
                    f"{self._name}() returned {type(output).__name__}: expected the loss as a tensor, a dict with "
                    '"loss", or None to skip the batch.'
                )
            self._result = loss.detach()
            return loss, None

        # The batches of a window may be cut into different numbers of parts, so sums are those of the whole batch.
        if self._settings.parts != 1:
            sums = sums[0] * self._settings.parts, sums[1] * self._settings.parts
        self._result = torch.stack([sums[0].detach().reshape(()).to(sums[1].dtype), sums[1]])
        return sums

    def zero_gradients(self, batch_idx: int) -> None:
        assert self.optimizer is not None
        if self._own_zero_grad:
            epoch, index = (self._logs.counters.number(name) for name in ("current_epoch", "batch_idx"))
            self._module.optimizer_zero_grad(epoch, index, self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def contribution(self, loss: Tensor | None, weight: Tensor | None) -> Tensor | None:
        assert loss is not None
        if self._settings.accumulate_grad_batches != 1 and weight is None:
            loss = loss / self._settings.accumulate_grad_batches
        self._loss_type = loss.dtype
        return loss

    def backward_pass(self, loss: Tensor) -> None:
        self.differentiate(loss)
        if self._settings.averages:
            self._result = self._average_step(self._installed.parameters, self._result)
        self._installed.accumulate(self._result[1] if self._sums else None)
        self._averaged_logs = dict(self._logs.values)

    def differentiate(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._own_backward:
            self._module.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def all_skipped(self) -> bool:
        return False

    def finish_gradients(self) -> None:
        if self._sums:
            self._installed.divide_gradients()

    def clip(self) -> None:
        value, algorithm = self._settings.gradient_clip_val, self._settings.gradient_clip_algorithm
        if self._own_clipping:
            self._module.configure_gradient_clipping(self.optimizer, value, algorithm)
        else:
            clip_gradients(self.optimizer, value, algorithm)

    def make_step(self) -> None:
        assert self.optimizer is not None
        self._replay(self.optimizer)

    def count_step(self) -> None:
        self._logs.counters.steps += 1

    def _automatic_result(self, output: Any) -> Any:
        if output is None:
            return None
        result = self._result
        if self._sums:
            result = mean(result[0], result[1]).to(self._loss_type)

        # Hooks may have logged after the backward pass, when everything else was averaged.
        if self._settings.averages:
            values = self._logs.values
            later = [name for name, value in values.items() if value is not self._averaged_logs.get(name)]
            average_logs(values, self._logs.reductions, later)
        return _like(output, result)

    def _replay(self, optimizer: Optimizer) -> None:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                torch_tracing.node_of(parameter.grad).meta["gradient"] = names.get(id(parameter), "")
        with torch_tracing.noting(only_captured=True):
            begin_momentum(optimizer)
        with TensorRates(), torch_tracing.noting(optimizer=self._kernels[id(optimizer)]):
            optimizer_replay.step(optimizer)

    def _average_step(self, parameters: list[Tensor], loss: Tensor) -> Tensor:
        logs = self._logs
        return average_step(parameters, loss, logs.values, logs.reductions, list(self._module.buffers()))

    # Manual optimisation

    def begin_manual_backward(self, loss: Tensor) -> Tensor:
        self._averaged.clear()
        return loss

    def begin_manual_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> None:
        if closure is not None:
            raise CaptureError(
                f"{self._name} gives optimizer.step() a closure, which can't be captured: call backward before."
            )
        if arguments:
            raise CaptureError(
                f"{self._name} gives optimizer.step() {', '.join(arguments)}, which can't be captured: "
                "set it in the optimizer's param_groups."
            )
        self._average(optimizer)
        if id(optimizer) not in self._cleared:
            self._stepped_uncleared.append(optimizer)

    def make_manual_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> None:
        self._replay(optimizer)

    def _manual_result(self, output: Any) -> Any:
        refuse_loss_sum(output, self._name)
        loss = _loss_in(output)
        result = loss.detach() if isinstance(loss, Tensor) else torch.zeros(())
        if self._settings.averages:
            result = self._average_step([], result)
        for optimizer in self._stepped_uncleared:
            if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
                raise CaptureError(
                    f"{self._name} steps a {type(optimizer).__name__} whose gradients it never clears: a captured step "
                    "keeps no gradients from one batch to the next. Call its zero_grad() in each step."
                )
        return _like(output, result)

    def _average(self, optimizer: Any) -> None:
        """Average an optimizer's gradients over the devices, once after each backward pass."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self._settings.averages and id(optimizer) not in self._averaged:
            self._averaged.add(id(optimizer))
            average_gradients(parameters_of(optimizer))

    # Methods of the module

    def _clip_by_hand(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        settings = self._settings
        if not self._module.automatic_optimization:
            self._average(optimizer)
        clip_gradients(
            optimizer,
            settings.gradient_clip_val if gradient_clip_val is None else gradient_clip_val,
            gradient_clip_algorithm or settings.gradient_clip_algorithm,
        )

    def _refuse_schedulers(self) -> Any:
        raise CaptureError(
            f"{self._name} calls self.lr_schedulers(): Python runs a captured step once, so a scheduler would step "
            "once. Step it in a hook between steps (on_train_batch_end), or let the trainer do it."
        )

    def _optimizers_by_hand(self, use_pl_optimizer: bool = True) -> Any:
        optimizers = [ManualOptimizer(optimizer, self.optimizer_step, self._cleared) for optimizer in self._optimizers]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _toggle(self, optimizer: Any) -> None:
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for other in self._optimizers:
            for parameter in parameters_of(other):
                if id(parameter) not in own and parameter.requires_grad:
                    parameter.requires_grad = False
                    self._frozen.append(parameter)

    def _untoggle(self, optimizer: Any) -> None:
        while self._frozen:
            self._frozen.pop().requires_grad = True

    @contextmanager
    def _toggled(self, optimizer: Any) -> Iterator[None]:
        self._toggle(optimizer)
        try:
            yield
        finally:
            self._untoggle(optimizer)


class ManualOptimizer(StepOptimizer):
    """An optimizer from `self.optimizers()` in a captured step. It notes when its gradients are cleared."""

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], cleared: set[int]) -> None:
        super().__init__(optimizer, step)
        self.__dict__["_cleared"] = cleared

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. They become None whatever `set_to_none` is."""
        self.__dict__["_cleared"].add(id(self.optimizer))
        self.optimizer.zero_grad(set_to_none=True)


def _own_hook(module: Any, name: str) -> tuple[Callable[..., Any], ...]:
    return (getattr(module, name),) if overrides(module, name) else ()


def _loss_in(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _like(output: Any, loss: Tensor) -> Any:
    """The loss in the form that `training_step` returned: alone, or in a dictionary."""
    return {"loss": loss} if isinstance(output, Mapping) else loss
