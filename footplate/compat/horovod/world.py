"""`init` and `shutdown`, rank and size of this process, process sets, and what this torch was built with.

`init` connects the ranks at `MASTER_ADDR:MASTER_PORT`, which the launcher (Footplate's, torchrun) has set. Without these
variables there is one rank. `init` makes process groups of its own, so that its collectives never mix with those that the
program calls itself. It initialises torch.distributed if the program hasn't; `shutdown` ends it only in that case.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import PrefixStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from footplate.compat.horovod.engine import Engine
from footplate.compat.horovod.errors import not_initialised
from footplate.compat.horovod.negotiation import GLOBAL, Signature
from footplate.compat.horovod.operations import Place, Request
from footplate.core.errors import ConfigError
from footplate.core.net.silence import detect_silence_of_ranks
from footplate.distributed import connectivity
from footplate.distributed.group import TIMEOUT
from footplate.distributed.world import World


class ProcessSet:
    """A set of ranks that run operations together.

    Args:
        ranks: the ranks of the set.

    Attributes:
        process_set_id: the number of the set; None before `init` or `add_process_set` has added it.
        ranks: the ranks, sorted.

    Examples:
        >>> evens = hvd.ProcessSet(range(0, hvd.size(), 2))
        >>> evens.included()
        True
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if not all(isinstance(rank, int) for rank in ranks):
            raise ConfigError(
                f"ProcessSet({ranks!r}): expected ranks, such as [0, 2]. There are no MPI communicators here."
            )
        self.process_set_id: int | None = None
        self.ranks: list[int] = sorted(ranks)

    def included(self) -> bool:
        """Return True if this process belongs to the set."""
        return rank() in self.ranks

    def size(self) -> int | None:
        """The number of ranks; None for a set that wasn't added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """The position of this process in the set; None if it doesn't belong to it."""
        return self.ranks.index(rank()) if self.process_set_id is not None and self.included() else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks, which is the default of every verb."""
global_process_set.process_set_id = GLOBAL


@dataclass
class _Context:
    """The state between `init` and `shutdown`.

    Attributes:
        world: rank and world size.
        engine: runs the operations.
        groups: torch's process groups that were made here.
        owns: True if `init` has initialised torch.distributed.
        sets: the added process sets by number.
        last_number: the number of the latest process set; no number is used twice.
    """

    world: World
    engine: Engine
    groups: list[Any]
    owns: bool
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    last_number: int = GLOBAL


_context: _Context | None = None
# The number of `init`s so far. Each uses keys of its own in the store.
_rounds = 0
_store: Any = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Connect to the other ranks. A second call changes nothing.

    Args:
        comm: not supported: use process sets.
        process_sets: sets to add at once, the same on all ranks. "dynamic" is accepted: sets can always be added.

    Raises:
        ConfigError: `comm` was given, or the environment variables don't give a rank and a world size.

    Examples:
        >>> hvd.init()
        >>> hvd.is_initialized()
        True
    """
    global _context, _rounds
    if comm is not None:
        raise ConfigError("init(comm=…) is not supported: use hvd.add_process_set(ranks) for a part of the ranks.")
    if _context is not None:
        return

    world = World.from_environ()
    owns, number, _rounds = False, _rounds, _rounds + 1
    with detect_silence_of_ranks():
        if dist.is_initialized():
            world = World(dist.get_rank(), dist.get_world_size(), world.local_rank, world.local_size, True)
        elif world.size > 1:
            _init_process_group(world, number)
            owns = True

        place, groups, store = Place((0,), 0), [], None
        if world.size > 1:
            groups = [dist.new_group(timeout=TIMEOUT)]
            place = Place(tuple(range(world.size)), world.rank, groups[0])
            store = PrefixStore(f"horovod/{number}", distributed_c10d._get_default_store())
        engine = Engine(world.rank, world.size, {GLOBAL: place}, store)
    _context = _Context(world, engine, groups, owns)
    global_process_set.ranks = list(range(world.size))
    if number == 0:
        atexit.register(_shutdown_at_exit)
    for process_set in process_sets if process_sets not in (None, "dynamic") else ():
        add_process_set(process_set)


def _init_process_group(world: World, number: int) -> None:
    global _store
    if _store is None:
        _store = next(iter(rendezvous("env://", timeout=TIMEOUT)))[0]
    connectivity.prepare_gloo(world, PrefixStore(f"horovod/reach/{number}", _store))
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore(f"horovod/meeting/{number}", _store),
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
    )


def shutdown() -> None:
    """Disconnect from the other ranks. A rank that still waits for this one gets a `HorovodInternalError`.

    Examples:
        >>> hvd.shutdown()
        >>> hvd.is_initialized()
        False
    """
    _disconnect(leaving=True)


def _shutdown_at_exit() -> None:
    with contextlib.suppress(Exception):
        _disconnect(leaving=False)


def _disconnect(leaving: bool) -> None:
    global _context
    if _context is None:
        return
    context, _context = _context, None
    context.engine.close(leaving)
    for process_set in context.sets.values():
        process_set.process_set_id = None
    if context.owns and dist.is_initialized():
        dist.destroy_process_group()
    elif dist.is_initialized():
        for group in context.groups:
            dist.destroy_process_group(group)


def is_initialized() -> bool:
    """Return True after `init` and before `shutdown`.

    Examples:
        >>> hvd.is_initialized()
        True
    """
    return _context is not None


def context() -> _Context:
    """The state that `init` has made.

    Raises:
        ConfigError: `init` wasn't called.
    """
    if _context is None:
        raise not_initialised()
    return _context


def rank() -> int:
    """The rank of this process, over all machines.

    Examples:
        >>> hvd.rank()
        0
    """
    return context().world.rank


def size() -> int:
    """The number of ranks, over all machines.

    Examples:
        >>> hvd.size()
        1
    """
    return context().world.size


def local_rank() -> int:
    """The rank of this process on its machine, which is the number of its device.

    Examples:
        >>> hvd.local_rank()
        0
    """
    return context().world.local_rank


def local_size() -> int:
    """The number of ranks on this machine.

    Examples:
        >>> hvd.local_size()
        1
    """
    return context().world.local_size


def cross_rank() -> int:
    """The number of this machine.

    Examples:
        >>> hvd.cross_rank()
        0
    """
    return int(os.environ.get("GROUP_RANK", rank() // local_size()))


def cross_size() -> int:
    """The number of machines.

    Examples:
        >>> hvd.cross_size()
        1
    """
    return int(os.environ.get("GROUP_WORLD_SIZE", -(-size() // local_size())))


def is_homogeneous() -> bool:
    """Return True if every machine has the same number of ranks.

    Examples:
        >>> hvd.is_homogeneous()
        True
    """
    return size() == local_size() * cross_size()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. All ranks call this function, also the ranks outside the set.

    Raises:
        ConfigError: a rank that doesn't exist, or ranks that are a process set already.

    Examples:
        >>> if hvd.size() > 2:
        ...     pair = hvd.add_process_set([0, 1])
        ...     if pair.included():
        ...         hvd.allreduce(torch.ones(2), process_set=pair)
    """
    current = context()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not added.ranks or not set(added.ranks) <= set(range(size())):
        raise ConfigError(f"{added!r}: expected ranks from 0 to {size() - 1}.")
    if added.ranks in [global_process_set.ranks, *(known.ranks for known in current.sets.values())]:
        raise ConfigError(f"{added!r}: there is a process set of these ranks. Use it.")

    current.last_number += 1
    number = current.last_number
    with detect_silence_of_ranks():
        group = dist.new_group(added.ranks, timeout=TIMEOUT) if size() > 1 else None
    if group is not None and rank() in added.ranks:
        current.groups.append(group)
    place = None
    if rank() in added.ranks:
        place = Place(tuple(added.ranks), added.ranks.index(rank()), group if len(added.ranks) > 1 else None)
    current.engine.places[number] = place
    current.engine.link.add_set(number, added.ranks)
    current.sets[number] = added
    added.process_set_id = number

    # Rank 0 must have the set in its table before any rank submits an operation for it.
    _barrier(f"add_process_set {added.ranks}")
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks call this function. Return True if there was such a set.

    Examples:
        >>> hvd.remove_process_set(hvd.ProcessSet([0]))  # it was never added
        False
    """
    current = context()
    if process_set.process_set_id is None or process_set not in current.sets.values():
        return False
    _barrier(f"remove_process_set {process_set.ranks}")
    del current.sets[process_set.process_set_id]
    process_set.process_set_id = None
    return True


def _barrier(name: str) -> None:
    engine = context().engine
    engine.finish(engine.submit(Request(Signature("barrier"), []), name, (), lambda outputs: None))


def mpi_threads_supported() -> bool:
    """False: there is no MPI here. Any thread may submit an operation.

    Examples:
        >>> hvd.mpi_threads_supported()
        False
    """
    return False


def mpi_enabled() -> bool:
    """False: torch.distributed moves the tensors.

    Examples:
        >>> hvd.mpi_enabled()
        False
    """
    return False


def mpi_built() -> bool:
    """False: torch.distributed moves the tensors.

    Examples:
        >>> hvd.mpi_built()
        False
    """
    return False


def gloo_enabled() -> bool:
    """True: gloo moves tensors on the CPU.

    Examples:
        >>> hvd.gloo_enabled()
        True
    """
    return True


def gloo_built() -> bool:
    """Return True if this torch has gloo.

    Examples:
        >>> hvd.gloo_built()
        True
    """
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of this torch's NCCL, such as 22705 for 2.27.5; 0 without NCCL.

    Examples:
        >>> if hvd.nccl_built():
        ...     print("tensors on NVIDIA GPUs are sent by NCCL")
    """
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return 0
    major, minor, patch = nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """False: there is no DDL here.

    Examples:
        >>> hvd.ddl_built()
        False
    """
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL here.

    Examples:
        >>> hvd.ccl_built()
        False
    """
    return False


def cuda_built() -> bool:
    """Return True if this torch is built for CUDA.

    Examples:
        >>> hvd.cuda_built() and hvd.rocm_built()
        False
    """
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if this torch is built for ROCm.

    Examples:
        >>> hvd.cuda_built() and hvd.rocm_built()
        False
    """
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Not supported: use `torch.profiler`.

    Raises:
        ConfigError: always.

    Examples:
        >>> hvd.start_timeline("timeline.json")
        Traceback (most recent call last):
        footplate.core.errors.ConfigError: hvd.start_timeline is not supported: use torch.profiler.profile, ...
    """
    raise ConfigError(
        "hvd.start_timeline is not supported: use torch.profiler.profile, which records the same, and more."
    )


def stop_timeline() -> None:
    """Not supported: use `torch.profiler`.

    Raises:
        ConfigError: always.

    Examples:
        >>> hvd.stop_timeline()
        Traceback (most recent call last):
        footplate.core.errors.ConfigError: hvd.stop_timeline is not supported: use torch.profiler.profile, ...
    """
    raise ConfigError(
        "hvd.stop_timeline is not supported: use torch.profiler.profile, which records the same, and more."
    )
