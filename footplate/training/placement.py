"""Placement of a trainer's work: its devices, its precision, its ranks.

    accelerator, devices, precision    chosen from the arguments
    world                              rank and world size of this process, from the environment of its launcher
    parallel                           the strategy: how the ranks share one model
    group                              the ranks, once they have met
    data_group                         those of them that read different rows

A trainer chooses once, when it is made. The ranks meet when its first call begins.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from footplate.checkpoint.storage import Place
from footplate.core.adapters import adapters_in_use
from footplate.core.errors import ConfigError
from footplate.distributed.fsdp_options import FSDPStrategy
from footplate.distributed.group import ALONE, Group, join
from footplate.distributed.model_parallel_options import ModelParallelStrategy
from footplate.distributed.strategies import (
    Strategy,
    check_strategy,
    make_logical,
    make_model_parallel,
    make_strategy,
    name_of,
)
from footplate.distributed.world import World
from footplate.hardware.base import Accelerator, Devices
from footplate.hardware.legacy import modernise
from footplate.hardware.registry import get_accelerator
from footplate.launch import worker
from footplate.step.precision import Precision
from footplate.training.argument_checks import check_fewest, check_replicas, check_sync_batchnorm
from footplate.training.config import TrainerConfig
from footplate.training.logical_checks import check_arguments

log = logging.getLogger(__name__)


@dataclass
class Placement:
    """Devices, precision and ranks of a trainer.

    Attributes:
        accelerator: the kind of device.
        precision: of the weights and of the computation.
        world: rank and world size of this process.
        nodes: how many machines the run was asked for.
        device_ids: the devices of this machine's processes, in the order of their local ranks.
        device: the device of this process.
        parallel: the strategy.
        sync_batchnorm: replace layers of batch norm by torch's `SyncBatchNorm`.
        group: the ranks. Only this process until they have met.
        data_group: this rank, and those that read other rows and hold the same part of the model.
    """

    accelerator: Accelerator
    precision: Precision
    world: World
    nodes: int
    device_ids: list[int]
    device: torch.device
    parallel: Strategy
    sync_batchnorm: bool
    group: Group = ALONE
    data_group: Group = ALONE

    @property
    def ranks_asked(self) -> int:
        """The number of processes that `num_nodes` and `devices` ask for."""
        return self.nodes * (1 if self.accelerator.single_controller else len(self.device_ids))

    @property
    def starts_ranks(self) -> bool:
        """True if this process starts and supervises the processes that make a call."""
        return self.ranks_asked > 1 and not self.world.launched and not self.parallel.copies

    def meet(self) -> bool:
        """Meet the other ranks. Return True the first time, and always False in a process without others."""
        if self.device.type == "cuda":
            # From now on, "cuda" in the user's code is the device of this process.
            torch.cuda.set_device(self.device)
        if self.world.size == 1 or self.group.is_distributed:
            return False
        self.group = join(self.world, self.accelerator.process_group_backend, self.device)
        self.data_group = self.parallel.data_group(self.group)
        return True

    def for_all(self, place: Place) -> Place:
        """Return a place that is valid on the other ranks too, which may have another working directory."""
        return place.absolute() if self.group.is_distributed and isinstance(place, Path) else place


def place(config: TrainerConfig) -> Placement:
    """Choose where the work of a trainer is done.

    Raises:
        ConfigError: the arguments contradict each other, this machine, or the processes that were started.
    """
    name, devices, precision = modernise(
        config.accelerator, config.devices, None if config.precision is None else str(config.precision), config.gpus,
        config.tpu_cores, os.environ,
    )  # fmt: skip
    accelerator = get_accelerator(name)
    chosen = choose_precision(precision or "32-true", accelerator)
    accelerator.check_arguments(vars(config))

    world = World.from_environ()
    share_rank(world)

    device_ids = choose_devices(accelerator, devices, world)
    single_controller = accelerator.single_controller
    nodes = check_nodes(config.num_nodes, 1 if single_controller else len(device_ids), world)
    own = worker.slot() if world.launched and not single_controller else 0
    device = accelerator.torch_device(device_ids[own])

    refused = {
        "compile": config.compile, "sync_batchnorm": config.sync_batchnorm, "min_devices": config.min_devices
    }  # fmt: skip
    check_replicas(check_strategy(config.strategy), world.size, nodes, refused)

    # The number of ranks in torch's process group, now and once they are started.
    ranks = 1 if single_controller else world.size
    future_ranks = ranks if world.launched or single_controller else nodes * len(device_ids)
    if isinstance(config.strategy, FSDPStrategy):
        config.strategy.check_ranks(future_ranks)
    every_device = [accelerator.torch_device(index) for index in device_ids]
    if config.logical_ranks is None and isinstance(config.strategy, ModelParallelStrategy):
        check_group_is_kept(config.min_devices, config.strategy)
        of_machine = world.local_size if world.launched else len(device_ids)
        backend = accelerator.process_group_backend
        parallel = make_model_parallel(config.strategy, future_ranks, of_machine, device, backend, chosen.autocast)
    elif config.logical_ranks is None:
        parallel = make_strategy(config.strategy, ranks, every_device, chosen.autocast)
    else:
        check_arguments(config, accelerator, device, world, nodes * len(device_ids))
        parallel = make_logical(name_of(config.strategy), config.logical_ranks, world.rank, ranks)
    sync_batchnorm = check_sync_batchnorm(config.sync_batchnorm, device, ranks)

    placement = Placement(accelerator, chosen, world, nodes, device_ids, device, parallel, sync_batchnorm)
    check_fewest(config.min_devices, placement.ranks_asked)
    return placement


def check_group_is_kept(min_devices: int | None, options: ModelParallelStrategy) -> None:
    """Check that a run with tensor-parallel groups keeps all its devices.

    Raises:
        ConfigError: `min_devices` is set.
    """
    if min_devices is not None:
        raise ConfigError(
            f"min_devices={min_devices} doesn't go with {options!r}: a group can't go on without one of its ranks. Leave "
            "min_devices out."
        )


def choose_devices(accelerator: Accelerator, devices: Devices, world: World) -> list[int]:
    """Return the devices of this node's processes, in the order of their local ranks.

    Raises:
        ConfigError: fewer devices than processes.
    """
    indices = accelerator.parse_devices(devices)
    if not world.launched or accelerator.single_controller:
        return indices
    # One device means one for each process.
    if len(indices) < world.local_size and len(indices) == 1:
        indices = accelerator.parse_devices(world.local_size if accelerator.name == "cpu" else "auto")
    if len(indices) < world.local_size:
        raise ConfigError(
            f"devices={devices!r}: {len(indices)} device(s) of {accelerator.name} for the {world.local_size} processes of "
            "this node (LOCAL_WORLD_SIZE). Start one process for each device."
        )
    return indices


def choose_precision(precision: str, accelerator: Accelerator) -> Precision:
    """Return the precision to train in. A CPU trains in "bf16-mixed" for "16-mixed".

    Raises:
        ConfigError: an unknown precision, or one that the accelerator doesn't train in.
    """
    chosen = Precision.parse(precision)
    if chosen.name == "16-mixed" and accelerator.name == "cpu" and "16-mixed" not in accelerator.precisions:
        log.warning('precision="16-mixed": a CPU trains in "bf16-mixed" instead.')
        chosen = Precision.parse("bf16-mixed")
    accelerator.check_precision(chosen.name)
    return chosen


def check_nodes(nodes: int, devices: int, world: World) -> int:
    """Check `num_nodes` for a run with `devices` on each node, and return it.

    Raises:
        ConfigError: another number of processes was started.
    """
    if nodes > 1 and world.launched and worker.attempt() == 0 and world.size != nodes * devices:
        raise ConfigError(
            f"num_nodes={nodes} with {devices} device(s) each: {nodes * devices} processes, but {world.size} were started "
            "(WORLD_SIZE). Start as many, or leave num_nodes and devices out: what was started is then used."
        )
    return nodes


def share_rank(world: World) -> None:
    """Tell other libraries that this process has imported the rank of this process."""
    if world.launched:
        for adapter in adapters_in_use():
            adapter.share_rank(world.rank)
