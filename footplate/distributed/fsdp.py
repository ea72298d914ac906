"""Sharded data parallelism (FSDP2): every rank keeps a part of each parameter, its gradient and its optimizer state.

The blocks that a model repeats (the layers of a transformer, say) are units of their own: their parameters are gathered
just before they are used and let go just after. What remains belongs to the root. Gradients are averaged and cut up in
the backward pass of every batch, also inside an accumulation window: keeping them whole until its end would take the
very memory that sharding saves, and what a rank keeps is then all that a checkpoint needs.

Gathering makes the forward pass collective, so that every rank must run as many batches as the others, in evaluation
too (`lockstep`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from footplate.core.hooks import overrides
from footplate.distributed.base import Strategy
from footplate.distributed.buckets import mean_over_ranks, send_from_first

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP(Strategy):
    """See the module's docstring."""

    name = "fsdp"
    is_distributed = True
    skips = False
    own_gradients = False
    sharded = True
    lockstep = True

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def prepare(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        if isinstance(module, FSDPModule):
            return  # by a `fit` or `test` before this one
        send_from_first([*module.parameters(), *module.buffers()])
        kind = type(module)
        signatures = {name: inspect.signature(getattr(kind, name)) for name in STEPS if overrides(module, name)}
        for block in repeated_blocks(module):
            fully_shard(block)
        fully_shard(module)
        for name, signature in signatures.items():
            register_fsdp_forward_method(module, name)
            getattr(module, name).__func__.__signature__ = signature  # else it is taken for that of a bound method
        sharded = type(module)  # FSDP2 gives the module a class of its own: let it go by the user's name
        sharded.__name__, sharded.__qualname__, sharded.__module__ = kind.__name__, kind.__qualname__, kind.__module__

    def training_step(self, module: Any) -> Callable[..., Any]:
        self._buffers = list(module.buffers())
        return module.training_step

    def begin_batch(self, syncs: bool) -> None:
        if self._buffers:
            send_from_first(self._buffers)

    def sync_buffers(self, module: nn.Module) -> None:
        send_from_first(module.buffers())

    def mean(self, number: Tensor) -> Tensor:
        return mean_over_ranks(number)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(module))

    def whole(self, state: Any) -> Any:
        from torch.distributed.tensor import DTensor

        if isinstance(state, DTensor):
            return state.full_tensor().detach()
        if isinstance(state, Mapping):
            return {key: self.whole(value) for key, value in state.items()}
        if isinstance(state, (list, tuple)):
            return type(state)(self.whole(value) for value in state)
        return state

    def weight_parts(self, state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        here = module.state_dict()
        weights = {
            name: self.part_of(value, here[name]) if name in here else value
            for name, value in state["state_dict"].items()
        }
        return {**state, "state_dict": weights}

    def optimizer_parts(self, state: dict[str, Any], optimizers: Iterable[Any]) -> dict[str, Any]:
        states, optimizers = state.get("optimizer_states", []), list(optimizers)
        if len(states) != len(optimizers):
            return state  # which is refused when it is loaded
        return {**state, "optimizer_states": [*map(self._parts_of_optimizer, states, optimizers)]}

    def _parts_of_optimizer(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """An optimizer's state, whose keys are the places of parameters in its groups."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        cut = {
            place: {name: self.part_of(value, parameters[place]) for name, value in values.items()}
            for place, values in state["state"].items()
        }
        return {**state, "state": cut}

    def part_of(self, tensor: Any, parameter: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(tensor, Tensor) or not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
            return tensor
        whole = tensor.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that a model repeats: the members of its outermost lists of one class, where they have parameters."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        if alike and all(any(True for _ in member.parameters()) for member in members):
            yield from members
        else:
            yield from repeated_blocks(child)
