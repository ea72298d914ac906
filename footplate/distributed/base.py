"""The contract of a strategy: how the parameters of one model live on several ranks.

    check(module)            before training: can it be trained so?
    prepare(module)          before optimizers are made: parameters made equal, or shared out
    training_step(module)    what the step calls in the place of `module.training_step`
    begin_batch(syncs)       before each batch: do its gradients end an accumulation window?
    marked(loss, …)          before each backward pass, and anyone_counts() after it: have all ranks skipped their batches?
    backward()               after the backward pass of a loss that the strategy has put together itself
    average(parameters)      gradients that the backward pass has left alone
    whole / parts            a checkpoint's tensors: of the whole model on disk, in parts on the ranks

Gradients are averaged over the ranks. The loss of a rank is weighed by its share of the global batch before that, so
the average is the gradient of the global batch's mean loss, also where ranks have unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


class Strategy:
    """One process: nothing is shared, and nothing needs doing.

    Attributes:
        name: what `Trainer(strategy=…)` is given.
        is_distributed: whether there are other ranks.
        copies: whether this process trains on several devices by itself, with a copy of the module on each.
        skips: whether a rank may skip a batch by returning no loss.
        own_gradients: whether a rank's gradients differ from the others' until a window ends.
        sharded: whether a rank has a part of the state only, which it then writes into a checkpoint by itself.
        lockstep: whether the forward pass itself is collective, so that every rank must evaluate as many batches.
    """

    name: str = "auto"
    is_distributed: bool = False
    copies: bool = False
    skips: bool = True
    own_gradients: bool = True
    sharded: bool = False
    lockstep: bool = False

    def check(self, module: Any) -> None:
        """Refuse a module that can't be trained so.

        Raises:
            ConfigError: what is in the way, and what to do.
        """

    def prepare(self, module: nn.Module) -> None:
        """Make the parameters of a module, on its device, equal on all ranks, or share them out."""

    def training_step(self, module: Any) -> Callable[..., Any]:
        """What is called for `module.training_step`; asked for at the beginning of each epoch, of several ranks only where
        other parameters are to be trained.
        """
        return module.training_step

    def begin_batch(self, syncs: bool) -> None:
        """Before the forward pass of a training batch; `syncs`: its backward pass averages the gradients."""

    def marked(self, loss: Tensor, counts: bool, begins_window: bool) -> Tensor:
        """The same loss, whose backward pass also tells the other ranks whether this one's window counts a batch so far."""
        return loss

    def anyone_counts(self) -> bool:
        """Whether any rank's window has counted a batch, as the backward pass that ended it has told."""
        return True

    def backward(self) -> None:
        """With `copies`: after the backward pass of the loss that `training_step` has returned."""

    def sync_buffers(self, module: nn.Module) -> None:
        """Give every rank the buffers of rank 0 (running statistics, say)."""

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average gradients over the ranks that no backward pass has averaged."""

    def mean(self, number: Tensor) -> Tensor:
        """The mean of a number over the ranks."""
        return number

    def release(self) -> None:
        """After training: a backward pass of the user's own is this rank's alone again."""

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state under its own names; sharded tensors as `DTensor`."""
        return dict(module.state_dict())

    def optim_state_dict(self, module: nn.Module, optimizers: Any) -> dict[str, Any]:
        """The optimizers' state under the parameters' names; sharded tensors as `DTensor`."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(module, optimizers))

    def whole(self, state: Any) -> Any:
        """A state with every sharded tensor made whole; all ranks call it."""
        return state

    def weight_parts(self, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        """The counterpart of `whole`: a run state with the weights cut as they are on this rank."""
        return state

    def optimizer_parts(self, state: dict[str, Any], optimizers: Iterable[Any]) -> dict[str, Any]:
        """Likewise, a run state with the optimizers' states cut."""
        return state

    def part_of(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A whole tensor of a parameter's shape, cut and placed as the parameter is."""
        return tensor.to(parameter.device)
