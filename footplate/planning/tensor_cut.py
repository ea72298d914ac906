"""The part of a model that one rank of a tensor-parallel group computes.

    up.weight    (14336, 4096), by columns, two ranks  →  (7168, 4096)
    down.weight  (4096, 14336), by rows,    two ranks  →  (4096, 7168)

The layers of a copy on the meta device get the shapes of a rank's parts, by the plan that the trainer uses. A capture of
the copy then has the arithmetic and the memory of one rank. It has no exchange between ranks, so hooks at the cut layers
note what they would send. A layer that gathers its outputs, or splits its inputs, does the same to shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.distributed.tensor_parallel_plan import planned_layers


@dataclass
class Exchanges:
    """What each rank of a group sends to the others in one step, in bytes.

    For a sum of S bytes over n ranks that is 2 (n - 1) / n · S, as in a ring. A gather sends half of it.

    Attributes:
        forward: sums and gathers of outputs. The next operation waits for them.
        backward: sums of the gradients of inputs.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def extended(self, other: Exchanges, times: float) -> Exchanges:
        """Return these exchanges, with `times` times what another batch's are larger by."""
        return Exchanges(
            [own + times * (more - own) for own, more in zip(self.forward, other.forward, strict=True)],
            [own + times * (more - own) for own, more in zip(self.backward, other.backward, strict=True)],
        )


def cut(module: nn.Module, size: int) -> Exchanges:
    """Give the planned layers of a module on the meta device the shapes of one rank's parts.

    Args:
        module: the module; it is changed.
        size: the ranks of a group.

    Returns:
        The exchanges, which are noted whenever the module runs.

    Raises:
        ConfigError: there is no plan, or a layer can't be cut by it.
    """
    exchanges = Exchanges()
    cut_weights: dict[int, nn.Parameter] = {}
    for name, layer, style in planned_layers(module, size):
        kind = type(style).__name__
        if kind not in ("ColwiseParallel", "RowwiseParallel"):
            continue
        dimension = _dimension_of(layer, kind, name)
        _narrow(layer, "weight", dimension, size, name, cut_weights)
        if kind == "ColwiseParallel" and getattr(layer, "bias", None) is not None:
            _narrow(layer, "bias", 0, size, name, cut_weights)
        _add_hooks(layer, kind, style, size, exchanges)
    return exchanges


def _dimension_of(layer: nn.Module, kind: str, name: str) -> int:
    if isinstance(layer, nn.Linear):
        return 0 if kind == "ColwiseParallel" else 1
    if isinstance(layer, nn.Embedding):
        return 1 if kind == "ColwiseParallel" else 0
    raise ConfigError(
        f"{name} is a {type(layer).__name__}, which the plan of tensor parallelism cuts by {kind}. A plan for hardware "
        "knows linear layers and embeddings."
    )


def _narrow(layer: Any, key: str, dimension: int, size: int, name: str, cut_weights: dict[int, nn.Parameter]) -> None:
    whole = layer._parameters[key]
    if id(whole) not in cut_weights:
        shape = list(whole.shape)
        if shape[dimension] % size:
            raise ConfigError(
                f"tensor_parallel_size={size}: {name}.{key} has the shape {tuple(shape)}, and {shape[dimension]} can't be "
                f"divided by {size}."
            )
        shape[dimension] //= size
        cut_weights[id(whole)] = nn.Parameter(whole.new_empty(shape), whole.requires_grad)
    layer._parameters[key] = cut_weights[id(whole)]


def _add_hooks(layer: Any, kind: str, style: Any, size: int, exchanges: Exchanges) -> None:
    part = (size - 1) / size

    def note_sum(_: nn.Module, __: Any, output: Tensor) -> None:
        exchanges.forward.append(2 * part * output.nbytes)

    def note_input(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and args[0].requires_grad:
            exchanges.backward.append(2 * part * args[0].numel() * layer.weight.element_size())

    def split(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].narrow(-1, 0, args[0].shape[-1] // size), *args[1:])

    def gather(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        whole = output.unsqueeze(-2).expand(*output.shape[:-1], size, output.shape[-1]).flatten(-2)
        exchanges.forward.append(part * whole.nbytes)
        return whole

    is_linear = isinstance(layer, nn.Linear)
    if kind == "ColwiseParallel":
        if is_linear:
            layer.register_forward_pre_hook(note_input)
        if _is_whole(style.output_layouts):
            layer.register_forward_hook(gather)
    else:
        if is_linear and _is_whole(style.input_layouts):
            layer.register_forward_pre_hook(split)
        layer.register_forward_hook(note_sum)


def _is_whole(layouts: Any) -> bool:
    """Return True if the layout of a style is Replicate."""
    layout = layouts[0] if isinstance(layouts, (tuple, list)) else layouts
    return layout is not None and layout.is_replicate()
