"""Modules that come out of `torch.compile(module)`: unwrapped, and compiled in place.

    trainer.fit(torch.compile(module))     trains `module`; names in checkpoints have no `_orig_mod.`

`torch.compile` returns a wrapper whose `forward` is compiled. The trainer calls `training_step` of the module inside, so
what the wrapper compiles is put where that finds it: on the module's own `forward`, for a step that calls `self(x)`, and on
its layers, for one that calls `self.net(x)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.distributed.base import Strategy
from footplate.hardware.base import Accelerator


def inside(model: Any) -> Any:
    """The module that `torch.compile` has wrapped; any other object as it is."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # loaded by the first torch.compile
    return model._orig_mod if dynamo is not None and isinstance(model, dynamo.OptimizedModule) else model


def unwrapped(model: Any, accelerator: Accelerator, strategy: Strategy) -> Any:
    """The module to run, compiled in place if `torch.compile` has wrapped it.

    Raises:
        ConfigError: modules aren't compiled with this accelerator or strategy.
    """
    module = inside(model)
    if module is not model:
        accelerator.check_arguments({"compile": model.dynamo_ctx})
        if strategy.copies:
            raise ConfigError(
                'A compiled module doesn\'t go with strategy="replicas": give the module itself, or use strategy="ddp".'
            )
        for part in (module, *layers(module)):
            if part._compiled_call_impl is None:
                compile_in_place(part, model.dynamo_ctx)
    return module


def layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The children that have parameters."""
    return [child for child in module.children() if any(True for _ in child.parameters())]


def compile_in_place(part: torch.nn.Module, compiler: Callable[..., Any]) -> None:
    """`part.compile()`, also where the class is one of torch's own, whose frames the compiler passes over."""
    call = part._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled: Any = _Compiled(compiler(forward))
    part._compiled_call_impl = compiled


class _Compiled:
    """A compiled function of this process, which copies and pickles of its module leave behind."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_compiled, ()


def _not_compiled() -> None:
    """The value of `_compiled_call_impl` of a module that isn't compiled."""
