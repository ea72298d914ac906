"""Tensor parallelism: the ranks of a group compute parts of each layer, and FSDP2 shards over the groups.

    device_mesh          tensor_parallel →       rank = data_parallel · tensor_parallel_size + tensor_parallel
    data_parallel ↓      rank 0    rank 1        read the same rows
                         rank 2    rank 3        read other rows

`prepare` cuts a model unit by unit, as `FSDP` does:

    whole on the device, with rank 0's numbers  →  cut into the parts of a group, by the plan  →  each part sharded (FSDP2)

So a rank never holds the whole model, and the numbers are the same for any grid. `tensor_parallel_plan.py` finds the plan.
If the module has called `parallelize_module` in `configure_model`, its layers stay as it has cut them, and no plan is
applied.

A layer without a style is whole on every rank of a group. Its gradients are right only if all ranks of the group compute
the same. A weight that is used on the parts of a cut layer gets other gradients on each rank, and the ranks would train
different models. The first step of each fit compares them.

Random draws, the position in the data and logged values belong to a group and not to a rank: see `data_world`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.distributed import gradient_norm
from footplate.distributed.buckets import send_from_first
from footplate.distributed.device_mesh import column_of, device_mesh
from footplate.distributed.fsdp import FSDP, Layers, tensors_of
from footplate.distributed.gradient_norm import local_part
from footplate.distributed.group import Group
from footplate.distributed.meta_device import Initializer, draws, pieces_of
from footplate.distributed.model_parallel_options import ModelParallelStrategy
from footplate.distributed.tensor_parallel_plan import planned_layers
from footplate.distributed.world import World

DATA, TENSOR = "data_parallel", "tensor_parallel"
# Sums of float32 in another order differ far less, and the gradients of two halves of a layer far more.
ALIKE_WITHIN, NEGLIGIBLE = 0.01, 1e-5


class ModelParallel(FSDP):
    """Tensor parallelism in groups of ranks, and FSDP2 over the groups; see the module's docstring.

    Args:
        options: which layers are units.
        sizes: the number of groups, and the ranks of each.
        device: of this process.
        backend: of the collectives between devices, such as "gloo" or "nccl".
        autocast: the type of the computation in a mixed precision.
    """

    name = "model_parallel"

    def __init__(
        self,
        options: ModelParallelStrategy,
        sizes: tuple[int, int],
        device: torch.device,
        backend: str,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(options, autocast)
        self._sizes, self._device, self._backend = sizes, device, backend
        self._styles: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._compared = False

    @property
    def device_mesh(self) -> Any:
        # A process that starts the ranks is none of them.
        if math.prod(self._sizes) != (dist.get_world_size() if dist.is_initialized() else 1):
            return None
        return device_mesh(self._device.type, self._sizes, (DATA, TENSOR), self._backend)

    # The ranks that read the same rows

    def data_world(self, world: World) -> World:
        size = self._sizes[1]
        return World(world.rank // size, self._sizes[0], world.local_rank, world.local_size, world.launched)

    def data_group(self, group: Group) -> Group:
        mesh, size = self.device_mesh, self._sizes[1]
        columns = [range(first, group.world.size, size) for first in range(size)]
        return column_of(group, self.data_world(group.world), columns, mesh.get_group(DATA))

    # Cutting

    def _shard(self, module: nn.Module) -> None:
        size = self._sizes[1]
        if size > 1 and not any(is_cut(parameter) for parameter in module.parameters()):
            self._styles = {id(layer): style for _, layer, style in planned_layers(module, size)}
        self._names = {id(layer): name for name, layer in module.named_modules()}
        super()._shard(module)

    def _place_unit(self, layers: Layers, initializers: Mapping[int, Initializer]) -> list[Layers]:
        # Numbers are drawn for whole tensors, also if the module has cut its layers on the meta device.
        waiting = {id(layer) for piece in pieces_of(layers, initializers) if self._waits(piece) for _, layer in piece}
        cut_again = _whole_on_meta([layer for _, layer in layers if id(layer) not in waiting])
        later = super()._place_unit(layers, initializers)
        cut_again()
        self._cut([layer for _, layer in layers])
        for _, layer in layers:
            self._check_cut(layer)
        return later

    def _waits(self, piece: Layers) -> bool:
        # A rank reads its part of a cut layer from files. Other numbers are drawn before the layer is cut.
        tensors = tensors_of(piece)
        return (
            bool(tensors) and all(tensor.is_meta for tensor in tensors) and not any(draws(layer) for _, layer in piece)
        )

    def _cut(self, layers: list[nn.Module]) -> None:
        """Cut the layers that have a style."""
        from torch.distributed.tensor.parallel import parallelize_module

        homes = _homes(layers)
        for layer in layers:
            if id(layer) in self._styles:
                # All ranks have the same numbers already.
                parallelize_module(layer, self.device_mesh[TENSOR], self._styles[id(layer)], src_data_rank=None)
        for shared in homes.values():
            self._tie(shared)

    def _tie(self, homes: list[tuple[nn.Module, str]]) -> None:
        """Let layers that shared a parameter share it again, after each has cut it.

        Raises:
            ConfigError: they have cut it in different ways.
        """
        parameters = [layer._parameters[key] for layer, key in homes]
        first, cuts = parameters[0], [getattr(parameter, "placements", None) for parameter in parameters]
        if any(cut != cuts[0] for cut in cuts):
            ways = ", ".join(
                f"{self._name_of(layer, key)} {'whole' if cut is None else cut[0]}"
                for (layer, key), cut in zip(homes, cuts, strict=True)
            )
            raise ConfigError(
                f"These layers share one parameter, and the plan of tensor parallelism cuts it in different ways: {ways}. "
                "Give them styles that cut it alike, such as RowwiseParallel(input_layouts=Replicate()) for an embedding "
                "and ColwiseParallel(output_layouts=Replicate()) for the last linear layer."
            )
        for layer, key in homes[1:]:
            layer._parameters[key] = first

    def _check_cut(self, layer: nn.Module) -> None:
        """Check that the ranks of a group have parts of one size.

        Raises:
            ConfigError: a dimension can't be divided by the number of ranks.
        """
        size = self._sizes[1]
        for key, parameter in layer._parameters.items():
            cut: Any = parameter
            for placement in cut.placements if parameter is not None and is_cut(parameter) else ():
                if placement.is_shard() and cut.shape[placement.dim] % size:
                    raise ConfigError(
                        f"tensor_parallel_size={size}: {self._name_of(layer, key)} has the shape {tuple(cut.shape)}, and "
                        f"{cut.shape[placement.dim]} can't be divided by {size}. Use another size, or leave this layer out "
                        "of the plan."
                    )

    def _name_of(self, layer: nn.Module, key: str) -> str:
        name = self._names[id(layer)]
        return f"{name}.{key}" if name else key

    def _groups(self) -> dict[str, Any]:
        return {"mesh": self.device_mesh[DATA]}

    def _send_from_first(self, tensors: Iterable[Tensor]) -> None:
        # A part that is cut goes to the ranks with the same part.
        tensors = list(tensors)
        send_from_first(tensor for tensor in tensors if not hasattr(tensor, "to_local"))
        cut = [local_part(tensor) for tensor in tensors if hasattr(tensor, "to_local")]
        if cut:
            send_from_first(cut, self.device_mesh.get_group(DATA))

    # Steps

    def training_step(self, module: Any) -> Callable[..., Any]:
        step = super().training_step(module)
        self._compared = False

        def call(*arguments: Any) -> Any:
            return _whole_loss(step(*arguments))

        return call

    def clip(self, parameters: Iterable[nn.Parameter], value: float, algorithm: str) -> None:
        gradient_norm.clip(parameters, value, algorithm)

    def examine_gradients(self, module: nn.Module) -> None:
        if self._compared or self._sizes[1] == 1:
            return
        self._compared = True
        whole = {name: p.grad for name, p in module.named_parameters() if p.grad is not None and not is_cut(p)}
        if not whole:
            return
        norms = torch.stack([local_part(gradient).float().norm() for gradient in whole.values()])
        most, least = norms.clone(), norms
        group = self.device_mesh.get_group(TENSOR)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        # A gradient that is a rounding error may be another one on each GPU.
        counts = most > NEGLIGIBLE * most.max()
        differs = (counts & (most - least > ALIKE_WITHIN * most)).float()
        # All groups raise together.
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        name = next((name for name, differing in zip(whole, differs.tolist(), strict=True) if differing), None)
        if name is not None:
            raise ConfigError(
                f"{name} is whole on all ranks of a tensor-parallel group, and its gradients differ between them, so the "
                "ranks would train different models. It is used on the parts of a layer that is cut. Let the plan sum its "
                "gradients (SequenceParallel() for a norm), cut it (ColwiseParallel(), RowwiseParallel()), or gather the "
                "parts before it is used."
            )


def is_cut(parameter: Any) -> bool:
    """Return True if a parameter has parts on the ranks of a tensor-parallel group, or is kept alike on them."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and TENSOR in (mesh.mesh_dim_names or ())


def _homes(layers: list[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """The layers and keys of each parameter that several layers share, by its id."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for layer in layers:
        for key, parameter in layer._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((layer, key))
    return {number: shared for number, shared in homes.items() if len(shared) > 1}


def _whole_on_meta(layers: list[nn.Module]) -> Callable[[], None]:
    """Replace cut parameters on the meta device by whole ones. Return the function that cuts them again, once made."""
    from torch.distributed.tensor import distribute_tensor

    whole: dict[int, nn.Parameter] = {}
    homes: list[tuple[nn.Module, str, Any]] = []
    for layer in layers:
        for key, parameter in layer._parameters.items():
            if parameter is not None and parameter.is_meta and is_cut(parameter):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                whole.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
                homes.append((layer, key, parameter))
    for layer, key, parameter in homes:
        layer._parameters[key] = whole[id(parameter)]

    def cut_again() -> None:
        cut: dict[int, nn.Parameter] = {}
        for layer, key, before in homes:
            if id(before) not in cut:
                made: Any = layer._parameters[key]
                part = distribute_tensor(made.detach(), before.device_mesh, before.placements, src_data_rank=None)
                cut[id(before)] = nn.Parameter(part, before.requires_grad)
            layer._parameters[key] = cut[id(before)]

    return cut_again


def _whole_loss(output: Any) -> Any:
    """The output of a step, with a loss that every rank has. Under `loss_parallel`, the loss is a sharded tensor."""
    if isinstance(output, Mapping):
        sharded = {name: value for name, value in output.items() if hasattr(value, "full_tensor")}
        return {**output, **{name: _whole_loss(value) for name, value in sharded.items()}} if sharded else output
    return output.full_tensor() if hasattr(output, "full_tensor") else output
