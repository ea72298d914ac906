"""Sharded data parallelism (FSDP2): every rank keeps a part of each parameter, its gradient and its optimizer state.

The repeated blocks of a model, such as the layers of a transformer, are units of their own: their parameters are gathered
just before use and freed just after. `FSDPStrategy` (`fsdp_options.py`) chooses others. The other parameters belong to the
root. Units go to the device one by one, each just before it is sharded: a device never holds the whole model. Units that
the user has sharded stay as they are.

A unit on the meta device is sharded there. Then each rank gets memory for its shard, and the layers are filled one by one:

    whole on the device, with rank 0's numbers  →  the part that the rank keeps is copied into its shard

So a rank holds its shard and one layer. Of a layer whose numbers are in files (`stored_weights.py`), a rank reads only its
part.

The backward pass of every batch averages and shards the gradients, also inside an accumulation window. Whole gradients
until the end of the window would take the memory that sharding saves. And so a checkpoint only needs what a rank keeps.

In a mixed precision, weights are gathered in its 16-bit type: half of what float32 sends. Each rank keeps its part, and
averages gradients, in float32.

Gathering makes the forward pass collective. So every rank must run the same number of batches, in evaluation too
(`lockstep`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.core.time_split import TimeSplit
from footplate.distributed.base import Strategy
from footplate.distributed.buckets import mean_over_ranks, send_from_first
from footplate.distributed.fsdp_options import FSDPStrategy, layers_of
from footplate.distributed.meta_device import (
    Initializer,
    draws,
    initializers_of,
    innermost_first,
    materialize,
    pieces_of,
    spanning_reset,
)
from footplate.distributed.model_parallel_options import ModelParallelStrategy
from footplate.distributed.stored_weights import Stored, copy_part, fill, part_like, stored_of
from footplate.distributed.world import World

if TYPE_CHECKING:
    from footplate.distributed.fsdp_internals import Collectives

# A module stays sharded after a call of a trainer, and is trained again with the same collectives and options.
_COLLECTIVES: WeakKeyDictionary[nn.Module, Collectives] = WeakKeyDictionary()
_PREPARED: WeakKeyDictionary[nn.Module, tuple[Any, torch.dtype | None]] = WeakKeyDictionary()

# Names and layers, each after its parts.
Layers = list[tuple[str, nn.Module]]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP(Strategy):
    """Sharded data parallelism; see the module's docstring.

    Args:
        options: which layers are units, and when their weights are gathered.
        autocast: the type of the computation in a mixed precision.
    """

    name = "fsdp"
    is_distributed = True
    skips = False
    own_gradients = False
    sharded = True
    lockstep = True

    def __init__(self, options: FSDPStrategy | ModelParallelStrategy, autocast: torch.dtype | None = None) -> None:
        self._options = options
        self._autocast = autocast
        self._buffers: list[Tensor] = []
        self._module: nn.Module | None = None
        self._device = torch.device("cpu")

    def place(self, module: nn.Module, device: torch.device) -> None:
        # `prepare` moves it, unit by unit.
        self._device = device

    def prepare(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._module = module
        if module in _PREPARED:
            # In an earlier call of a trainer.
            self._check_same(module, *_PREPARED[module])
            module.to(self._device)
            return
        if not isinstance(module, FSDPModule):
            self._shard(module)
        _refuse_meta(module)
        # Layers that the user has sharded.
        fill(module.modules())
        _register_steps(module)
        _PREPARED[module] = self._options, self._autocast

    def _check_same(self, module: nn.Module, options: Any, autocast: torch.dtype | None) -> None:
        """Refuse a module that an earlier trainer has sharded in another way."""
        if (options, autocast) != (self._options, self._autocast):
            raise ConfigError(
                f"{type(module).__name__} was sharded by an earlier call, with {options!r} and its weights gathered in "
                f"{autocast or 'their own type'}, and stays so. This trainer has {self._options!r} and "
                f"{self._autocast or 'their own type'}. Use the same strategy and precision, or a new module with the "
                "weights of a checkpoint (ckpt_path)."
            )

    def _shard(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        units, kind, settings = self._units(module), type(module), self._settings()
        initializers = initializers_of(module)
        if spanning_reset(module, units):
            materialize(innermost_first(module), self._device, initializers)
        internals = _internals()
        collectives = None if internals is None else internals.Collectives()
        sharded: list[nn.Module] = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]
        for unit in (*units, module):
            layers = list(innermost_first(unit, skip=sharded))
            later = self._place_unit(layers, initializers)
            fully_shard(unit, **settings)
            self._make_shards(unit, later, initializers)
            fill(layer for _, layer in layers)
            sharded.append(unit)
            if collectives is not None:
                collectives.attach(unit)
        if collectives is not None:
            _COLLECTIVES[module] = collectives

        # FSDP2 gives the module a class of its own: let it have the user's name.
        own = type(module)
        own.__name__, own.__qualname__, own.__module__ = kind.__name__, kind.__qualname__, kind.__module__

    def _units(self, module: nn.Module) -> list[nn.Module]:
        """The layers to shard one by one, innermost first. Layers that the user has sharded are not among them."""
        from torch.distributed.fsdp import FSDPModule

        if self._options.auto_wrap_policy is None:
            return list(repeated_blocks(module))
        layers = layers_of(module, self._options, "auto_wrap_policy")
        return [layer for layer in layers if layer is not module and not isinstance(layer, FSDPModule)]

    def _settings(self) -> dict[str, Any]:
        """The arguments of `fully_shard`. What isn't given keeps torch's default."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        settings = self._groups()
        if self._options.mixed_precision is not None:
            settings["mp_policy"] = self._options.mixed_precision
        elif self._autocast is not None:
            # Autocast converts the inputs of the operations that need it. The targets in a batch keep their precision.
            settings["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=self._autocast, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        return settings

    def _groups(self) -> dict[str, Any]:
        """The arguments of `fully_shard` that say over which ranks it shards, and for how long."""
        from torch.distributed.device_mesh import init_device_mesh

        options: Any = self._options
        if options.sharding_strategy == "SHARD_GRAD_OP":
            return {"reshard_after_forward": False}
        if options.sharding_strategy == "HYBRID_SHARD":
            world = World.present()
            shape = options.device_mesh or (world.size // world.local_size, world.local_size)
            return {"mesh": init_device_mesh(self._device.type, shape, mesh_dim_names=("replicate", "shard"))}
        return {}

    def _place_unit(self, layers: Layers, initializers: Mapping[int, Initializer]) -> list[Layers]:
        """Move the layers of a unit to the device, with the numbers of rank 0, before the unit is sharded.

        Returns:
            The pieces that are still on the meta device, to be made once they are sharded.
        """
        later: list[Layers] = []
        now: Layers = []
        for piece in pieces_of(layers, initializers):
            if self._waits(piece):
                later.append(piece)
            else:
                now += piece
        materialize(now, self._device, initializers)
        for _, layer in layers:
            _apply_to(layer, lambda tensor: tensor if tensor.is_meta else tensor.to(self._device))
        self._send_from_first(tensors_of(now))
        return later

    def _waits(self, piece: Layers) -> bool:
        """Return True if no tensor of a piece has numbers yet: its parameters can be sharded before they are made."""
        tensors = tensors_of(piece)
        return bool(tensors) and all(tensor.is_meta and not hasattr(tensor, "to_local") for tensor in tensors)

    def _make_shards(self, unit: nn.Module, pieces: list[Layers], initializers: Mapping[int, Initializer]) -> None:
        """Give memory to the shards of a unit, and fill them piece by piece."""
        if not pieces:
            return
        empty = functools.partial(_empty_shard, device=self._device)
        for _, layer in itertools.chain.from_iterable(pieces):
            if layer is not unit:
                _apply_to(layer, empty)
        # FSDP2 takes note of the new memory of all parameters of the unit.
        unit._apply(empty, recurse=False)
        for piece in pieces:
            self._make_piece(piece, initializers)

    def _make_piece(self, piece: Layers, initializers: Mapping[int, Initializer]) -> None:
        """Make a piece, with the numbers of rank 0: whole, then the part that this rank keeps."""
        if not any(draws(layer) or _has_others(layer) for _, layer in piece):
            # Its numbers are in files.
            materialize(piece, self._device, initializers)
            return
        keep_shards = _whole_on_meta(piece)
        materialize(piece, self._device, initializers)
        self._send_from_first(tensors_of(piece))
        keep_shards()

    def _send_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        send_from_first(tensors)

    def training_step(self, module: Any) -> Callable[..., Any]:
        self._buffers = list(module.buffers())
        return module.training_step

    def begin_batch(self, syncs: bool) -> None:
        if self._buffers:
            with self.communicating():
                self._send_from_first(self._buffers)

    def sync_buffers(self, module: nn.Module) -> None:
        self._send_from_first(module.buffers())

    def mean(self, number: Tensor) -> Tensor:
        return mean_over_ranks(number)

    def measure(self, times: TimeSplit | None) -> None:
        collectives = None if self._module is None else _COLLECTIVES.get(self._module)
        # Units that the user has sharded communicate as the user wants.
        if collectives is not None:
            self.times = collectives.times = times

    def communication_s(self) -> float | None:
        return None if self.times is None else 0.0

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(module))

    def whole(self, state: Any) -> Any:
        from torch.distributed.tensor import DTensor

        if isinstance(state, DTensor):
            return _gathered(state)
        if isinstance(state, Mapping):
            return {key: self.whole(value) for key, value in state.items()}
        if isinstance(state, (list, tuple)):
            return type(state)(self.whole(value) for value in state)
        return state

    def weight_parts(self, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        own = module.state_dict()
        weights = {
            name: self.part_of(value, own[name]) if name in own else value
            for name, value in state["state_dict"].items()
        }
        return {**state, "state_dict": weights}

    def optimizer_parts(self, state: dict[str, Any], optimizers: Iterable[Any]) -> dict[str, Any]:
        states, optimizers = state.get("optimizer_states", []), list(optimizers)
        if len(states) != len(optimizers):
            # Loading this state raises the error.
            return state
        return {**state, "optimizer_states": [*map(self._parts_of_optimizer, states, optimizers)]}

    def _parts_of_optimizer(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Shard an optimizer's state, whose keys are the indices of parameters in its groups."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sharded = {
            index: {name: _read(self.part_of(value, parameters[index])) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        others = {name: _read(value) for name, value in state.items() if name != "state"}
        return {**others, "state": sharded}

    def part_of(self, tensor: Any, parameter: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, distribute_tensor

        sharded = isinstance(parameter, DTensor) and getattr(tensor, "shape", None) == parameter.shape
        if isinstance(tensor, Stored):
            return part_like(tensor, parameter) if sharded else tensor.whole()
        if isinstance(tensor, DTensor):
            return tensor
        if not isinstance(tensor, Tensor) or not isinstance(parameter, DTensor) or not sharded:
            return tensor
        whole = tensor.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _read(state: Any) -> Any:
    """A part of an optimizer's state whose tensors in files are read whole."""
    if isinstance(state, Stored):
        return state.whole()
    if isinstance(state, dict):
        return {key: _read(value) for key, value in state.items()}
    return type(state)(map(_read, state)) if type(state) in (list, tuple) else state


def _has_others(layer: nn.Module) -> bool:
    """Return True if parameters of a layer get their numbers from the layer, and not from files."""
    stored = stored_of(layer)
    return any(parameter is not None and key not in stored for key, parameter in layer._parameters.items())


def tensors_of(layers: Layers) -> list[Tensor]:
    """The parameters and buffers of some layers, each once."""
    tensors = [tensor for _, layer in layers for tensor in (*layer.parameters(False), *layer.buffers(False))]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _empty_shard(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a sharded tensor on the meta device. Any other tensor stays."""
    sharded = tensor.is_meta and hasattr(tensor, "to_local")
    return torch.empty_like(tensor, device=device) if sharded else tensor


def _whole_on_meta(layers: Layers) -> Callable[[], None]:
    """Replace shards by whole parameters on the meta device.

    Returns:
        A function that copies the numbers which the whole parameters have by then into the shards, and puts these back.
    """
    shards = [
        (layer, key, parameter)
        for _, layer in layers
        for key, parameter in layer._parameters.items()
        if parameter is not None
    ]
    whole: dict[int, nn.Parameter] = {}
    for layer, key, shard in shards:
        if id(shard) not in whole:
            empty = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            whole[id(shard)] = nn.Parameter(empty, shard.requires_grad)
        layer._parameters[key] = whole[id(shard)]

    def keep_shards() -> None:
        for layer, key, shard in shards:
            copy_part(cast(Tensor, layer._parameters[key]), shard)
            layer._parameters[key] = shard

    return keep_shards


def _apply_to(layer: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the tensors of a layer, without its parts if possible: torchmetrics objects take them along."""
    alone = {"recurse": False} if "recurse" in inspect.signature(layer._apply).parameters else {}
    layer._apply(function, **alone)


@torch.no_grad()
def _gathered(tensor: Any) -> Tensor:
    """The whole of a sharded tensor. All ranks call it."""
    from torch.distributed.tensor import Replicate

    # Dimension by dimension: torch would warn of two collectives for one tensor, which two dimensions need.
    for dimension in range(tensor.device_mesh.ndim):
        placements = [*[Replicate()] * (dimension + 1), *tensor.placements[dimension + 1 :]]
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _refuse_meta(module: nn.Module) -> None:
    name = next((name for name, parameter in module.named_parameters() if parameter.is_meta), None)
    if name is not None:
        raise ConfigError(
            f"{name} is on the meta device, in a layer that was sharded before Footplate got it. Give it memory and "
            "numbers where you shard it: layer.to_empty(device=…), then its initialisation. Or leave the sharding to "
            "Footplate."
        )


def _register_steps(module: nn.Module) -> None:
    """Let the module's steps gather its parameters, as its forward pass does."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    kind, internals = type(module), _internals()
    for name in STEPS:
        if overrides(module, name):
            signature = inspect.signature(getattr(kind, name))
            if internals is not None:
                setattr(module, name, internals.frees_weights(module, getattr(module, name)))
            register_fsdp_forward_method(module, name)
            # Otherwise `inspect` takes it for the signature of a bound method.
            getattr(module, name).__func__.__signature__ = signature


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Find the repeated layers of a model: the members of its outermost lists of one class, if they have parameters.

    Layers that the user has sharded aren't looked into.
    """
    from torch.distributed.fsdp import FSDPModule

    for child in module.children():
        if isinstance(child, FSDPModule):
            continue
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        if alike and all(any(True for _ in member.parameters()) for member in members):
            yield from members
        else:
            yield from repeated_blocks(child)


def _internals() -> Any:
    """The module of FSDP2's private names; None if this version of torch has others."""
    try:
        from footplate.distributed import fsdp_internals
    except ImportError:
        return None
    return fsdp_internals
