"""Horovod's collectives, as in its own tests: values, types, gradients, mistakes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import horovod_ranks
import pytest
import torch
from models import ranks

import footplate.compat.horovod as hvd
from footplate.core.errors import ConfigError

INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL = [*INTEGERS, *FLOATS]

check = horovod_ranks.Checks(2)
check_three = horovod_ranks.Checks(3)


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that are 1 × the count on rank 0, 2 × on rank 1, …"""
    values = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    return (values * (hvd.rank() + 1)).to(dtype)


@check
def ranks_and_sizes_are_those_of_the_launch():
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.local_rank()) == (int(os.environ["RANK"]),) * 2
    assert (hvd.size(), hvd.local_size()) == (2, 2)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()


@check
def what_was_built_in_is_told():
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    probes = [hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.ddl_built, hvd.ccl_built, hvd.rocm_built]
    assert not any(probe() for probe in probes)
    assert bool(hvd.nccl_built()) == torch.cuda.is_available() == hvd.cuda_built()


@check
def an_average_is_the_default():
    for dtype, dims in itertools.product(FLOATS, (0, 1, 2, 3)):
        tensor = mine(*[3] * dims, dtype=dtype)
        before = tensor.clone()
        result = hvd.allreduce(tensor)
        assert result.dtype == dtype
        assert torch.equal(result, mine(*[3] * dims) / (hvd.rank() + 1) * 1.5)
        assert torch.equal(tensor, before)


@check
def an_average_of_integers_is_rounded_towards_zero():
    for dtype in INTEGERS:
        assert hvd.allreduce(torch.tensor([3, 0]).to(dtype) + hvd.rank()).tolist() == [3, 0]
    assert hvd.allreduce(torch.tensor([-3, -1]) + hvd.rank()).tolist() == [-2, 0]


@check
def every_reduction_gives_what_it_says():
    for dtype in ALL:
        values = {hvd.Sum: 3, hvd.Min: 1, hvd.Max: 2, hvd.Product: 2}
        for op, value in values.items():
            assert hvd.allreduce(mine(1, dtype=dtype), op=op).tolist() == [value], (dtype, op)
    assert hvd.allreduce(mine(1), average=False).item() == 3
    assert hvd.allreduce(mine(1), average=True).item() == 1.5


@check
def tensors_are_scaled_before_and_after():
    assert hvd.allreduce(mine(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4).tolist() == [6, 12]
    # integers in double precision, rounded towards zero each time
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.6).tolist() == [3]


@check
def in_place_overwrites_the_tensor_also_when_it_is_not_contiguous():
    tensor = mine(2, 3)
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert tensor.flatten().tolist() == [3, 6, 9, 12, 15, 18]
    columns = mine(2, 3).t()
    hvd.allreduce_(columns, op=hvd.Sum)
    assert columns.tolist() == [[3, 12], [6, 15], [9, 18]]
    parameter = torch.nn.Parameter(mine(2))
    hvd.broadcast_(parameter, 1)
    assert parameter.tolist() == [2, 4]


@check
def operations_may_be_submitted_in_any_order():
    names = [f"tensor {n}" for n in range(20)]
    order = names if hvd.rank() == 0 else list(reversed(names))
    handles = {name: hvd.allreduce_async(torch.full((5,), float(names.index(name))), name=name) for name in order}
    for name in names:
        assert hvd.synchronize(handles[name]).tolist() == [names.index(name)] * 5
    handle = hvd.allreduce_async_(mine(3), name="polled")
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == hvd.synchronize(handle).tolist() == [1.5, 3, 4.5]


@check
def any_thread_may_submit():
    result = {}

    def work(name: str) -> None:
        for n in range(20):
            result[name, n] = hvd.allreduce(torch.tensor([float(n)]), name=f"{name} {n}").item()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads if hvd.rank() == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert result == {(name, n): n for name in "abc" for n in range(20)}


@check
def a_group_is_one_operation():
    result = hvd.grouped_allreduce([mine(2), mine(1, 3, dtype=torch.float64), mine()], op=hvd.Sum)
    assert [tensor.flatten().tolist() for tensor in result] == [[3, 6], [3, 6, 9], [3]]
    assert result[1].dtype == torch.float64
    tensors = [mine(2), mine(3)]
    assert hvd.grouped_allreduce_(tensors, name="in place")[0] is tensors[0]
    assert tensors[1].tolist() == [1.5, 3, 4.5]
    handle = hvd.grouped_allreduce_async(tensors, op=hvd.Max)
    assert [tensor.tolist() for tensor in hvd.synchronize(handle)] == [[1.5, 3], [1.5, 3, 4.5]]


@check
def small_tensors_give_what_large_ones_give():
    # a small reduction travels with the words about it, a large one by itself
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    ops = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
    for dtype, op in itertools.product(ALL, ops):
        values = (torch.arange(40_000) % 7).to(dtype) * (1 + hvd.rank())
        large = hvd.allreduce(values, op=op, **factors)
        few = hvd.grouped_allreduce([values[:3], values[:14:2].unsqueeze(1), mine()], op=op, **factors)
        assert torch.equal(few[0], large[:3]), (dtype, op)
        assert torch.equal(few[1].flatten(), large[:14:2]), (dtype, op)
        assert few[2].dtype == torch.float32


@check
def compression_sends_half_of_each_number():
    tensor = torch.full((3,), 1 / 3, dtype=torch.float64)
    result = hvd.allreduce(tensor, compression=hvd.Compression.fp16)
    assert result.dtype == torch.float64
    assert result.tolist() == [float(torch.tensor(1 / 3).half())] * 3
    assert hvd.allreduce(torch.tensor([7]), compression=hvd.Compression.fp16).tolist() == [7]


@check
def gathered_tensors_may_differ_in_their_first_dimension():
    for dtype, dims in itertools.product([*ALL, torch.bool, torch.int16, torch.complex64], (1, 2, 3)):
        rows = [3, 1][hvd.rank()]
        result = hvd.allgather(torch.full([rows] + [2] * (dims - 1), hvd.rank(), dtype=dtype))
        assert result.dtype == dtype
        assert result.shape == (4, *[2] * (dims - 1))
        assert result.flatten()[:: 2 ** (dims - 1)].real.tolist() == [0, 0, 0, 1]
    assert hvd.allgather(torch.empty([0, 2][hvd.rank()], 3)).shape == (2, 3)
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    one, other = hvd.grouped_allgather([mine(1), mine(hvd.rank() + 1, 2)])
    assert one.tolist() == [1, 2]
    assert other.tolist() == [[1, 2], [2, 4], [6, 8]]
    assert hvd.synchronize(hvd.grouped_allgather_async([mine(1)]))[0].tolist() == [1, 2]
    assert hvd.synchronize(hvd.allgather_async(mine(1))).tolist() == [1, 2]


@check
def a_broadcast_gives_the_roots_value():
    for dtype, root in itertools.product([*ALL, torch.bool, torch.int16], (0, 1)):
        tensor = torch.full((2, 3), hvd.rank(), dtype=dtype)
        assert hvd.broadcast(tensor, root).flatten().tolist() == [root] * 6
        assert tensor.flatten().tolist() == [hvd.rank()] * 6
        assert hvd.synchronize(hvd.broadcast_async(tensor, root)).flatten().tolist() == [root] * 6


@check
def alltoall_sends_rows_to_each_rank():
    rank = hvd.rank()
    tensor = torch.tensor([0] * (rank + 1) + [1] * (rank + 1))
    result, received = hvd.alltoall(tensor, torch.tensor([rank + 1] * 2))
    assert result.tolist() == [rank] * 3
    assert received.tolist() == [1, 2]
    assert received.dtype == torch.int64
    assert hvd.alltoall(tensor).tolist() == [rank] * 3
    rows, counts = hvd.synchronize(hvd.alltoall_async(mine(3, 2), [0, 3]))
    assert (rows.shape, counts.tolist()) == (((0, 2), [0, 0]) if rank == 0 else ((6, 2), [3, 3]))


@check
def reducescatter_gives_each_rank_its_rows():
    result = hvd.reducescatter(mine(5), op=hvd.Sum)
    assert result.tolist() == ([3, 6, 9] if hvd.rank() == 0 else [12, 15])
    assert hvd.reducescatter(mine(2, 2)).tolist() == ([[1.5, 3]] if hvd.rank() == 0 else [[4.5, 6]])
    one, other = hvd.grouped_reducescatter([mine(2), mine(4)], op=hvd.Sum, prescale_factor=2.0)
    assert (one.tolist(), len(other)) == ([6] if hvd.rank() == 0 else [12], 2)
    assert len(hvd.synchronize(hvd.reducescatter_async(mine(4)))) == 2
    assert len(hvd.synchronize(hvd.grouped_reducescatter_async([mine(4)]))[0]) == 2


@check
def gradients_flow_back_as_in_horovod():
    def gradient(function, *shape: int) -> list[float]:
        tensor = mine(*shape).requires_grad_()
        function(tensor).backward()
        return tensor.grad.flatten().tolist()

    weights = torch.tensor([1.0, 2.0]) * (hvd.rank() + 1)
    assert gradient(lambda x: (hvd.allreduce(x) * weights).sum(), 2) == [1.5, 3]
    assert gradient(lambda x: (hvd.allreduce(x, op=hvd.Sum) * weights).sum(), 2) == [3, 6]
    assert gradient(lambda x: (hvd.grouped_allreduce([x])[0] * weights).sum(), 2) == [1.5, 3]
    assert gradient(lambda x: (hvd.allgather(x) * torch.arange(4.0)).sum(), 2) == (
        [0, 1] if hvd.rank() == 0 else [2, 3]
    )
    assert gradient(lambda x: (hvd.broadcast(x, 1) * weights).sum(), 2) == ([0, 0] if hvd.rank() == 0 else [1.5, 3])
    assert gradient(lambda x: (hvd.alltoall(x, [1, 1])[0] * (hvd.rank() + 1)).sum(), 2) == [1, 2]
    assert gradient(lambda x: hvd.reducescatter(x).sum() * (hvd.rank() + 1), 2) == [1, 2]
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum).sum() * (hvd.rank() + 1), 2) == [2, 4]


@check
def sparse_tensors_are_gathered_and_summed():
    rows = torch.tensor([[hvd.rank(), 2]])
    tensor = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (4, 3))
    result = hvd.synchronize(hvd.sparse_allreduce_async(tensor, name="sparse", op=hvd.Average))
    assert result.to_dense()[:, 0].tolist() == [0.5, 0.5, 1, 0]
    assert hvd.sparse_allreduce_async(tensor, op=hvd.Sum)().to_dense()[:, 0].tolist() == [1, 1, 2, 0]


@check
def adasum_adds_what_is_orthogonal_and_averages_what_agrees():
    axis = torch.eye(2)[hvd.rank()] * 3
    assert hvd.allreduce(axis, op=hvd.Adasum).tolist() == [3, 3]
    assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1, 1]
    assert hvd.allreduce(torch.zeros(2), op=hvd.Adasum).tolist() == [0, 0]


@check
def a_rank_without_data_joins():
    for first in (0, 1):
        for dtype in (torch.int64, torch.float32):
            if hvd.rank() != first:
                handles = [hvd.allreduce_async(torch.full((n,), 7, dtype=dtype), name=f"join {n}") for n in (5, 17)]
                for handle in handles:  # the one that joined counts as zero, and still as a rank
                    assert set(hvd.synchronize(handle).tolist()) == {3 if dtype == torch.int64 else 3.5}
                assert hvd.allreduce(mine(2), op=hvd.Sum).tolist() == mine(2).tolist()
            last = hvd.join()
            assert last == 1 - first
            assert hvd.allgather_object(last) == [last] * 2


@check
def what_a_joined_rank_cannot_do_is_an_error():
    if hvd.rank() == 0:
        calls = [
            lambda: hvd.allgather(mine(2)),
            lambda: hvd.broadcast(mine(2), 0),
            lambda: hvd.allreduce(mine(2), op=hvd.Max),
        ]  # unnamed: the count restarts once all ranks have joined
        for call in calls:
            with pytest.raises(hvd.HorovodInternalError, match="while rank 1 has joined"):
                call()
    hvd.join()


@check
def ranks_that_disagree_get_an_error_and_go_on():
    rank = hvd.rank()
    calls = [
        (lambda: hvd.allreduce(torch.zeros(17 + rank)), r"shape \(17,\), rank 1 \(18,\)"),
        (lambda: hvd.allreduce(torch.zeros(2, 6) if rank else torch.zeros(2, 2, 3)), "shape"),
        (lambda: hvd.allreduce(torch.zeros(2, dtype=[torch.int32, torch.float32][rank])), "int32, rank 1 float32"),
        (lambda: hvd.allgather(torch.zeros(2, 3 + rank)), "shape"),
        (lambda: hvd.broadcast(torch.zeros(2), rank), "root rank 0, rank 1 1"),
        (lambda: hvd.alltoall(torch.zeros(2, 1 + rank)), "shape"),
        (lambda: hvd.allreduce(torch.zeros(2), name="x", op=[hvd.Sum, hvd.Max][rank]), "reduction sum, rank 1 max"),
    ]
    for call, said in calls:
        with pytest.raises(hvd.HorovodInternalError, match=said):
            call()
    assert hvd.allreduce(mine(1)).item() == 1.5


@check
def names_that_differ_are_an_error_and_no_hang():
    began = time.monotonic()
    with pytest.raises(
        hvd.MismatchError, match='rank 0 waits for allreduce "loss 0", rank 1 waits for allreduce "loss 1"'
    ):
        hvd.allreduce(mine(1), name=f"loss {hvd.rank()}")
    assert time.monotonic() - began < 30


@check
def a_name_is_used_once_at_a_time():
    for first in (0, 1):
        if hvd.rank() == first:
            handle = hvd.allreduce_async(mine(1), name="twice")
            with pytest.raises(ValueError, match='"twice": an operation of this name is running'):
                hvd.allreduce_async(mine(1), name="twice")
        hvd.barrier()
        if hvd.rank() != first:
            handle = hvd.allreduce_async(mine(1), name="twice")
        assert hvd.synchronize(handle).item() == 1.5


@check
def a_name_stays_taken_for_a_moment_if_the_other_rank_is_faster():
    handle = hvd.broadcast_async(mine(1), 0, name="fast") if hvd.rank() == 0 else None
    hvd.barrier()
    if handle is None:
        handle = hvd.broadcast_async(mine(1), 0, name="fast")
        # The link's thread starts the operation.
        handle.begun.wait(1.0)
        with pytest.raises(ValueError, match='"fast": an operation of this name is running'):
            hvd.broadcast_async(mine(1), 0, name="fast")
    hvd.synchronize(handle)
    # When the result was fetched, the name is free at once.
    for _ in range(3):
        assert hvd.allreduce(mine(1), name="fast").item() == 1.5


@check
def arguments_that_cannot_be_are_refused_here():
    wrong = [
        lambda: hvd.alltoall(torch.zeros(3)),
        lambda: hvd.alltoall(torch.zeros(1), [1, 1]),
        lambda: hvd.alltoall(torch.zeros(2), torch.tensor([1.0, 1.0])),
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.reducescatter(torch.zeros(2), op=hvd.Adasum),
        lambda: hvd.broadcast(torch.zeros(2), 2),
        lambda: hvd.allreduce(torch.zeros(2, dtype=torch.int16)),
        lambda: hvd.allreduce(torch.zeros(2), op=hvd.Sum, average=True),
        lambda: hvd.allreduce(torch.zeros(2), op="mean"),
        lambda: hvd.add_process_set([0, 5]),
        lambda: hvd.init(comm=[0, 1]),
        lambda: hvd.start_timeline("file"),
    ]
    for call in wrong:
        with pytest.raises(ConfigError):
            call()


@check
def objects_of_any_size_are_sent_and_gathered():
    given = {"hello": 123, 0: [1, 2], "large": "x" * 100_000} if hvd.rank() == 1 else None
    assert len(hvd.broadcast_object(given, root_rank=1)["large"]) == 100_000
    assert hvd.allgather_object({"rank": hvd.rank(), "more": "x" * hvd.rank()}) == [
        {"rank": 0, "more": ""},
        {"rank": 1, "more": "x"},
    ]


@check
def parameters_become_those_of_the_root():
    torch.manual_seed(hvd.rank())
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    net[1].running_mean += hvd.rank()
    for params in (net.state_dict(), net.named_parameters(), list(net.parameters())):
        hvd.broadcast_parameters(params, root_rank=1)
    states = hvd.allgather_object({name: value.clone() for name, value in net.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert states[0]["1.running_mean"].tolist() == [1, 1, 1]
    smaller = torch.nn.Linear(2, 2 + hvd.rank())
    with pytest.raises(hvd.MismatchError, match=r"shape of bias \(2,\), rank 1 \(3,\)"):
        hvd.broadcast_parameters(smaller.state_dict(), root_rank=0)
    with pytest.raises(ConfigError, match="name is str, expected a tensor"):
        hvd.broadcast_parameters({"name": "x"}, root_rank=0)


@check
def optimizers_become_that_of_the_root():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.LBFGS):
        torch.manual_seed(hvd.rank())
        net = torch.nn.Linear(3, 2)
        optimizer = kind(
            net.parameters(), lr=0.1 * (hvd.rank() + 1), **{"momentum": 0.9} if kind is torch.optim.SGD else {}
        )
        for _ in range(hvd.rank() + 1):

            def closure(net=net, optimizer=optimizer):
                optimizer.zero_grad()
                loss = net(torch.ones(1, 3)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        one, other = hvd.allgather_object(optimizer.state_dict())
        assert str(one) == str(other)
        assert one["param_groups"][0]["lr"] == 0.2


@check
def a_process_group_of_the_programs_own_is_not_disturbed():
    import torch.distributed as dist

    handle = hvd.allreduce_async(mine(1000), name="in between")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    assert hvd.synchronize(handle)[0].item() == 1.5


@check
def ranks_can_part_and_meet_again():
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    hvd.init()
    hvd.init()
    assert hvd.allreduce(mine(1)).item() == 1.5


test_two_ranks = check.test()


@check_three
def process_sets_run_by_themselves():
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1]))
    here = even if hvd.rank() != 1 else odd
    assert (here.included(), here.rank(), here.size()) == (True, hvd.rank() // 2, 2 if here is even else 1)
    assert hvd.allreduce(mine(1), op=hvd.Sum, process_set=here).item() == (4 if here is even else 2)
    assert hvd.broadcast(mine(1), 2 if here is even else 1, process_set=here).item() == (3 if here is even else 2)
    assert hvd.allgather(mine(1), process_set=here).tolist() == ([1, 3] if here is even else [2])
    assert hvd.broadcast_object(hvd.rank(), here.ranks[-1], process_set=here) == here.ranks[-1]
    hvd.barrier(process_set=here)
    other = odd if here is even else even
    with pytest.raises(ConfigError, match="doesn't belong to it"):
        hvd.allreduce(mine(1), process_set=other)
    with pytest.raises(ConfigError, match="there is a process set of these ranks"):
        hvd.add_process_set([0, 2])
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(even)
    with pytest.raises(ConfigError, match="is not known"):
        hvd.allreduce(mine(1), process_set=even)
    assert hvd.add_process_set([0, 2]).process_set_id not in (None, 0)


@check_three
def averages_of_three_are_exact_where_they_can_be():
    assert hvd.allreduce(torch.full((3,), 49)).tolist() == [49] * 3
    assert hvd.allreduce(torch.full((3,), 49.0)).tolist() == [49] * 3


@check_three
def two_ranks_that_have_joined_and_one_that_works():
    for n in range(hvd.rank()):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == [3 - 1, 1][n]
    assert hvd.join() == 2


@check_three
def adasum_needs_a_power_of_two():
    with pytest.raises(ConfigError, match="power of two; there are 3"):
        hvd.allreduce(mine(1), op=hvd.Adasum)


test_three_ranks = check_three.test()


def test_alone_every_verb_is_what_it_is_for_one_rank():
    def work():
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (0, 1)
        x = torch.tensor([2.0, 4.0])
        assert hvd.allreduce(x, prescale_factor=0.5).tolist() == [1, 2]
        assert hvd.allreduce(x, op=hvd.Adasum).tolist() == [2, 4]
        assert hvd.allgather(x).tolist() == hvd.broadcast(x, 0).tolist() == hvd.reducescatter(x).tolist() == [2, 4]
        assert hvd.alltoall(x, [2])[1].tolist() == [2]
        assert hvd.broadcast_object("x") == "x"
        assert hvd.join() == 0
        hvd.barrier()
        return torch.distributed.is_initialized()

    assert ranks.run(work, 1) == [False]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_an_error_on_the_others_at_once(victim):
    def work():
        hvd.init()
        hvd.barrier()
        if hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(hvd.PeerLostError, match=f"process of rank {victim} has ended"):
            hvd.allreduce(torch.ones(10), name="x")
        with pytest.raises(hvd.PeerLostError):
            hvd.allreduce(torch.ones(10), name="y")
        assert time.monotonic() - began < 30
        os._exit(7)

    with ranks.start(work, 2) as started:
        codes = started.exit_codes()
    assert codes[1 - victim] == 7


def reduce_for_ever(tensor: torch.Tensor) -> None:
    while True:
        hvd.allreduce_(tensor, op=hvd.Max)


def test_a_rank_that_is_killed_in_the_middle_of_a_transfer_is_one_too():
    def work():
        hvd.init()
        large = torch.ones(30_000_000)
        if hvd.rank() == 1:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(hvd.HorovodInternalError):
            reduce_for_ever(large)
        os._exit(7)

    with ranks.start(work, 3) as started:
        codes = started.exit_codes()
    assert codes == [7, -signal.SIGKILL, 7]


def test_a_rank_that_shuts_down_is_an_error_for_who_waits_for_it():
    def work():
        hvd.init()
        if hvd.rank() == 1:
            hvd.shutdown()
            return True
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 has shut Horovod down") as raised:
            hvd.allreduce(torch.ones(1))
        return not isinstance(raised.value, hvd.PeerLostError)

    assert ranks.run(work, 2) == [True, True]
