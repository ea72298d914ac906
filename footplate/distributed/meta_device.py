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

Tensors that get their numbers from files (`stored_weights.py`) only get memory here. A layer that has no other tensors on
the meta device isn't asked to fill them.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.distributed.stored_weights import fill, stored_of

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
    layers: Iterable[tuple[str, nn.Module]], device: torch.device, initializers: Mapping[int, Initializer] = NONE
) -> None:
    """Replace the meta tensors of some layers by real ones, and let the layers fill them.

    Tensors that get their numbers from files have none yet.

    Args:
        layers: names and layers, each after its parts.
        device: where the tensors are made.
        initializers: of the whole model, from `initializers_of`.

    Raises:
        ConfigError: a layer can't fill its tensors, or has real ones too, which it would overwrite.
    """
    made: dict[int, Tensor] = {}
    # The tensors that were made here, and those of them that the layers fill.
    ours: set[int] = set()
    drawn: set[int] = set()
    changed: list[str] = []
    unfilled: list[_Unfilled] = []
    for name, layer in layers:
        reset, prefix = _reset_of(layer), f"{name}." if name else ""
        initialize, own, stored = initializers.get(id(layer)), len(changed), stored_of(layer)
        for table in _tables(layer):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                draws = key not in stored
                if draws and reset is None and initialize is None:
                    raise _no_reset(prefix + key, layer)
                if id(tensor) not in made:
                    made[id(tensor)] = _empty_like(tensor, device)
                    ours.add(id(made[id(tensor)]))
                    if draws and not _fills_all(layer):
                        unfilled.append(_Unfilled(made[id(tensor)], prefix + key, layer, initialize))
                table[key] = made[id(tensor)]
                if draws:
                    drawn.add(id(table[key]))
                    changed.append(prefix + key)
        if reset is not None and any(key.startswith(prefix) for key in changed):
            for key, parameter in layer.named_parameters():
                if id(parameter) not in ours:
                    raise _overwrites(next(key for key in changed if key.startswith(prefix)), prefix + key, layer)
            reset()
        if initialize is not None and (len(changed) > own or _is_new(layer, drawn)):
            initialize(layer)
    for tensor in unfilled:
        tensor.check()


class _Unfilled:
    """A new tensor that its layer should fill. A floating-point one is NaN until then."""

    def __init__(self, tensor: Tensor, name: str, layer: nn.Module, initialize: Initializer | None) -> None:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
        self._tensor, self._name, self._layer, self._initialize = tensor, name, layer, initialize
        self._version = tensor._version

    def check(self) -> None:
        """Check that the layer has filled the tensor.

        Raises:
            ConfigError: it hasn't.
        """
        tensor = self._tensor
        left = bool(tensor.isnan().any()) if tensor.is_floating_point() else tensor._version == self._version
        if left:
            raise _not_filled(self._name, self._layer, self._initialize)


def _fills_all(layer: nn.Module) -> bool:
    """Return True if `reset_parameters` is known to fill all tensors of a layer, since the layer is torch's."""
    return type(layer).__module__.startswith("torch.nn.") and _reset_of(layer) is not None


def draws(layer: nn.Module) -> bool:
    """Return True if a layer itself has tensors on the meta device that it must fill."""
    return any(_draws_of(layer, table) for table in _tables(layer))


def _draws_of(layer: nn.Module, table: Mapping[str, Any]) -> bool:
    stored = stored_of(layer)
    return any(tensor is not None and tensor.is_meta and key not in stored for key, tensor in table.items())


def pieces_of(
    layers: Iterable[tuple[str, nn.Module]], initializers: Mapping[int, Initializer]
) -> list[list[tuple[str, nn.Module]]]:
    """Divide layers into pieces, so that the layers of a piece are filled without those of another.

    A layer alone is a piece, unless a layer around it fills the tensors of its parts.

    Args:
        layers: names and layers, each after its parts.
        initializers: of the whole model, from `initializers_of`.
    """
    layers = list(layers)
    if _shares(layer for _, layer in layers):
        return [layers]
    pieces: list[list[tuple[str, nn.Module]]] = []
    drawing = {id(layer) for _, layer in layers if draws(layer)}
    drawing_parameters = {id(layer) for _, layer in layers if _draws_of(layer, layer._parameters)}
    for name, layer in layers:
        piece = [(name, layer)]
        inside = {id(part) for part in layer.modules()}
        # `materialize` calls the methods of a layer in these cases.
        resets = _reset_of(layer) is not None and inside & drawing
        initializes = id(layer) in initializers and (id(layer) in drawing or inside & drawing_parameters)
        if resets or initializes:
            while pieces and id(pieces[-1][-1][1]) in inside:
                piece = pieces.pop() + piece
        pieces.append(piece)
    return pieces


def _shares(layers: Iterable[nn.Module]) -> bool:
    """Return True if some layers share a tensor that one of them fills, or a layer."""
    layers = list(layers)
    tensors = [
        (id(tensor), key in stored_of(layer))
        for layer in layers
        for table in _tables(layer)
        for key, tensor in table.items()
        if tensor is not None
    ]
    shared = Counter(number for number, _ in tensors)
    children = [id(child) for layer in layers for child in layer._modules.values() if child is not None]
    return len(set(children)) < len(children) or any(shared[number] > 1 and not stored for number, stored in tensors)


def configure_layers(module: Any) -> None:
    """Call a module's `configure_model`, and make the layers that it leaves on the meta device on the CPU.

    Raises:
        ConfigError: a layer on the meta device can't give its tensors their numbers.
    """
    module.configure_model()
    if on_meta(module):
        materialize(innermost_first(module), torch.device("cpu"), initializers_of(module))
        fill(module.modules())


def spanning_reset(module: nn.Module, units: Collection[nn.Module]) -> bool:
    """Return True if a layer around some of the units fills tensors of its parts, and some are on the meta device."""
    ids = {id(unit) for unit in units}
    return any(
        _reset_of(layer) is not None
        and any(draws(part) for part in layer.modules())
        and any(id(part) in ids for part in layer.modules())
        for layer in module.modules()
        if id(layer) not in ids
    )


def _is_new(layer: nn.Module, drawn: Collection[int]) -> bool:
    """Return True if parameters of a layer or its parts are filled here, and the others are sharded already."""
    others = [parameter for parameter in layer.parameters() if id(parameter) not in drawn]
    return len(others) < len(list(layer.parameters())) and all(hasattr(other, "to_local") for other in others)


def _not_filled(name: str, layer: nn.Module, initialize: Initializer | None) -> ConfigError:
    owner, kind = type(getattr(initialize, "__self__", layer)).__name__, type(layer).__name__
    if initialize is None:
        return ConfigError(
            f"{name} is on the meta device, and {kind}.reset_parameters() doesn't give it its numbers. Let it do so, or "
            "build this layer on a real device."
        )
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
