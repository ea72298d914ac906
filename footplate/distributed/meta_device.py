"""Layers that were built on torch's meta device, where tensors have a shape and no memory.

    with torch.device("meta"):
        self.net = Net()            in __init__ or configure_model

`materialize` gives their tensors memory on a device, and lets the layers fill them. torch's layers have a method for that,
`reset_parameters()`. It goes from the innermost layers to the outermost one. So a layer of one's own may have such a method
too, which changes what its parts have drawn.

A model may also have a method that fills any of its layers: `_init_weights(layer)`, as transformers' models do. It is
called for each layer of the model, after the layer's own `reset_parameters()`, and also from the innermost layers to the
outermost one: some models fill the parts of a layer when they are called for the layer. Tensors of a layer without
`reset_parameters()` get NaN before, so that one that `_init_weights` leaves out is found.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError

Initializer = Callable[[nn.Module], Any]
NONE: Mapping[int, Initializer] = MappingProxyType({})


def on_meta(module: nn.Module) -> bool:
    """Return True if a parameter or buffer of a module is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def innermost_first(
    module: nn.Module, name: str = "", skip: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a module with their names, each after its parts, the module itself last.

    Args:
        module: the module.
        name: its name.
        skip: layers to leave out with their parts.
    """
    seen = {id(layer) for layer in skip}

    def layers(layer: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        for part, child in layer.named_children():
            yield from layers(child, f"{name}.{part}" if name else part)
        yield name, layer

    return layers(module, name)


def initializers_of(module: nn.Module) -> dict[int, Initializer]:
    """The `_init_weights(layer)` of each layer by the layer's id: its own, or that of the nearest layer around it."""
    initializers: dict[int, Initializer] = {}

    def collect(layer: nn.Module, around: Initializer | None) -> None:
        own = getattr(layer, "_init_weights", None)
        nearest = own if callable(own) and _takes_a_layer(own) else around
        if nearest is not None:
            initializers[id(layer)] = nearest
        for child in layer.children():
            collect(child, nearest)

    collect(module, None)
    return initializers


def _takes_a_layer(function: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    return len(parameters) == 1 and parameters[0].default is parameters[0].empty


@torch.no_grad()
def materialize(
    layers: Iterator[tuple[str, nn.Module]], device: torch.device, initializers: Mapping[int, Initializer] = NONE
) -> None:
    """Replace the meta tensors of some layers by real ones, and let the layers fill them.

    Args:
        layers: names and layers, each after its parts.
        device: where the tensors are made.
        initializers: of the whole model, from `initializers_of`.

    Raises:
        ConfigError: a layer can't fill its tensors, or has real ones too, which it would overwrite.
    """
    made: dict[int, Tensor] = {}
    ours: set[int] = set()
    changed: list[str] = []
    unfilled: list[tuple[Tensor, str, nn.Module, Initializer]] = []
    for name, layer in layers:
        reset, prefix = _reset_of(layer), f"{name}." if name else ""
        initialize, own = initializers.get(id(layer)), len(changed)
        for table in _tables(layer):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if reset is None and initialize is None:
                    raise _no_reset(prefix + key, layer)
                if id(tensor) not in made:
                    made[id(tensor)] = _empty_like(tensor, device)
                    if reset is None and initialize is not None and tensor.is_floating_point():
                        made[id(tensor)].fill_(math.nan)
                        unfilled.append((made[id(tensor)], prefix + key, layer, initialize))
                    ours.add(id(made[id(tensor)]))
                table[key] = made[id(tensor)]
                changed.append(prefix + key)
        if reset is not None and any(key.startswith(prefix) for key in changed):
            for key, parameter in layer.named_parameters():
                if id(parameter) not in ours:
                    raise _overwrites(next(key for key in changed if key.startswith(prefix)), prefix + key, layer)
            reset()
        if initialize is not None and (len(changed) > own or _is_new(layer, ours)):
            initialize(layer)
    for tensor, name, layer, initialize in unfilled:
        if bool(tensor.isnan().any()):
            raise _not_filled(name, layer, initialize)


def configure_layers(module: Any) -> None:
    """Call a module's `configure_model`, and make the layers that it leaves on the meta device on the CPU.

    Raises:
        ConfigError: a layer on the meta device can't give its tensors their numbers.
    """
    module.configure_model()
    if on_meta(module):
        materialize(innermost_first(module), torch.device("cpu"), initializers_of(module))


def spanning_reset(module: nn.Module, units: Collection[nn.Module]) -> bool:
    """Return True if a layer around some of the units fills tensors of its parts, and some are on the meta device."""
    ids = {id(unit) for unit in units}
    return any(
        _reset_of(layer) is not None and on_meta(layer) and any(id(part) in ids for part in layer.modules())
        for layer in module.modules()
        if id(layer) not in ids
    )


def _is_new(layer: nn.Module, ours: Collection[int]) -> bool:
    """Return True if parameters of a layer or its parts were made here, and the others are sharded already."""
    others = [parameter for parameter in layer.parameters() if id(parameter) not in ours]
    return len(others) < len(list(layer.parameters())) and all(hasattr(other, "to_local") for other in others)


def _not_filled(name: str, layer: nn.Module, initialize: Initializer) -> ConfigError:
    owner, kind = type(getattr(initialize, "__self__", layer)).__name__, type(layer).__name__
    return ConfigError(
        f"{name} is on the meta device, and {owner}._init_weights() doesn't give it its numbers. Let it do so for a "
        f"{kind}, define reset_parameters() on {kind}, or build this layer on a real device."
    )


def _no_reset(name: str, layer: nn.Module) -> ConfigError:
    kind = type(layer).__name__
    return ConfigError(
        f"{name} is on the meta device, and {kind} has no reset_parameters(), which would give it its numbers. Define it "
        f"on {kind}, or build this layer on a real device."
    )


def _overwrites(name: str, real: str, layer: nn.Module) -> ConfigError:
    return ConfigError(
        f"{name} is on the meta device and {real} is not: {type(layer).__name__}.reset_parameters() would overwrite the "
        "numbers of both. Build both on the meta device, or both on a real one."
    )


def _reset_of(layer: nn.Module) -> Callable[[], Any] | None:
    # torch.nn.MultiheadAttention has the second name.
    return getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)


def _tables(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return layer._parameters, layer._buffers


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor without numbers, with the attributes that users have given to the one on the meta device."""
    empty: Tensor = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty
