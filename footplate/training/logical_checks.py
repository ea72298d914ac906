"""Refusals of `logical_ranks`: one error, before any work, if results would depend on the number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from footplate.callbacks.stochastic_weight_avg import StochasticWeightAveraging
from footplate.core.errors import ConfigError
from footplate.distributed.strategies import name_of
from footplate.distributed.world import World
from footplate.hardware.base import Accelerator

if TYPE_CHECKING:
    from footplate.training.config import TrainerConfig
    from footplate.training.run import Run

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")


def check_arguments(
    config: TrainerConfig, accelerator: Accelerator, device: torch.device, world: World, asked: int
) -> None:
    """Refuse arguments of the trainer that don't go with `logical_ranks`.

    Args:
        config: the arguments; `logical_ranks` is set.
        accelerator: the kind of device.
        device: the device of this process.
        world: rank and world size of this process.
        asked: how many processes `devices` and `num_nodes` ask for.

    Raises:
        ConfigError: one of them doesn't.
    """
    total = config.logical_ranks
    assert total is not None
    processes = max(world.size, asked)
    if processes > total:
        raise ConfigError(
            f"logical_ranks={total}: the run has {processes} processes, and each needs a logical rank. Use at most {total} "
            f"devices, or logical_ranks={processes} or more."
        )
    if accelerator.single_controller or device.type not in ("cpu", "cuda"):
        raise _refused(total, f'accelerator="{accelerator.name}"', "it makes no backward passes that can be kept apart",
                       'Use accelerator="cpu" or "cuda"')  # fmt: skip
    if config.strategy not in STRATEGIES:
        raise _refused(total, f'strategy="{name_of(config.strategy)}"', "each process must hold the whole model",
                       'Use strategy="ddp"')  # fmt: skip
    if config.sync_batchnorm:
        raise _refused(total, "sync_batchnorm=True", "logical ranks of one process run one after another",
                       "Leave sync_batchnorm out")  # fmt: skip
    if config.compile:
        raise _refused(total, f"compile={config.compile!r}", "a compiled kernel depends on the shapes that came before",
                       "Leave compile out")  # fmt: skip
    if not config.use_distributed_sampler:
        raise _refused(total, "use_distributed_sampler=False", "the trainer must share out the rows",
                       "Leave use_distributed_sampler out")  # fmt: skip
    if device.type == "cuda" and config.deterministic is not True:
        raise _refused(total, f"deterministic={config.deterministic!r}", "CUDA kernels may add in any order",
                       "Set deterministic=True")  # fmt: skip
    if device.type == "cuda" and config.benchmark:
        raise _refused(total, "benchmark=True", "the fastest algorithm may be another one each time",
                       "Leave benchmark out")  # fmt: skip


def check_module(run: Run) -> None:
    """Refuse a module, or callbacks, whose results would depend on the number of processes.

    Raises:
        ConfigError: says what, and what to do.
    """
    assert run.logical is not None
    total, module = run.logical.total, run.module
    for callback in run.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise _refused(total, "StochasticWeightAveraging", "it collects the statistics of batch norm again",
                           "Use WeightAveraging")  # fmt: skip
    for path, layer in module.named_modules():
        named = f"the layer {path or type(module).__name__} ({type(layer).__name__})"
        if isinstance(layer, nn.SyncBatchNorm):
            raise _refused(total, named, "it uses the batches of all processes at once", "Use an ordinary BatchNorm")
        if getattr(layer, "sparse", False) is True:
            raise _refused(total, named, "its gradients are sparse", "Use sparse=False")
        if _is_metric(layer):
            raise _refused(total, named, "a torchmetrics object has one state for all logical ranks of a process",
                           "Log plain values with self.log")  # fmt: skip
        if type(layer).__name__ == "OptimizedModule" or getattr(layer, "_compiled_call_impl", None) is not None:
            raise _refused(total, named, "a compiled kernel depends on the shapes that came before",
                           "Don't compile it")  # fmt: skip
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _refused(total, f"the parameter {name}", "a hook on it would run once for each logical rank",
                           "Use the hook on_before_optimizer_step()")  # fmt: skip


def _is_metric(layer: Any) -> bool:
    return hasattr(layer, "_update_count") and hasattr(layer, "_defaults")


def _refused(total: int, name: str, reason: str, instead: str) -> ConfigError:
    return ConfigError(
        f"logical_ranks={total} doesn't go with {name}: {reason}, so results would depend on the number of processes. "
        f"{instead}, or leave logical_ranks out."
    )
