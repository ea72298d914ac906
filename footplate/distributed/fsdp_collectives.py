"""FSDP2's collectives, whose time can count as communication.

FSDP2 gathers the parameters of a unit before its forward and its backward pass. After the backward pass it averages and
scatters their gradients. On the CPU, the host waits in each of these calls until all ranks have made it. So the time of a
call is the time for which the rank waits for other ranks and for the data. On a GPU, the calls only enqueue kernels, and
their time says nothing.

    collectives = Collectives()
    collectives.attach(unit)            once for each unit
    collectives.times = times           from now on, the calls count as "communication" in a `TimeSplit`

The calls are torch's own, so the numbers stay the same. To measure a call takes about a microsecond.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

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
