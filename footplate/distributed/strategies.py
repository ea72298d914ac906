"""The strategies, by Lightning's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from footplate.core.errors import ConfigError, did_you_mean
from footplate.distributed.base import Strategy

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


def check_strategy(strategy: str) -> str:
    """Check a strategy's name, and return it.

    Raises:
        ConfigError: it is none of `NAMES`; the error says what to write instead.
    """
    if strategy in NAMES:
        return strategy
    instead = _INSTEAD.get(strategy) or _INSTEAD.get(strategy.partition("_")[0])
    hint = f"{instead}." if instead else did_you_mean(strategy, NAMES)
    raise ConfigError(f'strategy="{strategy}" is not supported: {hint}')


def make_strategy(name: str, ranks: int, devices: Sequence[torch.device] = ()) -> Strategy:
    """Make the strategy of a name for this number of ranks. A single rank shares nothing, unless it has several devices."""
    if name == "replicas" and len(devices) > 1:
        from footplate.distributed.replicas import Replicas

        return Replicas(devices)
    if ranks == 1:
        return Strategy()
    if name == "fsdp":
        from footplate.distributed.fsdp import FSDP

        return FSDP()
    from footplate.distributed.ddp import DDP

    return DDP(find_unused_parameters=name == "ddp_find_unused_parameters_true")


def make_logical(name: str, total: int, process: int, processes: int) -> Strategy:
    """Make the strategy of `total` logical ranks on this number of processes."""
    from footplate.distributed.logical_ddp import LogicalDDP

    return LogicalDDP(total, process, processes, find_unused_parameters=name == "ddp_find_unused_parameters_true")
