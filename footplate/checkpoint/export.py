"""Export of a model to a `.pt2` file with `torch.export`. The file needs neither Footplate nor the user's code.

    path = export_model(model, "flowers.pt2")          # during or after training

    import torch                                       # anywhere else
    predict = torch.export.load("flowers.pt2").module()
    predict(images)

The file holds the module's `forward`, in evaluation mode, on the CPU. The export works on a copy, so that a module in
training keeps its device, its mode and its gradients.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from footplate.core.errors import ConfigError


def export_model(module: nn.Module, path: str | Path, example_input: Any = None, dynamic_batch: bool = True) -> Path:
    """Export the `forward` of a module to a `.pt2` file that `torch.export.load(path).module()` runs anywhere.

    Args:
        module: the module, on any device and in any mode. It is not changed.
        path: the file; its name ends in `.pt2`. An existing file is replaced when the new one is complete.
        example_input: an input of `forward`: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            The module's `example_input_array` by default.
        dynamic_batch: let the first dimension of the inputs vary. If the model doesn't allow it, there is a warning, and
            the file accepts the example's batch size only.

    Returns:
        The path.

    Raises:
        ConfigError: there is no example input, the path doesn't end in `.pt2`, or `forward` can't be exported.

    Examples:
        >>> path = fp.export_model(model, "flowers.pt2", example_input=torch.zeros(2, 4))
        >>> torch.export.load(path).module()(torch.zeros(3, 4)).shape
        torch.Size([3, 1])
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ConfigError(f'path="{path}": expected a file name that ends in ".pt2".')

    program = trace(module, example_input, dynamic_batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.pt2")
    try:
        torch.export.save(program, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def trace(module: nn.Module, example_input: Any = None, dynamic_batch: bool = True) -> ExportedProgram:
    """Trace the `forward` of a module; arguments and errors are those of `export_model`."""
    if example_input is None:
        example_input = getattr(module, "example_input_array", None)
    name = type(module).__name__
    if example_input is None:
        raise ConfigError(
            f"{name} can't be exported without an example of its input. "
            "Pass example_input=…, or set self.example_input_array in the module."
        )

    replica = cpu_copy(module).eval()
    args, kwargs = _on_cpu(_arguments(example_input))
    with torch.no_grad():
        reason = None
        if dynamic_batch:
            try:
                return _trace_with_any_batch(replica, args, kwargs)
            except Exception as error:
                reason = _first_line(error)
        try:
            program = torch.export.export(replica, args, kwargs)
        except Exception as error:
            raise ConfigError(f"{name}.forward can't be exported by torch.export: {_first_line(error)}") from error
    if reason:
        warnings.warn(f"{name} is exported for the example's batch size only: {reason}", stacklevel=3)
    return program


def cpu_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU, without a second copy on the device.

    Raises:
        ConfigError: the module holds something that can't be copied.
    """
    # The original module, if torch.compile wrapped it.
    module = getattr(module, "_orig_mod", module)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("cpu", copy=True), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} can't be copied ({_first_line(error)}). "
            "Don't keep open files, locks or connections in the module's attributes."
        ) from error


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _on_cpu(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _trace_with_any_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export with a free first dimension. A single row is doubled, because torch.export treats size 1 as a constant."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        raise ValueError("no input has a first dimension")
    batch_size = len(tensors[0])

    def is_batched(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch_size

    # Use new tensors, because torch.export leaves marks on tensors that it traced.
    args, kwargs = _on_cpu((args, kwargs))
    if batch_size == 1:
        args, kwargs = pytree.tree_map(
            lambda leaf: torch.cat([leaf, leaf]) if is_batched(leaf) else leaf, (args, kwargs)
        )
        batch_size = 2
    shapes = pytree.tree_map(lambda leaf: {0: Dim.DYNAMIC} if is_batched(leaf) else None, kwargs or args)
    return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
