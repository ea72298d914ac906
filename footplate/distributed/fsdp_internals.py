"""FSDP2's private names: collectives whose time can be measured, and steps after which weights are freed.

**Collectives.** FSDP2 gathers the parameters of a unit before its forward and its backward pass. After the backward pass it
averages and scatters their gradients. On the CPU, the host waits in each of these calls until all ranks have made it. So
the time of a call is the time for which the rank waits for other ranks and for the data. On a GPU, the calls only enqueue
kernels, and their time says nothing.

    collectives = Collectives()
    collectives.attach(unit)            once for each unit
    collectives.times = times           from now on, the calls count as "communication" in a `TimeSplit`

The calls are torch's own, so the numbers stay the same. To measure a call takes about a microsecond.

**Steps.** A step is a forward pass of the root, and `self(x)` in it is another one. FSDP2 keeps the root's weights after a
forward pass, since the backward pass comes next. It doesn't expect a forward pass within another: at the end of the outer
one it frees the weights, and gathers them a second time. After an evaluation without `self(x)`, it keeps them until the
next training step, and so does each unit that keeps its weights after a forward pass. That step would compute with old
weights if a callback has exchanged them meanwhile. `frees_weights` mends both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from footplate.core.time_split import TimeSplit


class Collectives:
    """The collectives of the units of one module.

    Attributes:
        times: in which their time counts; None if it isn't measured.
    """

    def __init__(self) -> None:
        self.times: TimeSplit | None = None

    def attach(self, unit: Any) -> None:
        """Let a unit, from `fully_shard`, communicate through these."""
        unit.set_custom_all_gather(_AllGather(self))
        unit.set_custom_reduce_scatter(_ReduceScatter(self))

    def measured(self) -> contextlib.AbstractContextManager[None]:
        """The context of a call."""
        return contextlib.nullcontext() if self.times is None else self.times.during("communication")


class _Measured:
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._collectives.measured():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _AllGather(_Measured, DefaultAllGather):
    """All ranks' parts of some parameters."""


class _ReduceScatter(_Measured, DefaultReduceScatter):
    """A rank's part of some gradients, averaged over all ranks."""


def frees_weights(module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step after which weights are kept for the backward pass as FSDP2 means to, and freed if there is none.

    Args:
        module: the root, from `fully_shard`.
        step: a method of it, before `register_fsdp_forward_method`.
    """
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    state = module._get_fsdp_state()
    # Older versions of torch have one group. A root without parameters of its own has none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]

    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        # `self(x)` has set the state to IDLE. FSDP2 keeps weights at the end of what it takes for a forward pass.
        trains = torch.is_grad_enabled()
        for group in groups:
            group._training_state = TrainingState.FORWARD if trains else TrainingState.IDLE
        if not trains:
            for unit in units:
                unit.reshard()
        return output

    return call
