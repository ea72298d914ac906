"""Data parallelism: every rank has the whole model, and gradients are averaged.

With automatic optimisation, torch's `DistributedDataParallel` averages them while the backward pass is still running.
It wraps a tiny module whose forward is the user's `training_step`, so that all of it, not just `forward`, goes through:

    DistributedDataParallel( _Step( module ) )(batch, batch_idx)  →  module.training_step(batch, batch_idx)

With manual optimisation there may be several backward passes and optimizers in any order, which DDP's bookkeeping can't
follow: there, the gradients of an optimizer are averaged in flat buckets just before it steps.

Buffers (running statistics of batch norm, say) follow rank 0: they are sent before each training batch, and before an
evaluation, so that every rank evaluates, and a checkpoint of rank 0 holds, the same model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from footplate.parallel.base import Strategy
from footplate.parallel.buckets import average_gradients, mean_over_ranks, send_from_first


class DDP(Strategy):
    """See the module's docstring.

    Args:
        find_unused_parameters: look in each step for parameters that the loss doesn't depend on; without it, DDP raises
            when there are some.
    """

    name = "ddp"
    several = True

    def __init__(self, find_unused_parameters: bool = False) -> None:
        self._find_unused_parameters = find_unused_parameters
        self.skips = not find_unused_parameters
        self._wrapped: DistributedDataParallel | None = None
        self._buffers: list[Tensor] = []

    def prepare(self, module: nn.Module) -> None:
        send_from_first([*module.parameters(), *module.buffers()])

    def training_step(self, module: Any) -> Callable[..., Any]:
        self._buffers = list(module.buffers())
        self.release()
        if not module.automatic_optimization or not any(p.requires_grad for p in module.parameters()):
            return module.training_step
        self._wrapped = DistributedDataParallel(
            _Step(module),
            init_sync=False,
            find_unused_parameters=self._find_unused_parameters,
        )
        return self._wrapped

    def begin_batch(self, syncs: bool) -> None:
        if self._wrapped is not None:
            if self._wrapped.require_backward_grad_sync != syncs:
                self._wrapped.require_backward_grad_sync = syncs  # what its no_sync() sets
            if self._buffers:
                self._wrapped.require_forward_param_sync = True  # they are sent inside a window too
        elif self._buffers:
            send_from_first(self._buffers)

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


class _Step(nn.Module):
    """Its forward is the module's `training_step`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)
