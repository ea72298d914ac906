"""Sharded data parallelism (FSDP2): every rank keeps a part of each parameter, its gradient and its optimizer state.

The repeated blocks of a model, such as the layers of a transformer, are units of their own: their parameters are gathered
just before use and freed just after. The other parameters belong to the root. The backward pass of every batch averages
and shards the gradients, also inside an accumulation window. Whole gradients until the end of the window would take the
memory that sharding saves. And so a checkpoint only needs what a rank keeps.

Gathering makes the forward pass collective. So every rank must run the same number of batches, in evaluation too
(`lockstep`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from footplate.core.hooks import overrides
from footplate.core.time_split import TimeSplit
from footplate.distributed.base import Strategy
from footplate.distributed.buckets import mean_over_ranks, send_from_first

if TYPE_CHECKING:
    from footplate.distributed.fsdp_collectives import Collectives

# A module stays sharded after a call of a trainer, and is trained again with the same collectives.
_COLLECTIVES: WeakKeyDictionary[nn.Module, Collectives] = WeakKeyDictionary()


STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP(Strategy):
    """Sharded data parallelism; see the module's docstring."""

    name = "fsdp"
    is_distributed = True
    skips = False
    own_gradients = False
    sharded = True
    lockstep = True

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._module: nn.Module | None = None

    def prepare(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        self._module = module
        if isinstance(module, FSDPModule):
            # An earlier `fit` or `test` has sharded the module.
            return
        send_from_first([*module.parameters(), *module.buffers()])
        kind = type(module)
        signatures = {name: inspect.signature(getattr(kind, name)) for name in STEPS if overrides(module, name)}
        collectives = _measurable_collectives()
        for unit in (*repeated_blocks(module), module):
            fully_shard(unit)
            if collectives is not None:
                collectives.attach(unit)
        if collectives is not None:
            _COLLECTIVES[module] = collectives
        for name, signature in signatures.items():
            register_fsdp_forward_method(module, name)
            # Otherwise `inspect` takes it for the signature of a bound method.
            getattr(module, name).__func__.__signature__ = signature

        # FSDP2 gives the module a class of its own: let it have the user's name.
        sharded = type(module)
        sharded.__name__, sharded.__qualname__, sharded.__module__ = kind.__name__, kind.__qualname__, kind.__module__

    def training_step(self, module: Any) -> Callable[..., Any]:
        self._buffers = list(module.buffers())
        return module.training_step

    def begin_batch(self, syncs: bool) -> None:
        if self._buffers:
            with self.communicating():
                send_from_first(self._buffers)

    def sync_buffers(self, module: nn.Module) -> None:
        send_from_first(module.buffers())

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
            return state.full_tensor().detach()
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
            index: {name: self.part_of(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": sharded}

    def part_of(self, tensor: Any, parameter: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(tensor, Tensor) or not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
            return tensor
        whole = tensor.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Find the repeated layers of a model: the members of its outermost lists of one class, if they have parameters."""
    for child in module.children():
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        if alike and all(any(True for _ in member.parameters()) for member in members):
            yield from members
        else:
            yield from repeated_blocks(child)


def _measurable_collectives() -> Collectives | None:
    """Collectives whose time can be measured; None if this version of torch has other names for its own."""
    try:
        from footplate.distributed.fsdp_collectives import Collectives
    except ImportError:
        return None
    return Collectives()
