"""Horovod's verbs on torch.distributed: existing code runs with its import line changed.

    import footplate.compat.horovod as hvd                  # was: import horovod.torch as hvd

    def train_hvd(learning_rate=0.1):
        hvd.init()
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ...

    hvd.HorovodRunner(np=-4).run(train_hvd, learning_rate=0.1)

The modules, from the wire up:

    negotiation.py  the table of operations that each rank has ready    pure
    link.py         connections between ranks and rank 0                sockets, one thread
    operations.py   a ready operation on torch.distributed
    engine.py       submits, starts in the agreed order, waits
    world.py        init, shutdown, rank, size, process sets
    verbs.py        allreduce, allgather, broadcast, …                  submit.py, forms.py, differentiable.py
    objects.py      parameters, optimizers, Python objects
    gradients.py    gradients reduced during the backward pass          optimizer.py
    elastic.py      commits and retries                                 sampler.py

docs/reference/horovod.md lists each verb, and how it differs from Horovod's.
"""

from footplate.compat.horovod import elastic
from footplate.compat.horovod.batch_norm import SyncBatchNorm
from footplate.compat.horovod.compression import Compression, Compressor
from footplate.compat.horovod.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    MisuseError,
    PeerLostError,
)
from footplate.compat.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from footplate.compat.horovod.optimizer import DistributedOptimizer
from footplate.compat.horovod.runner import HorovodRunner
from footplate.compat.horovod.submit import Adasum, Average, Max, Min, Product, Sum, poll, synchronize
from footplate.compat.horovod.verbs import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from footplate.compat.horovod.world import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HorovodRunner",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "MismatchError",
    "MisuseError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
