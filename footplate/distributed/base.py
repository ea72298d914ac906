"""The contract of a strategy: how the parameters of one model are distributed over several ranks.

    check(module)            before training: can this strategy train the module?
    place(module, device)    move it to its device
    prepare(module)          before optimizers are made: make parameters equal, or shard them
    training_step(module)    the function that the step calls instead of `module.training_step`
    begin_batch(syncs)       before each batch: do its gradients end an accumulation window?
    marked(loss, …)          before each backward pass, and anyone_counts() after it: have all ranks skipped their batches?
    backward()               after the backward pass of a loss that the strategy has combined itself
    average(parameters)      average the gradients that the backward pass has not averaged
    examine_gradients        before each optimizer step; and clip, if gradients are clipped
    whole / parts            a checkpoint's tensors: of the whole model on disk, in parts on the ranks

Gradients are averaged over the ranks. Before that, the loss of a rank is weighted by its share of the global batch. So the
average is the gradient of the global batch's mean loss, also if ranks have different numbers of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.time_split import TimeSplit
from footplate.distributed.gradient_norm import clip_by_torch
from footplate.distributed.group import Group
from footplate.distributed.meta_device import initializers_of, innermost_first, materialize
from footplate.distributed.stored_weights import fill
from footplate.distributed.world import World


class Strategy:
    """The strategy of a single process, which shares nothing. Base class of the other strategies.

    Attributes:
        name: the value of `Trainer(strategy=…)`.
        is_distributed: whether there are other ranks.
        copies: whether this one process trains on several devices, with a copy of the module on each.
        skips: whether a rank may skip a batch by returning no loss.
        own_gradients: whether a rank's gradients differ from the other ranks' until a window ends.
        sharded: whether a rank has only a part of the state, which it writes into a checkpoint itself.
        lockstep: whether the forward pass is collective, so that every rank must evaluate the same number of batches.
        times: the time of the training, in which collectives count as "communication"; None if they aren't measured.
    """

    name: str = "auto"
    is_distributed: bool = False
    copies: bool = False
    skips: bool = True
    own_gradients: bool = True
    sharded: bool = False
    lockstep: bool = False
    times: TimeSplit | None = None

    @property
    def device_mesh(self) -> Any:
        """The grid of the ranks, a `DeviceMesh`. None if they don't make one."""
        return None

    def data_world(self, world: World) -> World:
        """The share of the rows that this process reads, as rank and world size. Ranks may have the same share."""
        return world

    def data_group(self, group: Group) -> Group:
        """The ranks among which this process is the only one with its share of the rows. All ranks call it.

        Args:
            group: all ranks.
        """
        return group

    def check(self, module: Any) -> None:
        """Refuse a module that this strategy can't train.

        Raises:
            ConfigError: says what the obstacle is, and what to do.
        """

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Move a module to its device. Layers that are on the meta device are made there.

        Raises:
            ConfigError: a layer on the meta device can't give its parameters their numbers.
        """
        materialize(innermost_first(module), device, initializers_of(module))
        module.to(device)
        fill(module.modules())

    def prepare(self, module: nn.Module) -> None:
        """Make the parameters of a module, on its device, equal on all ranks, or shard them."""

    def training_step(self, module: Any) -> Callable[..., Any]:
        """The function to call instead of `module.training_step`.

        The step asks for it at the beginning of each epoch; with several ranks, only if other parameters are trained now.
        """
        return module.training_step

    def begin_batch(self, syncs: bool) -> None:
        """Prepare for the forward pass of a training batch. `syncs`: its backward pass averages the gradients."""

    def marked(self, loss: Tensor, counts: bool, begins_window: bool) -> Tensor:
        """Mark a loss: its backward pass also tells the other ranks whether this window has counted a batch so far."""
        return loss

    def anyone_counts(self) -> bool:
        """Return True if any rank's window has counted a batch, as told by the backward pass that ended the window."""
        return True

    def backward(self) -> None:
        """Run the copies' backward passes, after that of the loss that `training_step` has returned (with `copies`)."""

    def sync_buffers(self, module: nn.Module) -> None:
        """Copy the buffers of rank 0, such as running statistics, to every rank."""

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients that no backward pass has averaged over the ranks."""

    def examine_gradients(self, module: nn.Module) -> None:
        """Look at the gradients of a window before they are used.

        Raises:
            ConfigError: the ranks would train different models.
        """

    def clip(self, parameters: Iterable[nn.Parameter], value: float, algorithm: str) -> None:
        """Clip the gradients of parameters in place, by "norm" or by "value"."""
        clip_by_torch(parameters, value, algorithm)

    def mean(self, number: Tensor) -> Tensor:
        """The mean of a number over the ranks."""
        return number

    def measure(self, times: TimeSplit | None) -> None:
        """Let the time of collectives count as "communication" from now on, where the host waits for them; None: stop."""
        self.times = times

    def communicating(self) -> contextlib.AbstractContextManager[None]:
        """A context whose time counts as "communication", if that is measured."""
        return contextlib.nullcontext() if self.times is None else self.times.during("communication")

    def communication_s(self) -> float | None:
        """The seconds of an average step in which the backward pass only waited for other ranks; None if unknown.

        These come on top of those that `measure` lets count.
        """
        return None

    def release(self) -> None:
        """End training: from now on, a backward pass of the user concerns only this rank."""

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state under its own names; sharded tensors as `DTensor`."""
        return dict(module.state_dict())

    def whole(self, state: Any) -> Any:
        """A state with every sharded tensor gathered. All ranks call it."""
        return state

    def weight_parts(self, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        """The counterpart of `whole`: a run state with this rank's shards of the weights."""
        return state

    def optimizer_parts(self, state: dict[str, Any], optimizers: Iterable[Any]) -> dict[str, Any]:
        """A run state with this rank's shards of the optimizers' states."""
        return state

    def part_of(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """Shard and place a whole tensor as the parameter is, which has the same shape."""
        return tensor.to(parameter.device)
