"""DistributedOptimizer with op=Adasum: each rank steps on its own gradients, and the changes are combined.

Adasum compares directions. The step of an optimizer such as Adam has another direction than the gradient. So the parameters
are copied, the optimizer steps, and the change of each parameter is combined.
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
    """The methods of an Adasum optimizer; this class comes before the optimizer's own."""

    _named: list[tuple[str, nn.Parameter]]
    _compression: Any

    def _begin(self, named: Sequence[tuple[str, nn.Parameter]], compression: Any, passes: int) -> None:
        # Nothing is sent before the step, so the number of backward passes before it doesn't matter.
        self._named = list(named)
        self._compression = compression

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine the changes of all ranks."""
        before = [parameter.detach().clone() for _, parameter in self._named]
        loss = super().step(closure)  # type: ignore[misc]
        waits = []
        for (name, parameter), start in zip(self._named, before, strict=True):
            compressed, ctx = self._compression.compress(parameter.detach() - start)
            waits.append((parameter, start, allreduce_async_(compressed, name=f"change.{name}", op=Adasum), ctx))
        for parameter, start, handle, ctx in waits:
            parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return loss

    def synchronize(self) -> None:
        """Do nothing: each rank keeps its own gradients."""

    def skip_synchronize(self) -> NoReturn:
        """Not supported with Adasum.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "skip_synchronize() can't be used with op=Adasum, which combines the changes of a step. Leave it out."
        )
