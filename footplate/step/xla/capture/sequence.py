"""The order of things in a training step that is captured: the eager step's own (`step/eager.py`), run once.

With automatic optimisation, each hook only where it is overridden:

    training_step → on_before_zero_grad, optimizer_zero_grad → on_before_backward → backward → on_after_backward

and at the end of a window of accumulated batches (of every batch, as a rule)

    division by the window's weight, of losses that are sums (`distributed/loss_sum.py`)
    on_before_optimizer_step → configure_gradient_clipping or clipping → optimizer.step

A batch whose `training_step` returns None is skipped: nothing follows.

With manual optimisation `training_step` does it all, with `self.optimizers()`, `self.manual_backward`, `opt.zero_grad()`
and `opt.step()`. No gradient outlives a captured step there, so one that would is refused.

Where several devices run the step, gradients are averaged after the backward pass, before they are added to what a
window has summed: that is the same sum, and leaves every device with the same state after every batch.
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
from footplate.step.precision import Precision
from footplate.step.xla.capture import optimizer_replay
from footplate.step.xla.capture.attached import Logs, attached, call_step
from footplate.step.xla.capture.averaging import average_gradients, average_logs, average_step
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.state import Installed
from footplate.step.xla.capture.torch_optimizers import TensorRates, begin_momentum


@dataclass(frozen=True)
class Settings:
    """What the trainer says of a step.

    Attributes:
        gradient_clip_val: None or 0 for none.
        gradient_clip_algorithm: "norm" or "value".
        averages: whether several devices will run it.
        precision: in which the forward pass is computed.
        accumulate_grad_batches: the batches of a window.
        ends_window: whether the optimizer steps after this batch.
        parts: into how many parts the rows of the batch are cut: a sum over them is their average times this.
    """

    gradient_clip_val: float | None
    gradient_clip_algorithm: str
    averages: bool
    precision: Precision
    accumulate_grad_batches: int
    ends_window: bool
    parts: int


class Sequence:
    """One training step while it is traced, of a module in which traced tensors are installed."""

    def __init__(self, who: str, module: Any, optimizers: list[Optimizer], settings: Settings, logs: Logs) -> None:
        self._who, self._module, self._optimizers = who, module, optimizers
        self._settings, self._logs = settings, logs
        self._averaged: set[int] = set()
        self._cleared: set[int] = set()
        self._stepped_uncleared: list[Optimizer] = []
        self._frozen: list[Tensor] = []

    def run(self, installed: Installed, batch: Any) -> Any:
        """Everything, up to the last parameter that changes. Returns the loss, detached, or None of a skipped batch; of a
        dictionary the loss alone, in one.
        """
        methods: dict[str, Callable[..., Any]] = {
            "clip_gradients": self._clip_gradients,
            "lr_schedulers": self._no_schedulers,
        }
        if self._module.automatic_optimization:
            with attached(self._module, self._logs, methods), torch.enable_grad():
                return self._automatic(installed, batch)
        methods |= {
            "optimizers": self._handed_out,
            "manual_backward": self._manual_backward,
            "toggle_optimizer": self._toggle,
            "untoggle_optimizer": self._untoggle,
            "toggled_optimizer": self._toggled,
        }
        with attached(self._module, self._logs, methods), torch.enable_grad():
            return self._manual(batch)

    def _forward(self, batch: Any) -> Any:
        precision = self._settings.precision
        with precision.forward_context(torch.device("cpu")):
            given = precision.convert_batch(batch)
            return call_step(self._module.training_step, "training_step", given, self._logs.counters)

    def _automatic(self, installed: Installed, batch: Any) -> Any:
        module, (optimizer,) = self._module, self._optimizers
        output = self._forward(batch)
        if output is None:
            if self._settings.averages:
                self._average_step([], torch.zeros(()))
            return None
        sums = loss_sum_of(output, type(module).__name__, self._logs.counters.floating)
        if sums is not None and self._settings.parts != 1:  # batches of a window may be cut into different parts
            sums = sums[0] * self._settings.parts, sums[1] * self._settings.parts
        loss = self._loss(output) if sums is None else sums[0]
        result = (
            loss.detach() if sums is None else torch.stack([sums[0].detach().reshape(()).to(sums[1].dtype), sums[1]])
        )
        if overrides(module, "on_before_zero_grad"):
            module.on_before_zero_grad(optimizer)
        if overrides(module, "optimizer_zero_grad"):
            epoch, batch_idx = (self._logs.counters.number(name) for name in ("current_epoch", "batch_idx"))
            module.optimizer_zero_grad(epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad(set_to_none=True)
        if self._settings.accumulate_grad_batches != 1 and sums is None:
            loss = loss / self._settings.accumulate_grad_batches
        self._backward(loss)
        if self._settings.averages:
            result = self._average_step(installed.parameters, result)
        installed.accumulate(None if sums is None else result[1])
        averaged = dict(self._logs.values)
        if overrides(module, "on_after_backward"):
            module.on_after_backward()
        if self._settings.ends_window:
            if sums is not None:
                installed.divide_gradients()
            self._step(optimizer)
        if sums is not None:
            result = mean(result[0], result[1]).to(loss.dtype)
        if self._settings.averages:
            values = self._logs.values
            later = [name for name, value in values.items() if value is not averaged.get(name)]
            average_logs(values, self._logs.reductions, later)
        return _like(output, result)

    def _average_step(self, parameters: list[Tensor], loss: Tensor) -> Tensor:
        logs = self._logs
        return average_step(parameters, loss, logs.values, logs.reductions, list(self._module.buffers()))

    def _loss(self, output: Any) -> Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f'{self._who}() returned {type(output).__name__}: expected the loss as a tensor, a dict with "loss", or '
                "None to skip the batch."
            )
        return loss

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if overrides(self._module, "on_before_backward"):
            self._module.on_before_backward(loss)
        if overrides(self._module, "backward"):
            self._module.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def _step(self, optimizer: Optimizer) -> None:
        module, settings = self._module, self._settings
        if overrides(module, "on_before_optimizer_step"):
            module.on_before_optimizer_step(optimizer)
        value, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
        if module.automatic_optimization and overrides(module, "configure_gradient_clipping"):
            module.configure_gradient_clipping(optimizer, value, algorithm)
        else:
            clip(optimizer, value, algorithm)
        begin_momentum(optimizer)
        with TensorRates():
            optimizer_replay.step(optimizer)
        self._logs.counters.steps += 1

    def _clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        settings = self._settings
        if not self._module.automatic_optimization:
            self._average(optimizer)
        clip(
            optimizer,
            settings.gradient_clip_val if gradient_clip_val is None else gradient_clip_val,
            gradient_clip_algorithm or settings.gradient_clip_algorithm,
        )

    def _no_schedulers(self) -> Any:
        raise CaptureError(
            f"{self._who} asks for self.lr_schedulers(): a captured step is run by Python once, so a scheduler would step "
            "once. Step it in a hook between steps (on_train_batch_end), or let the trainer do it."
        )

    # Manual optimisation

    def _manual(self, batch: Any) -> Any:
        output = self._forward(batch)
        refuse_loss_sum(output, self._who)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        result = loss.detach() if isinstance(loss, Tensor) else torch.zeros(())
        if self._settings.averages:
            result = self._average_step([], result)
        for optimizer in self._stepped_uncleared:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                raise CaptureError(
                    f"{self._who} steps a {type(optimizer).__name__} whose gradients it never clears: a captured step "
                    "keeps no gradients from one batch to the next. Call its zero_grad() in each step."
                )
        return _like(output, result)

    def _handed_out(self, use_pl_optimizer: bool = True) -> Any:
        found = [ManualOptimizer(optimizer, self._manual_step, self._cleared) for optimizer in self._optimizers]
        return found[0] if len(found) == 1 else found

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._averaged.clear()
        self._backward(loss, *args, **kwargs)
        if overrides(self._module, "on_after_backward"):
            self._module.on_after_backward()

    def _manual_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> None:
        if closure is not None:
            raise CaptureError(
                f"{self._who} gives optimizer.step() a closure, which can't be captured: call backward before."
            )
        if arguments:
            raise CaptureError(
                f"{self._who} gives optimizer.step() {', '.join(arguments)}, which can't be captured: "
                "set it in the optimizer's param_groups."
            )
        self._average(optimizer)
        if id(optimizer) not in self._cleared:
            self._stepped_uncleared.append(optimizer)
        self._step(optimizer)

    def _average(self, optimizer: Any) -> None:
        """Average an optimizer's gradients over the devices, once after each backward pass."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self._settings.averages and id(optimizer) not in self._averaged:
            self._averaged.add(id(optimizer))
            average_gradients([parameter for group in optimizer.param_groups for parameter in group["params"]])

    def _toggle(self, optimizer: Any) -> None:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for other in self._optimizers:
            for parameter in (p for group in other.param_groups for p in group["params"]):
                if id(parameter) not in mine and parameter.requires_grad:
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
    """An optimizer as `self.optimizers()` hands it out in a captured step; it notes that its gradients were cleared."""

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], cleared: set[int]) -> None:
        super().__init__(optimizer, step)
        self.__dict__["_cleared"] = cleared

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; they are gone, whatever `set_to_none` says."""
        self.__dict__["_cleared"].add(id(self.optimizer))
        self.optimizer.zero_grad(set_to_none=True)


def _like(output: Any, loss: Tensor) -> Any:
    """The loss as `training_step` returned it: by itself, or in a dictionary."""
    return {"loss": loss} if isinstance(output, Mapping) else loss


def clip(optimizer: Any, value: float | None, algorithm: str) -> None:
    """Clip the gradients of an optimizer's parameters by norm or by value."""
    if not value:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)
