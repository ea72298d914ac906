"""Layouts: the ways in which the devices of a target can share a training, under the names of the trainer's strategies.

    one device      the whole training on one device
    ddp             every device has the whole model, and a part of the batch
    fsdp            every device has a part of each parameter, and a part of the batch; blocks are gathered to compute
    fsdp × tensor   the devices of a group compute parts of each layer for the same rows; fsdp over the groups

A device also saves memory if the blocks of the model keep no activations for the backward pass (checkpointing). That
costs a second forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from footplate.core.errors import ConfigError, did_you_mean
from footplate.distributed.fsdp_options import FSDPStrategy
from footplate.distributed.model_parallel_options import ModelParallelStrategy

STRATEGIES = ("auto", "ddp", "fsdp", "model_parallel")
# A group of tensor parallelism stays within one machine.
TENSOR_SIZES = (2, 4, 8)
Strategy = str | FSDPStrategy | ModelParallelStrategy


@dataclass(frozen=True)
class Layout:
    """A way to share a training among devices.

    Attributes:
        strategy: "ddp", "fsdp" or "model_parallel"; "ddp" for one device too.
        replicas: the number of copies of the model. With "fsdp", more than one is "HYBRID_SHARD".
        shards: the number of devices that share the state of one copy.
        tensor: the number of devices that compute parts of each layer.
        reshards: True if the weights of a block are freed after its forward pass, and gathered again for the backward pass.
        checkpoints: True if blocks keep no activations for the backward pass.
    """

    strategy: str
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    reshards: bool = True
    checkpoints: bool = False

    @property
    def data(self) -> int:
        """The number of groups that read different rows."""
        return self.replicas * self.shards

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.tensor

    @property
    def sharded(self) -> bool:
        """True if a device holds only a part of the state."""
        return self.shards > 1 or self.tensor > 1

    def __str__(self) -> str:
        parts = "ddp" if self.devices > 1 else "one device"
        if self.sharded:
            copies = f"{self.replicas} × " if self.replicas > 1 else ""
            parts = f"{copies}fsdp {self.shards}" + (f" × tensor {self.tensor}" if self.tensor > 1 else "")
        return parts + ("" if self.reshards or not self.sharded else ", kept") + (", ckpt" if self.checkpoints else "")

    def written(self, blocks: str | None) -> str:
        """Return the layout as the argument `strategy` of a `Trainer`.

        Args:
            blocks: the class of the blocks that are checkpointed.
        """
        options = []
        if self.tensor > 1:
            options.append(f"tensor_parallel_size={self.tensor}")
        elif self.sharded and self.replicas > 1:
            options.append(f'sharding_strategy="HYBRID_SHARD", device_mesh=({self.replicas}, {self.shards})')
        elif self.sharded and not self.reshards:
            options.append('sharding_strategy="SHARD_GRAD_OP"')
        if self.checkpoints:
            options.append(f'activation_checkpointing_policy={{"{blocks}"}}')
        if not options:
            return f'"{self.strategy}"'
        kind = "ModelParallelStrategy" if self.tensor > 1 else "FSDPStrategy"
        return f"fp.{kind}({', '.join(options)})"


def check_strategy(strategy: Strategy) -> None:
    """Check the name of a strategy.

    Raises:
        ConfigError: a plan doesn't know it.
    """
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        raise ConfigError(f'strategy="{strategy[:60]}": a plan doesn\'t know it. {did_you_mean(strategy, STRATEGIES)}')


def rounds(strategy: Strategy, devices: int, machine: int, repeats: bool) -> Iterator[list[Layout]]:
    """Yield the layouts to try, in rounds: a later round is slower, and only of use if nothing in an earlier one fits.

    Args:
        strategy: the user's: "auto" for all, or one with its options.
        devices: the number of devices.
        machine: the devices of one machine.
        repeats: True if the model has repeated blocks, which can be checkpointed one by one.

    Raises:
        ConfigError: the options don't fit the number of devices.
    """
    if not isinstance(strategy, str):
        yield [_of_options(strategy, devices, machine)]
        return
    if devices == 1 or strategy == "ddp":
        yield [Layout("ddp", replicas=devices)]
        if devices == 1 and repeats and strategy != "ddp":
            yield [Layout("fsdp", checkpoints=True)]
        return

    both = (False, True) if repeats else (False,)
    if strategy == "auto":
        yield [Layout("ddp", replicas=devices)]
    for checkpoints in both if strategy in ("auto", "fsdp") else ():
        layouts = [Layout("fsdp", 1, devices, 1, reshards, checkpoints) for reshards in (False, True)]
        if devices > machine:
            layouts.append(Layout("fsdp", devices // machine, machine, 1, True, checkpoints))
        yield layouts
    if strategy in ("auto", "model_parallel"):
        for size in (size for size in TENSOR_SIZES if size <= machine and devices % size == 0):
            for checkpoints in both:
                yield [Layout("model_parallel", 1, devices // size, size, True, checkpoints)]


def _of_options(options: FSDPStrategy | ModelParallelStrategy, devices: int, machine: int) -> Layout:
    checkpoints = bool(options.activation_checkpointing_policy)
    if checkpoints and options.activation_checkpointing_mode != "full":
        raise ConfigError(
            f'activation_checkpointing_mode={options.activation_checkpointing_mode!r}: a plan knows "full" only. Plan with '
            "that: yours then takes more memory, and less time."
        )
    if isinstance(options, ModelParallelStrategy):
        data, tensor = options.sizes(devices, min(devices, machine))
        return Layout("model_parallel", 1, data, tensor, True, checkpoints)
    options.check_ranks(devices)
    replicas, shards = 1, devices
    if options.sharding_strategy == "HYBRID_SHARD":
        replicas, shards = options.device_mesh or (max(1, devices // machine), min(devices, machine))
    return Layout("fsdp", replicas, shards, 1, options.sharding_strategy != "SHARD_GRAD_OP", checkpoints)
