"""`ModelParallelStrategy`: tensor parallelism on top of sharded data parallelism, under Lightning's names.

    Trainer(devices=8, strategy=ModelParallelStrategy(tensor_parallel_size=2))     # 4 groups of 2 ranks

The ranks form a grid: `data_parallel_size` rows of `tensor_parallel_size` ranks. The ranks of a row, which have consecutive
numbers, read the same rows of the data, and each computes a part of every planned layer. The ranks of a column read
different rows, and shard what each of them has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from footplate.core.errors import ConfigError
from footplate.distributed.fsdp_options import (
    CheckpointingMode,
    LayerTypes,
    check_mode,
    check_policy,
    check_types,
    shown_options,
)

Size = int | Literal["auto"]


@dataclass(frozen=True, repr=False)
class ModelParallelStrategy:
    """Tensor parallelism in groups of ranks, and FSDP2 over the groups.

    Args:
        data_parallel_size: the number of groups, each of which reads its own rows. "auto": as many as there are.
        tensor_parallel_size: the ranks of a group, which share the work on the same rows. "auto": the ranks of a machine,
            or what `data_parallel_size` leaves.
        auto_wrap_policy: as that of `FSDPStrategy`.
        activation_checkpointing_policy: as that of `FSDPStrategy`.
        mixed_precision: as that of `FSDPStrategy`.
        activation_checkpointing_mode: as that of `FSDPStrategy`.

    Raises:
        ConfigError: an option that can't be used.

    Examples:
        >>> strategy = fp.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=4)  # eight ranks
        >>> strategy.sizes(ranks=8, ranks_of_machine=8)
        (2, 4)
    """

    data_parallel_size: Size = "auto"
    tensor_parallel_size: Size = "auto"
    auto_wrap_policy: LayerTypes = None
    activation_checkpointing_policy: LayerTypes = None
    mixed_precision: Any = None
    activation_checkpointing_mode: CheckpointingMode = "full"

    def __post_init__(self) -> None:
        for option in ("data_parallel_size", "tensor_parallel_size"):
            size = getattr(self, option)
            if size != "auto" and (type(size) is not int or size < 1):
                raise ConfigError(
                    f'ModelParallelStrategy({option}={size!r}): expected "auto", or a count of 1 or more.'
                )
        for option in ("auto_wrap_policy", "activation_checkpointing_policy"):
            check_types(self, option)
        check_mode(self)
        if self.mixed_precision is not None:
            check_policy(self)

    def __repr__(self) -> str:
        """The options that differ from the defaults. It is the same on all ranks, which compare it."""
        return shown_options(self)

    def sizes(self, ranks: int, ranks_of_machine: int) -> tuple[int, int]:
        """The number of groups and the ranks of each.

        Args:
            ranks: the number of processes that train together.
            ranks_of_machine: how many of them are on this machine.

        Raises:
            ConfigError: the groups don't hold all ranks.
        """
        data, tensor = self.data_parallel_size, self.tensor_parallel_size
        if tensor == "auto":
            tensor = ranks_of_machine if data == "auto" else max(1, ranks // data)
        if data == "auto":
            data = max(1, ranks // tensor)
        if data * tensor != ranks:
            raise ConfigError(
                f"{self!r}: {data} group(s) of {tensor} rank(s) make {data * tensor}, and the run has {ranks}. Set devices "
                "and num_nodes to a multiple of tensor_parallel_size, or leave one of the two sizes out."
            )
        return data, tensor
