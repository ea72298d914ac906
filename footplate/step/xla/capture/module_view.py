"""The module as its step sees it during capture.

For that time, the module's class is a subclass of its own. `self.log` collects. The numbers that change from step to
step become inputs (`symbolic_scalars.py`). Plain attributes that are read are recorded (`attribute_guards.py`). The
capture does what a trainer would do for the module (`self.optimizers()`, `self.clip_gradients`, …).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from footplate.core.hooks import step_arguments
from footplate.step.xla.capture.arithmetic import Number
from footplate.step.xla.capture.attribute_guards import Reads
from footplate.step.xla.capture.refusals import CaptureError, calling_place
from footplate.step.xla.capture.symbolic_scalars import Counters, CountingTrainer


class Logs:
    """The values that a step has given to `self.log`, and the attributes that it has read."""

    def __init__(self, counters: Counters, module: Any) -> None:
        self.counters = counters
        # The parameters of `log`, without the name and the value.
        self._parameters = tuple(inspect.signature(module.log).parameters)[2:]
        self.values: dict[str, Tensor] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.reads = Reads()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Number):
            value = value.tensor().to(self.counters.floating)
        if not isinstance(value, (Tensor, int, float)):
            raise CaptureError(
                f'self.log("{name}", …) was given a {type(value).__name__}:\n    {calling_place()}\n'
                "A captured step logs tensors and numbers; use the metric's functional form (torchmetrics.functional)."
            )
        # A copy, since the step may change its own tensor in place later on.
        value = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
        self.values[name] = value
        options = self.options[name] = dict(zip(self._parameters, args, strict=False)) | kwargs
        if isinstance(options.get("batch_size"), Tensor):
            raise CaptureError(
                f'self.log("{name}", …, batch_size=…) was given a tensor:\n    {calling_place()}\n'
                'A captured step takes a number there. Log the sum and the count, each with reduce_fx="sum".'
            )

    @property
    def reductions(self) -> dict[str, str]:
        """The reduction of each name: "mean", "sum", "min", "max", or the name of a function."""
        return {name: reduction_of(options) for name, options in self.options.items()}


def reduction_of(options: Mapping[str, Any]) -> str:
    """The reduction of values that were logged with these arguments."""
    reduction = options.get("reduce_fx", "mean")
    return reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")


@contextmanager
def viewed_module(module: Any, logs: Logs, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """The module as its step sees it, in a block.

    Args:
        module: the user's module.
        logs: collects logged values and read attributes.
        methods: further methods that are replaced. Each gets the call's arguments without the module.
    """
    own: Any = type(module)
    counters = logs.counters
    seen = {
        "log": _without_self(logs.log),
        "trainer": property(lambda self: CountingTrainer(own.trainer.fget(self), counters)),
        "current_epoch": property(lambda self: counters.number("current_epoch")),
        "global_step": property(lambda self: counters.number("global_step")),
        **{name: _without_self(method) for name, method in methods.items()},
    }
    object.__setattr__(module, "__class__", type(own.__name__, (own,), seen))
    try:
        with logs.reads.noted(module):
            yield
    finally:
        object.__setattr__(module, "__class__", own)


def _without_self(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: method(*args, **kwargs)


def call_step(
    step: Callable[..., Any], name: str, batch: Any, counters: Counters, dataloader_idx: int | None = None
) -> Any:
    """Call a step function with as many arguments as it takes. The index of the batch is a counter."""
    arguments: tuple[Any, ...] = (batch, counters.number("batch_idx"))
    if dataloader_idx is not None:
        arguments += (dataloader_idx,)
    return step(*arguments[: step_arguments(step, name)])
