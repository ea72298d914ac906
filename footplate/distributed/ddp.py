"""Data parallelism: every rank has the whole model, and gradients are averaged.

With automatic optimisation, torch's `DistributedDataParallel` averages gradients while the backward pass still runs. It
wraps a tiny module whose forward is the user's `training_step`. So it covers the whole step, not just `forward`:

    DistributedDataParallel( _Step( module ) )(batch, batch_idx)  →  module.training_step(batch, batch_idx)

The grouping of gradients into buckets decides the order in which a sum over three or more ranks is added up, and so its
last bits. So the buckets depend only on the parameters, from the first step on (`_FixedBuckets`). A run that was killed
then adds up in the same order as before. The buckets are made again when a parameter is frozen or unfrozen.

A rank may skip a batch by returning no loss. The other ranks wait for its gradients, so it sends zeros. If all ranks have
skipped all batches of a window, there must be no step, as in one process. To learn this without another message, `_Step`
has a parameter of its own, a zero that is added to the loss of a rank that has not skipped. Its gradient travels with the
others. If it is zero after the window, every rank has skipped. Only ranks that have skipped read it.

With manual optimisation there may be several backward passes and optimizers in any order, which DDP's bookkeeping can't
follow. There, the gradients of an optimizer are averaged in flat buckets just before it steps.

Buffers, such as the running statistics of batch norm, follow rank 0. They are sent before each training batch and before
an evaluation. So every rank evaluates the same model, and rank 0's checkpoint holds it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from footplate.distributed.base import Strategy
from footplate.distributed.buckets import average_gradients, mean_over_ranks, send_from_first

_learns = attrgetter("requires_grad")


class DDP(Strategy):
    """Data parallelism with torch's `DistributedDataParallel`; see the module's docstring.

    Args:
        find_unused_parameters: search in each step for parameters that the loss doesn't depend on. Without it, DDP
            raises if there are any.
    """

    name = "ddp"
    is_distributed = True

    def __init__(self, find_unused_parameters: bool = False) -> None:
        self._find_unused_parameters = find_unused_parameters
        self.skips = not find_unused_parameters
        self._wrapped: _FixedBuckets | None = None
        self._learning: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []
        self._buffers: list[Tensor] = []

    def prepare(self, module: nn.Module) -> None:
        send_from_first([*module.parameters(), *module.buffers()])

    def training_step(self, module: Any) -> Callable[..., Any]:
        self._buffers = list(module.buffers())
        self.release()
        if not module.automatic_optimization or not any(map(_learns, module.parameters())):
            return module.training_step
        self._wrap(_Step(module, marks=self.skips))
        return self._forward

    def begin_batch(self, syncs: bool) -> None:
        if self._wrapped is not None:
            if any(map(_learns, self._frozen)) or not all(map(_learns, self._learning)):
                step = self._wrapped.module
                self.release()
                self._wrap(step)
            if self._wrapped.require_backward_grad_sync != syncs:
                # DistributedDataParallel.no_sync() does the same.
                self._wrapped.require_backward_grad_sync = syncs
            if self._buffers:
                # Buffers are sent inside a window, too.
                self._wrapped.require_forward_param_sync = True
        elif self._buffers:
            with self.communicating():
                send_from_first(self._buffers)

    def marked(self, loss: Tensor, counts: bool, begins_window: bool) -> Tensor:
        mark = self._mark
        if mark is None or not loss.requires_grad:
            return loss
        if begins_window:
            mark.grad = None
        return loss + (mark if counts else mark * 0.0)

    def anyone_counts(self) -> bool:
        mark = self._mark
        return mark is None or mark.grad is None or bool(mark.grad != 0)

    def sync_buffers(self, module: nn.Module) -> None:
        send_from_first(module.buffers())

    def mean(self, number: Tensor) -> Tensor:
        return mean_over_ranks(number)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        with self.communicating():
            average_gradients([parameter for parameter in parameters if parameter.requires_grad])

    def communication_s(self) -> float | None:
        if self._wrapped is None:
            # With manual optimisation, `average` is all communication.
            return None if self.times is None else 0.0
        # Torch measures the first ten steps and each hundredth, in nanoseconds.
        measured = self._wrapped._get_ddp_logging_data()
        hidden = measured.get("avg_backward_compute_comm_overlap_time", 0)
        return max(0, measured.get("avg_backward_comm_time", 0) - hidden) / 1e9

    def release(self) -> None:
        if self._wrapped is not None:
            self._wrapped = None
            # This removes the wrapper's hooks on the parameters, too.
            gc.collect()

    def _wrap(self, step: nn.Module) -> None:
        """Let the backward pass average the gradients of all parameters that are trained now."""
        self._learning = [parameter for parameter in step.parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in step.parameters() if not parameter.requires_grad]
        self._wrapped = _FixedBuckets(step, init_sync=False, find_unused_parameters=self._find_unused_parameters)

    @property
    def _mark(self) -> nn.Parameter | None:
        return None if self._wrapped is None else self._wrapped.module.mark

    def _forward(self, *args: Any) -> Any:
        assert self._wrapped is not None
        return self._wrapped(*args)


class _FixedBuckets(DistributedDataParallel):
    """`DistributedDataParallel` with the same buckets in every step.

    Torch's class has one bucket for all parameters in its first step. Then it makes buckets in the order in which that
    step's gradients became ready. A resumed run has another first step, so it would add up in another order. Here the
    buckets are final before the first step. The last parameters of the module come first, because their gradients are
    ready first. (With `find_unused_parameters`, torch does the same itself.)
    """

    def __init__(self, step: nn.Module, **settings: Any) -> None:
        with _without_compiler():
            super().__init__(step, **settings)
        if not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        if self.find_unused_parameters:
            return parameters, sparse
        # The first parameter is the mark, whose gradient is ready first.
        return [parameters[0], *parameters[:0:-1]], [sparse[0], *sparse[:0:-1]]


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Answer for torch's compiler, whose import takes as long as that of torch, until something compiles.

    `DistributedDataParallel` asks the compiler for one setting. Nothing has changed that while the compiler isn't imported.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    answering = _Compiler()
    torch.__dict__["_dynamo"] = answering
    try:
        yield
    finally:
        # An import in the meantime has put the compiler there.
        if torch.__dict__.get("_dynamo") is answering:
            del torch.__dict__["_dynamo"]


class _Compiler:
    """`torch._dynamo` with its default for `DistributedDataParallel`. For everything else, it imports the compiler."""

    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


class _Step(nn.Module):
    """A module whose forward is the user's `training_step`.

    Attributes:
        mark: a zero, of the type and on the device of the module's parameters; None without `marks`.
    """

    def __init__(self, module: Any, marks: bool) -> None:
        super().__init__()
        learning = next(filter(_learns, module.parameters()))
        self.mark = nn.Parameter(torch.zeros((), dtype=learning.dtype, device=learning.device)) if marks else None
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)
