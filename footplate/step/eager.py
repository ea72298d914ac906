"""The eager step: the user's code, run as it stands.

For each batch, in this order (the hooks in brackets only where somebody overrides them):

    training_step → [on_before_zero_grad] zero_grad → [on_before_backward] backward [on_after_backward]

and at the end of an accumulation window

    unscale → divide by the weight of the window → [on_before_optimizer_step] → clip → optimizer.step

The division is for steps that return a sum of losses with its weight; see `loss_sum.py`.

A module that overrides `optimizer_step`, or an optimizer that re-evaluates the loss (LBFGS), gets the same sequence as
a closure. With `automatic_optimization = False`, `training_step` does all of it itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides, step_arguments
from footplate.distributed.loss_sum import divide_gradients, loss_sum_of, mean, refuse_loss_sum
from footplate.hardware.transfer import detach
from footplate.step.base import Step, StepSpec
from footplate.step.optimizer_fast_path import clearer, stepper
from footplate.step.optimizers import StepOptimizer, may_use_closure, wants_closure
from footplate.step.torch_compile import compile_in_place, layers


class EagerStep(Step):
    """See the module's docstring."""

    def __init__(self, spec: StepSpec) -> None:
        super().__init__(spec)
        module = spec.module
        if spec.compile is not None:
            compile_children(module, spec.compile)
        self._scaler = torch.amp.GradScaler(spec.device.type) if spec.precision.name == "16-mixed" else None  # type: ignore[attr-defined]
        self._context = self._forward_context if not spec.precision.plain else contextlib.nullcontext
        self._plain = spec.precision.plain
        self._accumulated = 0
        self._weight: Tensor | None = None  # of the window so far, where the step returns sums of losses
        self._weight_dtype = torch.float32 if spec.device.type == "mps" else torch.float64  # mps has no float64
        self._returned_sum: bool | None = None  # whether this rank's first batch that had a loss returned a sum
        self._ranks_return_sums: bool | None = None  # what all ranks know when the first window has ended
        self._arguments: dict[str, int] = {}
        self._strategy = spec.strategy
        self._several, self._copies = spec.strategy.is_distributed, spec.strategy.copies
        self._batch_weight = 1.0
        self._counts = False  # whether this rank has not skipped every batch of the window so far
        self._unscaled: dict[
            int, int
        ] = {}  # after how many backward passes the gradients of an optimizer were unscaled
        self._backwards = 0
        self._stepped: set[int] = set()  # optimizers (by id) that have stepped since the scale was last updated
        self._averaged: set[int] = set()  # optimizers (by id) whose gradients are averaged, with manual optimisation
        self._training_step = module.training_step
        self._learning: list[bool] = []
        self._takes_index = step_arguments(self._training_step, "training_step") > 1
        self._automatic = bool(module.automatic_optimization)
        self._optimizer: Optimizer | None = spec.optimizers[0] if self._automatic and spec.optimizers else None
        self._own_zero_grad = overrides(module, "optimizer_zero_grad")
        if self._optimizer is not None:
            self._clear, self._make_step = clearer(self._optimizer), stepper(self._optimizer)
        self._own_clipping = overrides(module, "configure_gradient_clipping")
        self._own_backward = overrides(module, "backward")
        self._own_step = overrides(module, "optimizer_step")
        # A scaled loss can't be run inside a closure, so an optimizer that can do without one gets none.
        optional = self._scaler is None and self._optimizer is not None and may_use_closure(self._optimizer)
        self._by_optional_closure = optional
        self._by_closure = (
            self._own_step or optional or (self._optimizer is not None and wants_closure(self._optimizer))
        )
        self._clips = self._own_clipping or bool(spec.gradient_clip_val)
        hooks = spec.hooks
        self._before_zero_grad = hooks.get("on_before_zero_grad")
        self._before_backward = hooks.get("on_before_backward")
        self._after_backward = hooks.get("on_after_backward")
        self._before_optimizer_step = hooks.get("on_before_optimizer_step")
        self._undisturbed = self._optimizer is not None and not (
            self._scaler
            or self._by_closure
            or self._clips
            or self._own_zero_grad
            or self._own_backward
            or self._before_zero_grad
            or self._before_backward
            or self._after_backward
            or self._before_optimizer_step
            or self._several
            or self._copies
        )
        self._nothing_between = self._undisturbed and spec.accumulate_grad_batches == 1
        if self._automatic and len(spec.optimizers) > 1:
            raise ConfigError(
                f"{type(module).__name__}.configure_optimizers() returned {len(spec.optimizers)} optimizers: with several, "
                "set self.automatic_optimization = False and call backward and step yourself in training_step."
            )
        if not self._automatic and (spec.gradient_clip_val or spec.accumulate_grad_batches != 1):
            name = "gradient_clip_val" if spec.gradient_clip_val else "accumulate_grad_batches"
            raise ConfigError(
                f"{name}={getattr(spec, name)} has no meaning with manual optimisation: "
                f"{'call self.clip_gradients(...)' if spec.gradient_clip_val else 'accumulate'} in training_step."
            )

    def accumulate(self, batches: int) -> None:
        if batches != self.spec.accumulate_grad_batches:
            self.spec = dataclasses.replace(self.spec, accumulate_grad_batches=batches)
            self._nothing_between = self._undisturbed and batches == 1

    def take_apart(self) -> None:
        """Call each part by its method, so that one that was replaced is called."""
        self._undisturbed = self._nothing_between = False

    def begin_epoch(self) -> None:
        learning = [parameter.requires_grad for parameter in self.spec.module.parameters()] if self._several else []
        if self._copies or not self._several or learning != self._learning:
            self._learning = learning
            self._training_step = self.spec.module.training_step
            self._takes_index = step_arguments(self._training_step, "training_step") > 1
            self._training_step = self._strategy.training_step(self.spec.module)

    def release(self) -> None:
        self._training_step = self.spec.module.training_step
        self._learning = []
        self._strategy.release()

    def train(self, batches: Sequence[Any], batch_idx: int, last: bool, epoch: int) -> list[Any]:
        if self._nothing_between:
            if len(batches) == 1:
                return [self._train_plainly(batches[0], batch_idx)]
            return [self._train_plainly(batch, index) for index, batch in enumerate(batches, batch_idx)]
        outputs = []
        for index, batch in enumerate(batches, batch_idx):
            ends_window = (index + 1) % self.spec.accumulate_grad_batches == 0 or (
                last and index == batch_idx + len(batches) - 1
            )
            outputs.append(self._train_batch(batch, index, ends_window, epoch))
        return outputs

    def _train_plainly(self, batch: Any, batch_idx: int) -> Any:
        """`_train_batch` where nothing comes between its parts."""
        output = self._forward(batch, batch_idx)
        declared = None
        if type(output) is Tensor:
            loss = output
        else:
            declared = self._declared(output)
            loss = self._loss_of(output) if declared is None else declared[0]
        self._clear()
        if loss is None:
            return None
        self.changing = True
        loss.backward()
        if declared is not None and self._optimizer is not None:
            divide_gradients(_parameters(self._optimizer), declared[1])
        self._make_step()
        self.spec.on_optimizer_step()
        self.changing = False
        return detach(output if declared is None else _with_loss(output, declared))

    def _train_batch(self, batch: Any, batch_idx: int, ends_window: bool, epoch: int) -> Any:
        optimizer = self._optimizer
        if self._several:
            self._strategy.begin_batch(ends_window)
            self._batch_weight = 1.0 if self.spec.weight is None else self.spec.weight(batch_idx)
        self.changing = optimizer is None  # by hand, anything may change at any time
        if optimizer is None:
            output = self._forward(batch, batch_idx)
            refuse_loss_sum(output, f"{type(self.spec.module).__name__}.training_step")
            self._update_scale()
        elif self._by_closure and ends_window:
            output = self._step_by_closure(optimizer, batch, batch_idx, epoch)
        else:
            output = self._forward(batch, batch_idx)
            self._backpropagate(output, optimizer, batch_idx, epoch)
            if ends_window:
                self._step(optimizer)
            output = self._with_mean(output)
        self.changing = False
        return detach(output)

    def _forward(self, batch: Any, batch_idx: int) -> Any:
        if self._plain:
            return self._training_step(batch, batch_idx) if self._takes_index else self._training_step(batch)
        with self._context():
            batch = self.spec.precision.convert_batch(batch)
            return self._training_step(batch, batch_idx) if self._takes_index else self._training_step(batch)

    def _backpropagate(self, output: Any, optimizer: Optimizer, batch_idx: int, epoch: int) -> None:
        """Clear the gradients at the beginning of a window, then add this batch's."""
        declared = self._declared(output)
        loss = self._loss_of(output) if declared is None else declared[0]
        begins_window = self._accumulated == 0
        if begins_window:
            self._weight = None
            self._counts = False
            for hook in self._before_zero_grad:
                hook(optimizer)
            if self._own_zero_grad:
                self.spec.module.optimizer_zero_grad(epoch, batch_idx, optimizer)
            else:
                self._clear()
        if loss is None and not self._several:
            return
        self._counts = self._counts or (loss is not None and self._batch_weight != 0.0)
        if loss is None:
            loss = self._no_loss()
        if declared is not None:
            loss = self._counted(*declared)
        else:
            if self.spec.accumulate_grad_batches != 1:
                loss = loss / self.spec.accumulate_grad_batches
            if self._batch_weight != 1.0:
                loss = loss * self._batch_weight
        for hook in self._before_backward:
            hook(loss)
        if self._several:
            loss = self._strategy.marked(loss, self._counts, begins_window)
        self.changing = True
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if self._own_backward:
            self.spec.module.backward(loss)
        else:
            loss.backward()
        if self._copies:
            self._strategy.backward()
        for hook in self._after_backward:
            hook()
        self._accumulated += 1

    def _step(self, optimizer: Optimizer) -> None:
        """The end of a window; nothing is done when every batch of it was skipped, on all ranks."""
        if not self._accumulated:
            return
        if self._all_skipped():
            self._accumulated = 0
            return
        self._prepare_gradients(optimizer)
        if self._scaler is None:
            self._make_step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
        self._accumulated = 0
        self.spec.on_optimizer_step()

    def _all_skipped(self) -> bool:
        """Whether all ranks have skipped all batches of the window, after backward passes for each other's sake."""
        return self._several and not self._counts and not self._strategy.anyone_counts()

    def _prepare_gradients(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        weight = self._window_weight()
        if weight is not None:
            divide_gradients(_parameters(optimizer), weight)
        for hook in self._before_optimizer_step:
            hook(optimizer)
        if self._clips:
            value, algorithm = self.spec.gradient_clip_val, self.spec.gradient_clip_algorithm
            if self._own_clipping:
                self.spec.module.configure_gradient_clipping(optimizer, value, algorithm)
            else:
                self.clip_gradients(optimizer, value, algorithm)

    def _step_by_closure(self, optimizer: Optimizer, batch: Any, batch_idx: int, epoch: int) -> Any:
        if self._scaler is not None:
            raise ConfigError('precision="16-mixed" can\'t scale a loss inside a closure: use "bf16-mixed".')
        returned: list[Any] = []
        self.changing = self._by_optional_closure  # somebody's own optimizer may change weights before the forward pass

        @torch.enable_grad()
        def closure() -> Tensor | None:
            if returned:  # the optimizer evaluates the loss again
                self._accumulated = 0
            output = self._forward(batch, batch_idx)
            returned.append(output)
            self._backpropagate(output, optimizer, batch_idx, epoch)
            if self._all_skipped():
                optimizer.zero_grad(set_to_none=True)  # as in one process: the optimizer finds no gradients
            return self._closure_loss(optimizer, output)

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
            def evaluate() -> Any:
                loss = None if closure is None else closure()
                self._prepare_gradients(optimizer)
                return loss

            return optimizer.step(evaluate, **arguments)

        stepper = StepOptimizer(optimizer, step)
        if self._own_step:
            self.spec.module.optimizer_step(epoch, batch_idx, stepper, closure)
        else:
            stepper.step(closure)
        if not returned:
            raise ConfigError(
                f"{type(self.spec.module).__name__}.optimizer_step() never ran its optimizer_closure: "
                "call optimizer.step(closure=optimizer_closure)."
            )
        self._accumulated = 0
        self.spec.on_optimizer_step()
        return self._with_mean(returned[-1])

    def finish_window(self, epoch: int, batch_idx: int) -> None:
        if self._optimizer is not None and self._accumulated:
            self.changing = True
            self._strategy.average(_parameters(self._optimizer))
            if self._several:
                self._counts = bool(self.spec.group.maximum([int(self._counts)])[0])
            self._step(self._optimizer)
            self.changing = False

    def _declared(self, output: Any) -> tuple[Tensor, Tensor] | None:
        """The sum of losses and its weight, where the step returns these: from every batch, or from none."""
        declared = loss_sum_of(output, type(self.spec.module).__name__, self._weight_dtype)
        if output is None:
            return None
        if self._returned_sum is None:
            self._returned_sum = declared is not None
        if self._returned_sum != (declared is not None):
            now, before = ("loss_sum", "a loss") if declared is not None else ("a loss", "loss_sum")
            raise ConfigError(
                f"{type(self.spec.module).__name__}.training_step() returned {now} for this batch and {before} for earlier "
                'ones: return {"loss_sum": …, "weight": …} for every batch, or for none.'
            )
        return declared

    def _with_mean(self, output: Any) -> Any:
        """What `training_step` returned; beside a sum of losses stands the batch's mean, as "loss"."""
        declared = self._declared(output)
        return output if declared is None else _with_loss(output, declared)

    def _counted(self, total: Tensor, weight: Tensor) -> Tensor:
        """Add a batch's weight to the window's; returns the loss to run the backward pass on."""
        if self._batch_weight == 0.0:  # this rank was given another one's rows
            total, weight = total * 0.0, weight * 0.0
        if self._several and not self._strategy.own_gradients:
            weight = self._strategy.mean(weight)
        self._weight = weight if self._weight is None else self._weight + weight
        return total

    def _window_weight(self) -> Tensor | None:
        """The weight of the window, averaged over the ranks as the gradients are; None where losses are plain."""
        if not self._several or not self._strategy.own_gradients:
            return self._weight
        if self._ranks_return_sums is None:  # a rank that has skipped all its batches can't know by itself
            self._ranks_return_sums = bool(self.spec.group.maximum([int(self._weight is not None)])[0])
        if not self._ranks_return_sums:
            return None
        nothing = torch.zeros((), dtype=self._weight_dtype, device=self.spec.device)
        return self._strategy.mean(nothing if self._weight is None else self._weight)

    def _loss_of(self, output: Any) -> Tensor | None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and not isinstance(output, Mapping):
            return None
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"{type(self.spec.module).__name__}.training_step() returned {type(output).__name__}: expected the loss "
                'as a tensor, a dict with the key "loss", or None to skip the batch.'
            )
        return loss

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        name = f"{stage}_step"
        function = getattr(self.spec.module, name)
        arguments = self._arguments.get(name)
        if arguments is None:
            arguments = self._arguments[name] = step_arguments(function, name)
        given = (batch, batch_idx) if dataloader_idx is None else (batch, batch_idx, dataloader_idx)
        if dataloader_idx is not None and arguments < 3:
            raise ConfigError(f"{name}() has several loaders, so it must take (batch, batch_idx, dataloader_idx).")
        if self._plain:
            return function(*given[:arguments])
        with self._context():
            return function(self.spec.precision.convert_batch(batch), *given[1:arguments])

    def _no_loss(self) -> Tensor:
        """What stands for the loss of a batch that is skipped on this rank: others may wait for its gradients."""
        if not self._strategy.skips:
            raise ConfigError(
                f'training_step() returned None: with strategy="{self._strategy.name}" every rank needs a loss from every '
                "batch. Return a loss times 0 instead."
            )
        learning = (parameter for parameter in self.spec.module.parameters() if parameter.requires_grad)
        return torch.stack([parameter.sum() * 0.0 for parameter in learning]).sum()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._averaged.clear()
        self._update_scale()
        self._backwards += 1
        if self._batch_weight != 1.0:
            loss = loss * self._batch_weight
        for hook in self._before_backward:
            hook(loss)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if self._own_backward:
            self.spec.module.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)
        for hook in self._after_backward:
            hook()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        if closure is None:
            self._average(optimizer)
        elif self._several:
            closure = self._averaging(optimizer, closure)
        if self._scaler is not None:
            if closure is not None:
                raise ConfigError('precision="16-mixed" can\'t scale a loss inside a closure: use "bf16-mixed".')
            if id(optimizer) in self._stepped:
                self._update_scale()
            self._unscale(optimizer)
        for hook in self._before_optimizer_step:
            hook(optimizer)
        if self._scaler is None:
            result = optimizer.step(**arguments) if closure is None else optimizer.step(closure, **arguments)
        else:
            result = self._scaler.step(optimizer, **arguments)
            self._stepped.add(id(optimizer))
        self.spec.on_optimizer_step()
        return result

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        if not value:
            return
        if not self._automatic:
            self._average(optimizer)
            self._unscale(getattr(optimizer, "optimizer", optimizer), clips=True)
        parameters = _parameters(optimizer)
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, value)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, value)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        if self._accumulated:  # inside a window: what it has summed so far
            named = self.spec.module.named_parameters()
            state["accumulated"] = self._accumulated
            state["counts"] = self._counts
            state["gradients"] = {name: p.grad for name, p in named if p.grad is not None}
            if self._weight is not None:
                state["weight"] = self._weight
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
        self._accumulated = state.get("accumulated", 0)
        self._counts = state.get("counts", self._accumulated > 0)
        self._weight = state.get("weight")
        if self._weight is not None:
            self._weight = self._weight.to(self.spec.device, self._weight_dtype)
        parameters = dict(self.spec.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameter = parameters[name]
            parameter.grad = self._strategy.part_of(gradient, parameter)

    def _unscale(self, optimizer: Optimizer, clips: bool = False) -> None:
        """Unscale an optimizer's gradients, once between two updates of the scale, with manual optimisation.

        Gradients of a later backward pass would be added to unscaled ones, so to clip these is torch's error.
        """
        if self._scaler is None:
            return
        unscaled_after = self._unscaled.get(id(optimizer))
        if unscaled_after is None or (clips and unscaled_after != self._backwards):
            self._scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = self._backwards

    def _update_scale(self) -> None:
        """Update the scale after the steps of all optimizers: before the next backward pass, or after the batch. An update
        between two optimizers' steps would give the second another scale than its gradients have.
        """
        if self._scaler is not None and self._stepped:
            self._scaler.update()
            self._stepped.clear()
            self._unscaled.clear()

    def _average(self, optimizer: Any) -> None:
        """Average an optimizer's gradients over the ranks, once after each backward pass by hand."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self._several and id(optimizer) not in self._averaged:
            self._averaged.add(id(optimizer))
            self._strategy.average(_parameters(optimizer))

    def _averaging(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are averaged whenever the optimizer runs it."""

        def averaged() -> Any:
            loss = closure()
            self._average(optimizer)
            return self._judged(optimizer, loss)

        return averaged

    def _closure_loss(self, optimizer: Optimizer, output: Any) -> Any:
        """What the closure of automatic optimisation returns to the optimizer."""
        declared = self._declared(output)
        if declared is None:
            return self._judged(optimizer, self._loss_of(output))
        total, weight = declared
        if self._several and wants_closure(optimizer):
            counts = float(self._batch_weight != 0.0)
            total, weight = (self._strategy.mean(number.detach().double() * counts) for number in (total, weight))
        return mean(total, weight)

    def _judged(self, optimizer: Optimizer, loss: Any) -> Any:
        """What a closure returns. An optimizer that decides by it whether to go on (LBFGS) gets the loss over all ranks."""
        if not self._several or not wants_closure(optimizer):
            return loss
        own = (
            torch.zeros((), device=self.spec.device) if loss is None else torch.as_tensor(loss, device=self.spec.device)
        )
        return self._strategy.mean(own.detach().double() * self._batch_weight)

    def _forward_context(self) -> contextlib.AbstractContextManager[None]:
        return self.spec.precision.forward_context(self.spec.device)


def _with_loss(output: Any, declared: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What a step returned, with the mean of its losses beside their sum."""
    return {**output, "loss": mean(*declared)}


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def compile_children(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Compile a module's layers in place, so that names in checkpoints stay what they are.

    `training_step` itself, with its logging, stays Python: the children that it calls are compiled; a module with no
    children is compiled as a whole.
    """
    for part in layers(module) or [module]:
        compile_in_place(part, functools.partial(torch.compile, **options))
