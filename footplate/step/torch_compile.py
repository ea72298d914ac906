"""Modules wrapped by `torch.compile(module)`: unwrap them, and compile in place.

    trainer.fit(torch.compile(module))     trains `module`; names in checkpoints have no `_orig_mod.`

`torch.compile` returns a wrapper with a compiled `forward`. The trainer calls the wrapped module's `training_step`, which
never uses the wrapper. So `unwrapped` compiles, with the same compiler, the functions that `training_step` calls: the
module's own `forward`, for a step that calls `self(x)`, and its layers, for a step that calls `self.net(x)`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.distributed.base import Strategy
from footplate.hardware.base import Accelerator
from footplate.step.torch_internals import compile_in_place, inside, is_compiled


def unwrapped(model: Any, accelerator: Accelerator, strategy: Strategy) -> Any:
    """Return the module to run, compiled in place if `torch.compile` has wrapped it.

    Raises:
        ConfigError: this accelerator or strategy doesn't compile modules.
    """
    module = inside(model)
    if module is not model:
        accelerator.check_arguments({"compile": model.dynamo_ctx})
        if strategy.copies:
            raise ConfigError(
                'A compiled module doesn\'t go with strategy="replicas": give the module itself, or use strategy="ddp".'
            )
        for name, part in (("", module), *layers(module)):
            if not is_compiled(part):
                compile_in_place(part, code_name(module, name), model.dynamo_ctx)
    return module


def compile_children(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Compile a module's layers in place, so that the names in checkpoints stay the same.

    `training_step` with its logging stays Python; its calls of children run compiled code. A module without children is
    compiled as a whole.
    """
    for name, part in layers(module) or [("", module)]:
        compile_in_place(part, code_name(module, name), functools.partial(torch.compile, **options))


def in_graphs(module: torch.nn.Module, device: torch.device) -> bool:
    """Return True if a compiled layer may be a CUDA graph, whose next run overwrites its gradients."""
    return device.type == "cuda" and any(is_compiled(part) for part in module.modules())


def layers(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the children that have parameters, with their names."""
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]


def code_name(module: torch.nn.Module, name: str) -> str:
    """Return a name for the code of one child of all modules of a class, or of these modules themselves."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}.{name or 'forward'}"
