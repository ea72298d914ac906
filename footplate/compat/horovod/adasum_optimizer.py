"""DistributedOptimizer with op=Adasum: each rank steps for itself, and what the steps have changed is combined.

Adasum weighs directions against each other, and what an optimizer such as Adam makes of a gradient is another direction
than the gradient's. So the parameters are remembered, the optimizer steps, and each parameter's change is combined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from footplate.compat.horovod.errors import MisuseError
from footplate.compat.horovod.submit import Adasum, synchronize
from footplate.compat.horovod.verbs import allreduce_async_


class AdasumMethods:
    """What such an optimizer does differently; its class comes before the optimizer's own."""

    _named: list[tuple[str, nn.Parameter]]
    _compression: Any

    def _begin(self, named: Sequence[tuple[str, nn.Parameter]], compression: Any, passes: int) -> None:
        # Nothing is sent before the step, so how many backward passes come before it needs no counting.
        self._named = list(named)
        self._compression = compression

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine what that changes."""
        before = [parameter.detach().clone() for _, parameter in self._named]
        loss = super().step(closure)  # type: ignore[misc]
        waits = []
        for (name, parameter), start in zip(self._named, before, strict=True):
            travelling, ctx = self._compression.compress(parameter.detach() - start)
            waits.append((parameter, start, allreduce_async_(travelling, name=f"change.{name}", op=Adasum), ctx))
        for parameter, start, handle, ctx in waits:
            parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return loss

    def synchronize(self) -> None:
        """Does nothing: the gradients stay this rank's own."""

    def skip_synchronize(self) -> NoReturn:
        """Not possible.

        Raises:
            MisuseError: always.
        """
        raise MisuseError("skip_synchronize() doesn't go with op=Adasum, which combines what a step has changed.")
