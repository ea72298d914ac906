"""`FSDPStrategy`: the options of `strategy="fsdp"`, under Lightning's names.

    Trainer(devices=8, strategy=FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block}))

`strategy="fsdp"` has the defaults. The options of one `Trainer` are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from footplate.core.errors import ConfigError, did_you_mean

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"]
SHARDINGS: tuple[Sharding, ...] = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
CheckpointingMode = Literal["full", "op"] | int
LayerTypes = Collection[type[nn.Module] | str] | None


@dataclass(frozen=True, repr=False)
class FSDPStrategy:
    """Sharded data parallelism (FSDP2), with options.

    Args:
        auto_wrap_policy: types of the layers that are units: the weights of a unit are gathered just before use. A type
            may be given by its class name. Default: the repeated layers, such as the blocks of a transformer.
        activation_checkpointing_policy: types of the layers that keep no activations for the backward pass, which computes
            them again. Default: all layers keep theirs.
        sharding_strategy: "FULL_SHARD" frees the weights of a unit after its forward pass, and gathers them again for its
            backward pass. "SHARD_GRAD_OP" keeps them in between: less communication, more memory. "HYBRID_SHARD" shards
            over the ranks of a group, and averages gradients over the groups.
        device_mesh: for "HYBRID_SHARD": the number of groups and the ranks of each. Default: a group for each machine.
        mixed_precision: a `torch.distributed.fsdp.MixedPrecisionPolicy`. Default, with a mixed `precision`: weights are
            gathered in its 16-bit type, and gradients are averaged in float32.
        activation_checkpointing_mode: what the layers of `activation_checkpointing_policy` compute again. "full": all of
            it. "op": all but matrix products and attention, whose outputs they keep. A number n: only every n-th of the
            layers does so, and computes all of it again.

    Raises:
        ConfigError: an option that can't be used.

    Examples:
        >>> strategy = fp.FSDPStrategy(activation_checkpointing_policy={"Block"}, sharding_strategy="SHARD_GRAD_OP")
        >>> trainer = fp.Trainer(strategy=strategy)
    """

    auto_wrap_policy: LayerTypes = None
    activation_checkpointing_policy: LayerTypes = None
    sharding_strategy: Sharding = "FULL_SHARD"
    device_mesh: tuple[int, int] | None = None
    mixed_precision: Any = None
    activation_checkpointing_mode: CheckpointingMode = "full"

    def __post_init__(self) -> None:
        for option in ("auto_wrap_policy", "activation_checkpointing_policy"):
            check_types(self, option)
        check_mode(self)
        if self.sharding_strategy not in SHARDINGS:
            hint = did_you_mean(str(self.sharding_strategy), SHARDINGS)
            raise ConfigError(f"FSDPStrategy(sharding_strategy={self.sharding_strategy!r}) is unknown. {hint}")
        if self.device_mesh is not None:
            _check_mesh(self.device_mesh, self.sharding_strategy)
        if self.mixed_precision is not None:
            check_policy(self)

    def __repr__(self) -> str:
        """The options that differ from the defaults. It is the same on all ranks, which compare it."""
        return shown_options(self)

    def check_ranks(self, ranks: int) -> None:
        """Check that the groups of "HYBRID_SHARD" hold all ranks.

        Raises:
            ConfigError: they don't.
        """
        if self.device_mesh is not None and self.device_mesh[0] * self.device_mesh[1] != ranks:
            groups, size = self.device_mesh
            raise ConfigError(
                f"FSDPStrategy(device_mesh=({groups}, {size})): {groups} groups of {size} ranks make {groups * size}, and "
                f"the run has {ranks}."
            )


def shown_options(options: Any) -> str:
    """The text of a strategy's options: those that differ from the defaults."""
    values = [(field, getattr(options, field.name)) for field in fields(options)]
    changed = {field.name: value for field, value in values if value != field.default}
    for name in {"auto_wrap_policy", "activation_checkpointing_policy"} & changed.keys():
        # A set has another order in each process.
        changed[name] = f"{{{', '.join(sorted(map(_name_of, changed[name])))}}}"
    return f"{type(options).__name__}({', '.join(f'{name}={value}' for name, value in changed.items())})"


def layers_of(module: nn.Module, options: Any, option: str) -> list[nn.Module]:
    """The layers of a module that have one of the types of an option, innermost first.

    Args:
        module: the module.
        options: an `FSDPStrategy`, or other options with layer types.
        option: the name of an option with types, or their class names.

    Raises:
        ConfigError: a type that no layer has.
    """
    kinds = list(getattr(options, option) or ())
    layers = [layer for layer in module.modules() if any(_has_type(layer, kind) for kind in kinds)]
    missing = [kind for kind in kinds if not any(_has_type(layer, kind) for layer in layers)]
    if missing:
        there = sorted({type(layer).__name__ for layer in module.modules() if layer is not module})
        raise ConfigError(
            f"{type(options).__name__}({option}=…): {type(module).__name__} has no layer of type "
            f"{', '.join(sorted(map(_name_of, missing)))}. It has {', '.join(there) or 'no layers'}."
        )
    # `modules` yields a layer before its parts.
    return layers[::-1]


def _name_of(kind: type[nn.Module] | str) -> str:
    return kind if isinstance(kind, str) else kind.__qualname__


def _has_type(layer: nn.Module, kind: type[nn.Module] | str) -> bool:
    return type(layer).__name__ == kind if isinstance(kind, str) else isinstance(layer, kind)


def check_types(options: Any, option: str) -> None:
    """Check an option with layer types.

    Raises:
        ConfigError: it holds something else.
    """
    types = getattr(options, option)
    fits = types is None or (
        isinstance(types, Collection)
        and not isinstance(types, str)
        and all(isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module)) for kind in types)
    )
    if not fits:
        raise ConfigError(
            f"{type(options).__name__}({option}={types!r}): expected a set of layer types, such as "
            '{nn.TransformerEncoderLayer}, or of their names, such as {"TransformerEncoderLayer"}.'
        )


def check_mode(options: Any) -> None:
    """Check the option `activation_checkpointing_mode`.

    Raises:
        ConfigError: it has no meaning, or no layers that it is about.
    """
    mode, kind = options.activation_checkpointing_mode, type(options).__name__
    if mode not in ("full", "op") and (type(mode) is not int or mode < 1):
        raise ConfigError(
            f'{kind}(activation_checkpointing_mode={mode!r}): expected "full", "op", or a number of 1 or more, such as 2 '
            "for every second layer."
        )
    if mode != "full" and options.activation_checkpointing_policy is None:
        raise ConfigError(
            f"{kind}(activation_checkpointing_mode={mode!r}) needs activation_checkpointing_policy, the types of the "
            "layers."
        )


def _check_mesh(mesh: Any, sharding: str) -> None:
    sizes = tuple(mesh) if isinstance(mesh, (tuple, list)) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"FSDPStrategy(device_mesh={mesh!r}): expected two counts, (groups, ranks of a group).")
    if sharding != "HYBRID_SHARD":
        raise ConfigError(f'FSDPStrategy(device_mesh={mesh!r}) needs sharding_strategy="HYBRID_SHARD".')


def check_policy(options: Any) -> None:
    """Check the option `mixed_precision`, which is given.

    Raises:
        ConfigError: it isn't FSDP2's.
    """
    # Import it here: it imports much of torch, and few programs give a policy.
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = options.mixed_precision
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"{type(options).__name__}(mixed_precision={policy!r}): expected a "
            "torch.distributed.fsdp.MixedPrecisionPolicy. "
            'For bfloat16 with autocast, leave it out and use precision="bf16-mixed".'
        )
