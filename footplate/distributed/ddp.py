"""Data parallelism: every rank has the whole model, and gradients are averaged.

With automatic optimisation, torch's `DistributedDataParallel` averages them while the backward pass is still running.
It wraps a tiny module whose forward is the user's `training_step`, so that all of it, not just `forward`, goes through:

    DistributedDataParallel( _Step( module ) )(batch, batch_idx)  →  module.training_step(batch, batch_idx)

Which gradients travel together decides in which order a sum over three or more ranks is added up, hence its last bits. So
the buckets are a function of the parameters alone, from the first step on (`_FixedBuckets`): a run that was killed adds up
as it did before. They are made again when a parameter is frozen or unfrozen.

A rank may skip a batch, by returning no loss. The others wait for its gradients, so it sends zeros. When all ranks have
skipped all batches of a window, there must be no step, as in one process. How do they know, without another message?
`_Step` has a parameter of its own, a zero that is added to the loss of a rank that has not skipped. Its gradient travels
with the others; where it is zero after the window, every rank has skipped. Only ranks that have skipped read it.

With manual optimisation there may be several backward passes and optimizers in any order, which DDP's bookkeeping can't
follow: there, the gradients of an optimizer are averaged in flat buckets just before it steps.

Buffers (running statistics of batch norm, say) follow rank 0: they are sent before each training batch, and before an
evaluation, so that every rank evaluates, and a checkpoint of rank 0 holds, the same model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from footplate.distributed.base import Strategy
from footplate.distributed.buckets import average_gradients, mean_over_ranks, send_from_first

_learns = attrgetter("requires_grad")


class DDP(Strategy):
    """See the module's docstring.

    Args:
        find_unused_parameters: look in each step for parameters that the loss doesn't depend on; without it, DDP raises
            when there are some.
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
                self._wrapped.require_backward_grad_sync = syncs  # what its no_sync() sets
            if self._buffers:
                self._wrapped.require_forward_param_sync = True  # they are sent inside a window too
        elif self._buffers:
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
        average_gradients([parameter for parameter in parameters if parameter.requires_grad])

    def release(self) -> None:
        if self._wrapped is not None:
            self._wrapped = None
            gc.collect()  # its hooks on the parameters go with it

    def _wrap(self, step: nn.Module) -> None:
        """Have the gradients of all parameters that learn now averaged in the backward pass."""
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

    Torch's own has one bucket for all parameters in its first step, and then makes buckets in the order in which that
    step's gradients became ready. A resumed run's first step is another one, so it would add up in another order. Here
    the buckets are final before the first step: the last parameters of the module come first, as their gradients are
    ready in about that order. (With `find_unused_parameters`, torch does the same by itself.)
    """

    def __init__(self, step: nn.Module, **settings: Any) -> None:
        super().__init__(step, **settings)
        if not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        if self.find_unused_parameters:
            return parameters, sparse
        return [parameters[0], *parameters[:0:-1]], [sparse[0], *sparse[:0:-1]]  # the mark, which is ready first


class _Step(nn.Module):
    """Its forward is the module's `training_step`.

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
