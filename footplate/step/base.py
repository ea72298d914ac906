"""Interface of a step: the trainer gives it batches, and it makes optimizer steps.

The trainer hands a step `chunk_size` batches at a time. The step runs the user's `training_step`, the backward pass,
clipping and the optimizers, in the order of `phases.py`. It reads nothing back: the device may still be computing the
values that it returns.
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
from footplate.core.time_split import TimeSplit
from footplate.distributed.base import Strategy
from footplate.distributed.group import ALONE, Group
from footplate.hardware.transfer import to_device
from footplate.step.precision import Precision


@dataclass(frozen=True)
class StepSpec:
    """The parts and settings of a step.

    Attributes:
        module: the user's module, on its device.
        optimizers: as `configure_optimizers` returned them.
        hooks: the overridden hooks.
        device: the device that runs the step.
        precision: see `Precision`.
        accumulate_grad_batches: batches whose gradients are summed before an optimizer step.
        gradient_clip_val: the norm or value to clip to; None or 0 for none.
        gradient_clip_algorithm: "norm" or "value".
        compile: options of `torch.compile` for the layers; "step" or "cudagraphs"; or None.
        on_optimizer_step: called after each optimizer step, before anything else happens.
        strategy: places the module on several ranks; the default is one rank.
        group: the ranks.
        weight: the factor of a batch's loss, by the batch's index in the epoch, with which the average over the ranks
            is the mean over all rows; None if every batch counts alike.
        device_ids: the devices of this process, for accelerators whose process drives several.
        iterations_per_loop: the steps of one call of the program, for steps that can make several.
        sync_batchnorm: batch norm uses the batches of all devices.
        sharded: each device keeps a part of the parameters and of the optimizer state.
        record: called with (batch, name, value, other arguments) for each value of `self.log`, by steps that don't run
            the module's code each time.
        rates_ahead: takes the number of steps, and returns the learning rates of each group for the next steps.
        times: what time counts as. A step may let parts of its time count as something else than "step".
    """

    module: Any
    optimizers: list[Optimizer]
    hooks: Hooks
    device: torch.device
    precision: Precision
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    compile: dict[str, Any] | str | None = None
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
    times: TimeSplit = field(default_factory=lambda: TimeSplit("step"))


class Step(ABC):
    """A training step on one kind of hardware.

    Attributes:
        chunk_size: the number of batches that `train` takes at once.
        changing: gradients, weights or optimizers may have changed since the batch began.
        outputs: with logical ranks, the detached outputs of the last batch, one for each logical rank of this process.
    """

    chunk_size: int = 1
    outputs: Sequence[Any] = ()
    changing: bool = False

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    @abstractmethod
    def train(self, batches: Sequence[Any], batch_idx: int, last: bool, epoch: int) -> Iterable[Any]:
        """Train on a chunk of batches.

        Args:
            batches: `chunk_size` batches on the device, or fewer if something is due before the chunk ends.
            batch_idx: the index of the first batch in the epoch.
            last: the last batch is known to be the last of the epoch, which ends an accumulation window.
            epoch: the current epoch.

        Returns:
            The detached output of `training_step` for each batch; None if the batch was skipped. The trainer asks for
            an output when it has finished with the batch before. The step logs the values of a batch at that moment.
        """

    def accumulate(self, batches: int) -> None:
        """Set the length of accumulation windows, at the beginning of an epoch or of the rest of one.

        Raises:
            ConfigError: this step can't change it.
        """
        if batches != self.spec.accumulate_grad_batches:
            raise ConfigError(
                f"accumulate_grad_batches={batches}: the program was made for {self.spec.accumulate_grad_batches}, and "
                "can't change during a run on this accelerator."
            )

    def begin_epoch(self) -> None:
        """Prepare for an epoch, or for the rest of one. From here on, other parameters may be trained."""

    @abstractmethod
    def finish_window(self, epoch: int, batch_idx: int) -> None:
        """Step with the accumulated gradients, if an epoch of unknown length has ended inside a window."""

    @abstractmethod
    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """Run `validation_step`, `test_step` or `predict_step`; return its output.

        Returns None if nobody uses the output.
        """

    @abstractmethod
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of manual optimisation, with the precision's scaling."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        """Make an optimizer step of manual optimisation. The optimizer's `step` gets the other arguments."""

    @abstractmethod
    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        """Clip the gradients of an optimizer's parameters in place."""

    def mover(self, stage: str) -> Callable[[Any], Any] | None:
        """Return a function that moves a batch to the device in a prefetch thread; None if only the step can do that.

        Args:
            stage: "training", "validation", "test" or "predict".
        """
        return functools.partial(to_device, device=self.spec.device)

    def flops(self) -> float | None:
        """Return the floating-point operations of a batch, on all devices of all ranks. None if the step doesn't know."""
        return None

    def idle(self) -> bool:
        """Return True if the device has finished its work."""
        device = self.spec.device
        return torch.cuda.current_stream(device).query() if device.type == "cuda" else True

    def fetch_weights(self, may_change: bool = False) -> None:
        """Copy the current state into the module and the optimizers, before somebody reads it.

        Args:
            may_change: the reader may change the state; the next step copies it back from the module and the optimizers.
        """

    def gather(self, stage: str) -> None:
        """Prepare an evaluation on all ranks: fetch the state that this rank needs to evaluate alone.

        Args:
            stage: "validation", "test" or "predict".
        """

    def leave(self) -> None:
        """Stop communication with other ranks, after an exception: their calls no longer match this rank's."""

    def release(self) -> None:
        """Give the module back to the user, after training."""

    def state_dict(self) -> dict[str, Any]:
        """The step's own state: a loss scale, and the gradients of an unfinished accumulation window."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from `state_dict`."""
