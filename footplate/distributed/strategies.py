"""The strategies, by Lightning's names, or with options (`FSDPStrategy`, `ModelParallelStrategy`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from footplate.core.errors import ConfigError, did_you_mean
from footplate.distributed.base import Strategy
from footplate.distributed.fsdp_options import FSDPStrategy
from footplate.distributed.model_parallel_options import ModelParallelStrategy

Options = FSDPStrategy | ModelParallelStrategy
NAMES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp", "replicas")

_INSTEAD = {
    "ddp_spawn": '"ddp" does the same from a script and from a notebook',
    "ddp_notebook": '"ddp" does the same from a script and from a notebook',
    "ddp_fork": '"ddp" does the same from a script and from a notebook',
    "ddp_find_unused_parameters_false": '"ddp" searches for none',
    "fsdp2": '"fsdp" is FSDP2',
    "dp": '"ddp" is faster; "replicas" is for a process that can\'t start others',
    "deepspeed": '"fsdp" shards parameters, gradients and optimizer states as its stage 3 does',
}


def name_of(strategy: str | Options) -> str:
    """The name of a strategy."""
    if isinstance(strategy, str):
        return strategy
    return "fsdp" if isinstance(strategy, FSDPStrategy) else "model_parallel"


def options_of(strategy: str | Options) -> Options:
    """The options of a strategy; those of "fsdp" if it was given by name."""
    return FSDPStrategy() if isinstance(strategy, str) else strategy


def check_strategy(strategy: str | Options) -> str:
    """Return a strategy's name, after a check if it was given by name.

    Raises:
        ConfigError: it is none of `NAMES`; the error says what to write instead.
    """
    if not isinstance(strategy, str) or strategy in NAMES:
        return name_of(strategy)
    instead = _INSTEAD.get(strategy) or _INSTEAD.get(strategy.partition("_")[0])
    hint = f"{instead}." if instead else did_you_mean(strategy, NAMES)
    raise ConfigError(f'strategy="{strategy}" is not supported: {hint}')


def make_strategy(
    strategy: str | Options,
    ranks: int,
    devices: Sequence[torch.device] = (),
    autocast: torch.dtype | None = None,
) -> Strategy:
    """Make a strategy for this number of ranks. A single rank shares nothing, unless it has several devices.

    Args:
        strategy: its name, or its options.
        ranks: the number of processes that train together.
        devices: of this process.
        autocast: the type of the computation in a mixed precision.
    """
    name = name_of(strategy)
    if name == "replicas" and len(devices) > 1:
        from footplate.distributed.replicas import Replicas

        return Replicas(devices)
    if ranks == 1:
        return Strategy()
    if name == "fsdp":
        from footplate.distributed.fsdp import FSDP

        return FSDP(options_of(strategy), autocast)
    from footplate.distributed.ddp import DDP

    return DDP(find_unused_parameters=name == "ddp_find_unused_parameters_true")


def make_model_parallel(
    options: ModelParallelStrategy,
    ranks: int,
    ranks_of_machine: int,
    device: torch.device,
    backend: str,
    autocast: torch.dtype | None = None,
) -> Strategy:
    """Make the strategy of model parallelism.

    Args:
        options: the user's.
        ranks: the number of processes that train together, or will.
        ranks_of_machine: how many of them are on this machine.
        device: of this process.
        backend: of the collectives between devices.
        autocast: the type of the computation in a mixed precision.

    Raises:
        ConfigError: the options don't fit this number of ranks.
    """
    from footplate.distributed.model_parallel import ModelParallel

    return ModelParallel(options, options.sizes(ranks, ranks_of_machine), device, backend, autocast)


def make_logical(name: str, total: int, process: int, processes: int) -> Strategy:
    """Make the strategy of `total` logical ranks on this number of processes."""
    from footplate.distributed.logical_ddp import LogicalDDP

    return LogicalDDP(total, process, processes, find_unused_parameters=name == "ddp_find_unused_parameters_true")
