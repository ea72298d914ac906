"""init and shutdown, and who is who: `rank`, `size`, process sets, and what was built in.

`init` meets the other ranks at `MASTER_ADDR:MASTER_PORT`, as whoever started the processes has said (a Footplate launch,
torchrun); without that it is a world of one. It makes process groups of its own, so that its collectives never come between
those that the program itself calls; torch.distributed is initialised if it isn't yet. `shutdown` leaves what it found.
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
from footplate.distributed import connectivity
from footplate.distributed.group import TIMEOUT
from footplate.distributed.world import World


class ProcessSet:
    """Some of the ranks, who run operations together.

    Args:
        ranks: theirs.

    Attributes:
        process_set_id: its number; None until `init` or `add_process_set` knows it.
        ranks: sorted.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if not all(isinstance(rank, int) for rank in ranks):
            raise ConfigError(
                f"ProcessSet({ranks!r}): expected ranks, such as [0, 2]. There are no MPI communicators here."
            )
        self.process_set_id: int | None = None
        self.ranks: list[int] = sorted(ranks)

    def included(self) -> bool:
        """Whether this process belongs to it."""
        return rank() in self.ranks

    def size(self) -> int | None:
        """How many ranks it has; None if it isn't known to Horovod."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """The place of this process among them; None if it has none."""
        return self.ranks.index(rank()) if self.process_set_id is not None and self.included() else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL


@dataclass
class _Context:
    """What `init` has made."""

    world: World
    engine: Engine
    groups: list[Any]
    owns: bool
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    numbered: int = GLOBAL  # the number of the latest process set; none is used twice


_context: _Context | None = None
_rounds = 0  # how often this process has met the others: each time, with keys of its own in the store
_store: Any = None


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Meet the other ranks; does nothing if that has been done.

    Args:
        comm: not supported: use process sets.
        process_sets: sets to be made at once, the same on all ranks; "dynamic" is accepted, as all sets are.

    Raises:
        ConfigError: `comm` was given, or the environment doesn't say who this process is.
    """
    global _context, _rounds
    if comm is not None:
        raise ConfigError("init(comm=…) is not supported: use hvd.add_process_set(ranks) for a part of the ranks.")
    if _context is not None:
        return
    world = World.from_environ()
    owns, number, _rounds = False, _rounds, _rounds + 1
    if dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size(), world.local_rank, world.local_size, True)
    elif world.size > 1:
        _meet(world, number)
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
        atexit.register(_leave_quietly)
    for one in process_sets if process_sets not in (None, "dynamic") else ():
        add_process_set(one)


def _meet(world: World, number: int) -> None:
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
    """Part from the other ranks; whoever still waits for this one gets a `HorovodInternalError`."""
    _part(leaving=True)


def _leave_quietly() -> None:
    with contextlib.suppress(Exception):
        _part(leaving=False)


def _part(leaving: bool) -> None:
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
    """Whether `init` was called, and not `shutdown` since."""
    return _context is not None


def context() -> _Context:
    """What `init` has made.

    Raises:
        ConfigError: it wasn't called.
    """
    if _context is None:
        raise not_initialised()
    return _context


def rank() -> int:
    """The rank of this process, over all machines."""
    return context().world.rank


def size() -> int:
    """How many ranks there are."""
    return context().world.size


def local_rank() -> int:
    """The place of this process on its machine: the number of its device."""
    return context().world.local_rank


def local_size() -> int:
    """How many ranks are on this machine."""
    return context().world.local_size


def cross_rank() -> int:
    """The number of this machine."""
    return int(os.environ.get("GROUP_RANK", rank() // local_size()))


def cross_size() -> int:
    """How many machines there are."""
    return int(os.environ.get("GROUP_WORLD_SIZE", -(-size() // local_size())))


def is_homogeneous() -> bool:
    """Whether every machine has as many ranks."""
    return size() == local_size() * cross_size()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known; all ranks call it, also those outside the set.

    Raises:
        ConfigError: a rank that doesn't exist, or there is such a set.
    """
    found = context()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not made.ranks or not set(made.ranks) <= set(range(size())):
        raise ConfigError(f"{made!r}: expected ranks from 0 to {size() - 1}.")
    if made.ranks in [global_process_set.ranks, *(one.ranks for one in found.sets.values())]:
        raise ConfigError(f"{made!r}: there is a process set of these ranks.")
    found.numbered += 1
    number = found.numbered
    group = dist.new_group(made.ranks, timeout=TIMEOUT) if size() > 1 else None
    if group is not None and rank() in made.ranks:
        found.groups.append(group)
    place = None
    if rank() in made.ranks:
        place = Place(tuple(made.ranks), made.ranks.index(rank()), group if len(made.ranks) > 1 else None)
    found.engine.places[number] = place
    found.engine.link.add_set(number, made.ranks)
    found.sets[number] = made
    made.process_set_id = number
    _all_here(f"add_process_set {made.ranks}")  # rank 0 knows it before anybody submits
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; all ranks call it. Returns whether there was one."""
    found = context()
    if process_set.process_set_id is None or process_set not in found.sets.values():
        return False
    _all_here(f"remove_process_set {process_set.ranks}")
    del found.sets[process_set.process_set_id]
    process_set.process_set_id = None
    return True


def _all_here(name: str) -> None:
    engine = context().engine
    engine.finish(engine.submit(Request(Signature("barrier"), []), name, (), lambda outputs: None))


def mpi_threads_supported() -> bool:
    """False: there is no MPI here. Nor do operations need its threads: any thread may submit."""
    return False


def mpi_enabled() -> bool:
    """False: torch.distributed moves the tensors."""
    return False


def mpi_built() -> bool:
    """False: torch.distributed moves the tensors."""
    return False


def gloo_enabled() -> bool:
    """True: gloo moves the tensors of the CPU."""
    return True


def gloo_built() -> bool:
    """Whether this torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of this torch's NCCL, such as 22705 for 2.27.5; 0 without."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return 0
    major, minor, patch = nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether this torch is one for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch is one for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Not there.

    Raises:
        ConfigError: always, with what to use.
    """
    raise ConfigError("hvd.start_timeline is not supported: torch.profiler.profile records the same, and more.")


def stop_timeline() -> None:
    """Not there; see `start_timeline`.

    Raises:
        ConfigError: always, with what to use.
    """
    raise ConfigError("hvd.stop_timeline is not supported: torch.profiler.profile records the same, and more.")
