"""The ranks of a training, and their communication between hosts.

There are three kinds of traffic, each on channels of its own:

    gradients, parameters       between devices: the default process group (gloo on the CPU, NCCL on CUDA)
    metrics, states, decisions  between hosts: `Group`, below; small, and only at epochs' ends, reports and saves
    stop, save, signals         between hosts: `agreement.py`; some integers, about twice a second

The last two share one gloo group beside the default one. So neither ever waits for a device's work, and a rank whose device
hangs can still be stopped.

`join` connects to the other ranks at `MASTER_ADDR:MASTER_PORT` (torchrun's rendezvous) when a trainer first has work to
do, and keeps the group for later trainers. A group that the user has made is used and left alone. All ranks must call the
methods of a `Group` in the same order. When a rank dies, its connections close and the other ranks raise at once. If its
machine goes silent, they raise after a minute (`core/net/silence.py`; not with NCCL). A frozen rank is noticed
after `TIMEOUT`, or earlier by the launcher.
"""

from __future__ import annotations

import atexit
import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from footplate.core.errors import ConfigError, FootplateError, PeerLostError
from footplate.core.net.silence import detect_silence_of_ranks
from footplate.distributed import connectivity, network_interface
from footplate.distributed.world import SINGLE, World

TIMEOUT = timedelta(minutes=30)

_host_group: Any = None
# The default group for which `_host_group` was made.
_default_group: Any = None


class Group:
    """The ranks of one training, or a part of them. With a single process, every method works without communication.

    Args:
        world: the rank of this process, and the number of ranks.
        host: the process group between hosts.
        devices: the process group between devices. Default: torch's default group.

    Attributes:
        world: the ranks of this process.
        devices: as given.
    """

    def __init__(self, world: World, host: Any = None, devices: Any = None) -> None:
        self.world = world
        self.devices = devices
        self._host = host

    @property
    def is_distributed(self) -> bool:
        """True if there are other ranks."""
        return self.world.size > 1

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of ranks. It is pickled: use plain values and tensors of the CPU."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def gather_to_first(self, value: Any) -> list[Any]:
        """`gather` for rank 0 alone; the other ranks get an empty list."""
        if not self.is_distributed:
            return [value]
        values: list[Any] | None = [None] * self.world.size if self.world.rank == 0 else None
        dist.gather_object(value, values, group=self._host, group_dst=0)
        return values or []

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if not self.is_distributed:
            return value
        box = [value if self.world.rank == 0 else None]
        dist.broadcast_object_list(box, group=self._host, group_src=0)
        return box[0]

    def ask_first(self, question: Callable[[], Any]) -> Any:
        """Call `question()` on rank 0; return its result on every rank. If it raises, every rank raises."""
        if not self.is_distributed:
            return question()
        answer, error = None, None
        if self.world.rank == 0:
            try:
                answer = question()
            except Exception as raised:
                error = raised
        answer, first_error = self.from_first((answer, None if error is None else _portable(error)))
        if first_error is not None:
            raise first_error if error is None else error
        return answer

    def ask_each(self, question: Callable[[], Any]) -> Any:
        """Call `question()` on each rank. If it raises on some ranks only, the other ranks raise too, and name one."""
        if not self.is_distributed:
            return question()
        answer, error = None, None
        try:
            answer = question()
        except Exception as raised:
            error = raised
        errors = self.gather(None if error is None else _portable(error))
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                raise type(other)(f"Rank {rank}: {other}") if isinstance(other, FootplateError) else other
        return answer

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks, for each of some integers."""
        if not self.is_distributed:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._host)
        return tensor.tolist()

    def everybody(self, holds: bool) -> bool:
        """Return True if something holds on every rank."""
        return not self.maximum([int(not holds)])[0]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.maximum([0])

    def stack(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """Stack every rank's `tensor`, of one shape, in a new first dimension. With `sync_grads`, gradients flow back."""
        if not self.is_distributed:
            return tensor
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(list(all_gather(tensor, self.devices or dist.group.WORLD)))
        tensor = tensor.contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.world.size)]
        dist.all_gather(tensors, tensor, group=self.devices)
        return torch.stack(tensors)


ALONE = Group(SINGLE)


def _portable(error: Exception) -> Exception:
    """An exception that can be sent to another process: itself, or its text if it can't be unpickled there."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # Pickling a user's class may raise anything.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def join(world: World, backend: str, device: torch.device) -> Group:
    """Connect to the other ranks, once per process.

    Args:
        world: this process's ranks.
        backend: of the devices, such as "gloo" or "nccl"; hosts always use gloo.
        device: this rank's.

    Raises:
        ConfigError: the other ranks can't be reached, or the user's own group has another size.
        PeerLostError: a rank has ended while the ranks met.
    """
    global _host_group, _default_group
    if world.size == 1:
        return Group(world)
    if not dist.is_initialized():
        with detect_silence_of_ranks():
            _meet(world, backend, device)
        atexit.register(leave, dist.group.WORLD)
    if (dist.get_world_size(), dist.get_rank()) != (world.size, world.rank):
        raise ConfigError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but RANK and "
            f"WORLD_SIZE say {world.rank} of {world.size}. Leave the initialisation to the trainer, or set the variables."
        )
    if _default_group is not dist.group.WORLD:
        with detect_silence_of_ranks():
            _host_group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc="hosts")
        _default_group = dist.group.WORLD
    return Group(world, _host_group)


def leave(group: Any = None) -> None:
    """Destroy the process group, at the end of the process. A group that the user has made since is left alone."""
    global _host_group, _default_group
    if dist.is_initialized() and (group is None or group is dist.group.WORLD):
        dist.destroy_process_group()
    _host_group = _default_group = None


def forget() -> None:
    """Destroy all process groups, also one that the user has made, and keep no reference to them."""
    atexit.unregister(leave)
    leave()


def _meet(world: World, backend: str, device: torch.device) -> None:
    backends = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    reached = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # a launcher says that the store exists
    try:
        store = next(iter(rendezvous("env://", rank=world.rank, world_size=world.size, timeout=TIMEOUT)))[0]
        reached = True
        connectivity.prepare_gloo(world, PrefixStore("footplate", store))
        # torch uses the same prefix.
        store = PrefixStore("default_pg", store)
        dist.init_process_group(backends, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        raise not_met(world, error, reached) from error


def not_met(world: World, error: Exception, reached: bool) -> Exception:
    """The error of a rank that could not meet the other ranks.

    A rank that dies while the ranks meet takes their connections with it. That may pass, so it is no `ConfigError`: a
    launcher tries again.

    Args:
        world: this process's ranks.
        error: torch's.
        reached: the store at MASTER_ADDR and MASTER_PORT could be reached, so the variables are right.
    """
    reason = f"{str(error).splitlines()[0]} "
    if reached and (isinstance(error, dist.DistError) or "connectFullMesh" in str(error)):
        return PeerLostError(
            f"Rank {world.rank} lost a connection while it met the other {world.size - 1} rank(s): {reason}"
            "One of them has ended, or the network between them failed."
        )
    variable = network_interface.VARIABLE
    return ConfigError(
        f"Rank {world.rank} could not meet the other {world.size - 1} rank(s): {reason}"
        "Set MASTER_ADDR and MASTER_PORT to where rank 0 can be reached, as torchrun does. Ranks on several machines "
        f"also connect to each other: {variable} ({os.environ.get(variable) or 'not set'}) names the network interface "
        "for that."
    )
