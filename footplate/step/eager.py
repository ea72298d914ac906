"""The eager step: it runs the user's code as it is, batch by batch.

The order of a step is in `phases.py`. This file has the operations:

    phases.py           the order of a step
    closure.py          the same order for optimizers that evaluate the loss themselves
    window.py           how much a batch counts in its accumulation window
    manual.py           averaging and unscaling with manual optimisation
    torch_internals.py  the calls of the optimizer
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides, step_arguments
from footplate.distributed.loss_sum import divide_gradients, refuse_loss_sum
from footplate.hardware.transfer import detach
from footplate.step.base import Step, StepSpec
from footplate.step.closure import step_by_closure
from footplate.step.manual import SCALED_CLOSURE, ManualOptimisation
from footplate.step.optimizers import StepOptimizer, may_use_closure, wants_closure
from footplate.step.phases import Phases, parameters_of
from footplate.step.torch_compile import compile_children, in_graphs
from footplate.step.torch_internals import clearer, stepper
from footplate.step.window import Window


class EagerStep(Phases, Step):
    """The step on one device of torch's, or on several by a strategy."""

    def __init__(self, spec: StepSpec) -> None:
        super().__init__(spec)
        module, hooks = spec.module, spec.hooks
        _check(spec)
        if isinstance(spec.compile, dict):
            compile_children(module, spec.compile)
        self._in_graphs = in_graphs(module, spec.device)

        # The forward pass.
        self._plain = spec.precision.plain
        self._arguments: dict[str, int] = {}
        self.trained: Any = module
        self._training_step = module.training_step
        self._takes_index = step_arguments(self._training_step, "training_step") > 1
        self._learning: list[bool] = []

        # The optimizer. A scaled loss can't be run inside a closure, so an optimizer that can do without one gets none.
        self._automatic = bool(module.automatic_optimization)
        self.count_step = spec.on_optimizer_step
        self._scaler: Any = torch.amp.GradScaler(spec.device.type) if spec.precision.name == "16-mixed" else None  # type: ignore[attr-defined]
        self._optional_closure = False
        if self._automatic and spec.optimizers:
            optimizer = self.optimizer = spec.optimizers[0]
            self.clear_gradients = clearer(optimizer)
            self.make_step = stepper(optimizer) if self._scaler is None else self._scaled_step
            self._optional_closure = self._scaler is None and may_use_closure(optimizer)
        self._own_step = overrides(module, "optimizer_step")
        self.steps_by_closure = (
            self._own_step or self._optional_closure or (self.optimizer is not None and wants_closure(self.optimizer))
        )

        # What the module does by itself, and hooks.
        self._own_zero_grad = overrides(module, "optimizer_zero_grad")
        self._own_backward = overrides(module, "backward")
        self._own_clipping = overrides(module, "configure_gradient_clipping")
        self.clips = self._own_clipping or bool(spec.gradient_clip_val)
        self.before_zero_grad = hooks.get("on_before_zero_grad")
        self.before_backward = hooks.get("on_before_backward")
        self.after_backward = hooks.get("on_after_backward")
        self.before_optimizer_step = hooks.get("on_before_optimizer_step")

        # The ranks, and what counts in a window.
        self._strategy = spec.strategy
        self._distributed, self._copies = spec.strategy.is_distributed, spec.strategy.copies
        self._epoch = 0
        self._window = Window(spec)
        self.loss_of, self.contribution = self._window.loss_of, self._window.contribution
        self.all_skipped = self._window.all_skipped
        self._manual = ManualOptimisation(spec, self._scaler, self._window)

        # Nothing is between the phases. `bare` follows the length of a window.
        between = (
            self._scaler or self.steps_by_closure or self.clips or self._own_zero_grad or self._own_backward
            or self.before_zero_grad or self.before_backward or self.after_backward or self.before_optimizer_step
            or self._distributed or self._copies
        )  # fmt: skip
        self._can_be_bare = self.optimizer is not None and not between
        self.shows_phases = False
        self._choose_bare()

    # What the trainer calls

    def train(self, batches: Sequence[Any], batch_idx: int, last: bool, epoch: int) -> list[Any]:
        self._epoch = epoch
        if self._window.single:
            return [self._train(batch, index, True) for index, batch in enumerate(batches, batch_idx)]
        outputs = []
        for index, batch in enumerate(batches, batch_idx):
            ends_epoch = last and index == batch_idx + len(batches) - 1
            ends_window = ends_epoch or (index + 1) % self._window.batches == 0
            outputs.append(self._train(batch, index, ends_window))
        return outputs

    def _train(self, batch: Any, batch_idx: int, ends_window: bool) -> Any:
        if self._distributed:
            self._strategy.begin_batch(ends_window)
            self._window.batch_weight = 1.0 if self.spec.weight is None else self.spec.weight(batch_idx)

        # With manual optimisation, `training_step` may change anything at any time.
        by_hand = self.optimizer is None
        self.changing = by_hand
        output = self.train_batch(batch, batch_idx, ends_window)
        if by_hand:
            refuse_loss_sum(output, f"{type(self.spec.module).__name__}.training_step")
            self._manual.update_scale()
        self.changing = False
        if type(output) is Tensor:
            return output.detach()
        return detach(output if by_hand else self._window.with_mean(output))

    def finish_window(self, epoch: int, batch_idx: int) -> None:
        if self.optimizer is not None and self.accumulated:
            self.changing = True
            self._strategy.average(parameters_of(self.optimizer))
            self._window.agree_on_counts()
            self.end_window()
            self.changing = False

    def accumulate(self, batches: int) -> None:
        if batches != self.spec.accumulate_grad_batches:
            self.spec = dataclasses.replace(self.spec, accumulate_grad_batches=batches)
            self._window.set_batches(batches)
            self._choose_bare()

    def show_phases(self, show: bool = True) -> None:
        """Call every phase by its method, so that a profiler can replace the methods; or as before with `show=False`."""
        self.shows_phases = show
        self._choose_bare()

    def _choose_bare(self) -> None:
        self.bare = self._can_be_bare and self._window.single and not self.shows_phases

    def begin_epoch(self) -> None:
        # A strategy of several ranks wraps the module for the parameters that learn, which may have changed.
        learning = [parameter.requires_grad for parameter in self.spec.module.parameters()] if self._distributed else []
        if self._copies or not self._distributed or learning != self._learning:
            self._learning = learning
            self._training_step = self.spec.module.training_step
            self._takes_index = step_arguments(self._training_step, "training_step") > 1
            self._training_step = self._strategy.training_step(self.trained)

    def release(self) -> None:
        self._training_step = self.spec.module.training_step
        self._learning = []
        self._strategy.release()

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        name = f"{stage}_step"
        function = getattr(self.spec.module, name)
        count = self._arguments.get(name)
        if count is None:
            count = self._arguments[name] = step_arguments(function, name)

        arguments = (batch, batch_idx) if dataloader_idx is None else (batch, batch_idx, dataloader_idx)
        if dataloader_idx is not None and count < 3:
            raise ConfigError(f"{name}() has several loaders, so it must take (batch, batch_idx, dataloader_idx).")
        if self._plain:
            return function(*arguments[:count])
        with self.forward_context():
            return function(self.spec.precision.convert_batch(batch), *arguments[1:count])

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        if not value:
            return
        if not self._automatic:
            self._manual.begin_clipping(optimizer)
        self._strategy.clip(parameters_of(optimizer), value, algorithm)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        # Inside a window, the state includes the gradients that are summed so far.
        if self.accumulated:
            named = self.spec.module.named_parameters()
            state["accumulated"] = self.accumulated
            state["gradients"] = {name: p.grad for name, p in named if p.grad is not None}
            state |= self._window.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
        self.accumulated = state.get("accumulated", 0)
        self._window.load_state_dict(state)
        parameters = dict(self.spec.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameter = parameters[name]
            parameter.grad = self._strategy.part_of(gradient, parameter)

    # The operations of `Phases`

    def forward(self, batch: Any, batch_idx: int) -> Any:
        if self._plain:
            return self._training_step(batch, batch_idx) if self._takes_index else self._training_step(batch)
        with self.forward_context():
            batch = self.spec.precision.convert_batch(batch)
            return self._training_step(batch, batch_idx) if self._takes_index else self._training_step(batch)

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward pass in the step's precision."""
        return self.spec.precision.forward_context(self.spec.device)

    def zero_gradients(self, batch_idx: int) -> None:
        self._window.begin()
        if self._own_zero_grad:
            self.spec.module.optimizer_zero_grad(self._epoch, batch_idx, self.optimizer)
        else:
            self.clear_gradients()

    def backward_pass(self, loss: Tensor) -> None:
        if self._distributed:
            loss = self._strategy.marked(loss, self._window.counts, self.accumulated == 0)
        self.changing = True
        self.differentiate(loss)
        if self._in_graphs and not self.accumulated and not self._window.single:
            own_gradients(parameters_of(self.optimizer))
        if self._copies:
            self._strategy.backward()

    def differentiate(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if self._own_backward:
            self.spec.module.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def finish_gradients(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._distributed:
            self._strategy.examine_gradients(self.spec.module)
        if self._window.single and self._window.weight is None:
            return
        weight = self._window.total_weight()
        if weight is not None:
            divide_gradients(parameters_of(self.optimizer), weight)

    def clip(self) -> None:
        value, algorithm = self.spec.gradient_clip_val, self.spec.gradient_clip_algorithm
        if self._own_clipping:
            self.spec.module.configure_gradient_clipping(self.optimizer, value, algorithm)
        else:
            self.clip_gradients(self.optimizer, value, algorithm)

    def _scaled_step(self) -> None:
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def step_by_closure(self, optimizer: Optimizer, batch: Any, batch_idx: int) -> Any:
        if self._scaler is not None:
            raise ConfigError(SCALED_CLOSURE)
        # An optimizer of another package may change weights before it runs the forward pass.
        self.changing = self._optional_closure
        module = self.spec.module

        def call(stepping: StepOptimizer, closure: Callable[[], Any]) -> None:
            if self._own_step:
                module.optimizer_step(self._epoch, batch_idx, stepping, closure)
            else:
                stepping.step(closure)

        closure_loss = functools.partial(self._window.closure_loss, optimizer)
        return step_by_closure(self, optimizer, batch, batch_idx, call, closure_loss, type(module).__name__)

    def begin_manual_backward(self, loss: Tensor) -> Tensor:
        return self._manual.begin_backward(loss)

    def begin_manual_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> Callable[[], Any] | None:
        return self._manual.begin_step(optimizer, closure)

    def make_manual_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, arguments: dict[str, Any]
    ) -> Any:
        return self._manual.step(optimizer, closure, arguments)


def own_gradients(parameters: list[Any]) -> None:
    """Copy gradients out of the memory of a CUDA graph, where the next batch would overwrite them."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def _check(spec: StepSpec) -> None:
    """Refuse optimizers and arguments that don't go with automatic or with manual optimisation."""
    automatic = bool(spec.module.automatic_optimization)
    if automatic and len(spec.optimizers) > 1:
        raise ConfigError(
            f"{type(spec.module).__name__}.configure_optimizers() returned {len(spec.optimizers)} optimizers: with "
            "several, set self.automatic_optimization = False and call backward and step yourself in training_step."
        )
    if not automatic and (spec.gradient_clip_val or spec.accumulate_grad_batches != 1):
        name = "gradient_clip_val" if spec.gradient_clip_val else "accumulate_grad_batches"
        raise ConfigError(
            f"{name}={getattr(spec, name)} has no meaning with manual optimisation: "
            f"{'call self.clip_gradients(...)' if spec.gradient_clip_val else 'accumulate'} in training_step."
        )
