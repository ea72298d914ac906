"""The contract of a step: batches in, one optimizer step (or several) out, nothing read back.

The trainer hands a step `chunk_size` batches at a time, and tells it which of them ends an accumulation window. The
step runs the user's `training_step`, the backward pass, clipping and the optimizers as one program, whatever that is on
its hardware, and returns values that may still be in the making on the device.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.core.hooks import Hooks
from footplate.distributed.base import Strategy
from footplate.distributed.group import ALONE, Group
from footplate.hardware.transfer import to_device
from footplate.step.precision import Precision


@dataclass(frozen=True)
class StepSpec:
    """What a step is made of.

    Attributes:
        module: the user's module, on its device.
        optimizers: as `configure_optimizers` returned them.
        hooks: the overridden hooks.
        device: where the step runs.
        precision: see `Precision`.
        accumulate_grad_batches: batches whose gradients are summed before an optimizer step.
        gradient_clip_val: the norm or value to clip to; None or 0 for none.
        gradient_clip_algorithm: "norm" or "value".
        compile: options of `torch.compile`, or None.
        on_optimizer_step: called after each optimizer step, before anything else happens.
        strategy: how the module lives on several ranks; by default there is one.
        group: the ranks.
        weight: by how much the loss of a batch (by its index in the epoch) counts, so that the average over the ranks is
            the mean over all rows; None where every batch counts alike.
        device_ids: the devices of this process, where it drives several by itself.
        iterations_per_loop: how many steps a call of the program makes, for steps that can make several.
        sync_batchnorm: let batch norm see the batches of all devices.
        sharded: let each device keep a part of the parameters and of what the optimizer remembers.
        record: called with (batch, name, value, the other arguments) for what a step gave to `self.log`, by steps that
            don't run the module's code each time.
        rates_ahead: the learning rates of each group in the next so many steps.
    """

    module: Any
    optimizers: list[Optimizer]
    hooks: Hooks
    device: torch.device
    precision: Precision
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    compile: dict[str, Any] | None = None
    on_optimizer_step: Callable[[], None] = lambda: None
    strategy: Strategy = field(default_factory=Strategy)
    group: Group = ALONE
    weight: Callable[[int], float] | None = None
    device_ids: Sequence[int] = (0,)
    iterations_per_loop: int = 1
    sync_batchnorm: bool = False
    sharded: bool = False
    record: Callable[[Any, str, Any, Mapping[str, Any]], None] = lambda batch, name, value, options: None
    rates_ahead: Callable[[int], list[list[float]]] = lambda count: []


class Step(ABC):
    """One kind of program.

    Attributes:
        chunk_size: how many batches `train` takes at once.
        changing: gradients, weights or optimizers may be other ones than before the batch; set while that is so.
    """

    chunk_size: int = 1
    changing: bool = False

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    @abstractmethod
    def train(self, batches: Sequence[Any], batch_idx: int, last: bool, epoch: int) -> Iterable[Any]:
        """Train on some batches.

        Args:
            batches: `chunk_size` batches on the device, fewer where something is due before as many are done.
            batch_idx: the index of the first of them in the epoch.
            last: whether the last of them is known to be the last of the epoch, which ends an accumulation window.
            epoch: the epoch in progress.

        Returns:
            For each batch, what `training_step` returned, detached; None where it skipped the batch. Each is asked for
            when all that follows the one before has been done, and what the step logs of a batch is logged then.
        """

    def accumulate(self, batches: int) -> None:
        """Windows of so many batches from here on, which is the beginning of an epoch or of the rest of one.

        Raises:
            ConfigError: this step can't change it.
        """
        if batches != self.spec.accumulate_grad_batches:
            raise ConfigError(
                f"accumulate_grad_batches={batches}: the program was made for {self.spec.accumulate_grad_batches}, and "
                "can't change during a run on this accelerator."
            )

    def begin_epoch(self) -> None:
        """Before the first batch of an epoch, or of the rest of one: other parameters may be trained from here on."""

    @abstractmethod
    def finish_window(self, epoch: int, batch_idx: int) -> None:
        """Step with what has been accumulated, when an epoch of unknown length has ended inside a window."""

    @abstractmethod
    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """Run `validation_step`, `test_step` or `predict_step`; returns what it returned, or None where nobody takes it."""

    @abstractmethod
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of manual optimisation, with the precision's scaling."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        """An optimizer step of manual optimisation; the optimizer's `step` gets the other arguments."""

    @abstractmethod
    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        """Clip the gradients of an optimizer's parameters in place."""

    def mover(self, stage: str) -> Callable[[Any], Any] | None:
        """What puts a batch where this step wants it, in a thread ahead of the step; None where only the step can.

        Args:
            stage: "training", "validation", "test" or "predict".
        """
        return functools.partial(to_device, device=self.spec.device)

    def idle(self) -> bool:
        """Whether the device has done what it was given."""
        device = self.spec.device
        return torch.cuda.current_stream(device).query() if device.type == "cuda" else True

    def show(self) -> None:
        """Before the module or an optimizer is read: they have the state as it is now."""

    def lend(self) -> None:
        """`show`; and the next step takes the state from them again, since it may have been changed."""

    def gather(self, stage: str) -> None:
        """Before an evaluation, to which all ranks come: fetch from the others what this one needs to go on by itself.

        Args:
            stage: "validation", "test" or "predict".
        """

    def leave(self) -> None:
        """After an exception: the other ranks may be anywhere, so that nothing is asked of them any more."""

    def release(self) -> None:
        """After training: the module is its user's again."""

    def state_dict(self) -> dict[str, Any]:
        """What the step itself must remember: a loss scale, the gradients of an unfinished accumulation window."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`."""
