"""DistributedOptimizer: several ranks learn like one process with all of their rows, and misuse is an error."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import horovod_ranks
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import footplate.compat.horovod as hvd
from footplate.compat.horovod.gradients import by_size
from footplate.core.errors import ConfigError

check = horovod_ranks.Checks(2)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks: eight."""
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=numbers), torch.randint(0, 3, (8,), generator=numbers)


def own(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = rows(step)
    return x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def learnt(optimizer: Any, model: nn.Module, batch: Callable[[int], Any], steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(make: Callable[[nn.Module], torch.optim.Optimizer] = make_sgd) -> list[torch.Tensor]:
    model = net()
    return learnt(make(model), model, rows)


def together(make: Callable[[nn.Module], torch.optim.Optimizer] = make_sgd, **given: Any) -> list[torch.Tensor]:
    model = net()
    optimizer = hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters(), **given)
    return learnt(optimizer, model, own)


def close(actual: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance or {"rtol": 1e-4, "atol": 1e-6})


@check
def ranks_learn_what_one_process_learns():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        close(
            together(lambda model, kind=kind: kind(model.parameters(), lr=0.01)),
            alone(lambda model, kind=kind: kind(model.parameters(), lr=0.01)),
        )


@check
def they_do_so_in_any_grouping():
    model = net()
    parameters = list(model.parameters())
    groups = [[parameters[0], parameters[3]], [parameters[1]]]
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters(), groups=groups)
    close(learnt(optimizer, model, own), alone())
    for given in ({"groups": 2}, {"groups": 100}, {"num_groups": 1}):
        close(together(**given), alone())


@check
def scaling_before_the_sum_changes_nothing_but_the_range():
    close(together(gradient_predivide_factor=4.0), alone())


@check
def compressed_gradients_are_about_the_same():
    compressed = together(compression=hvd.Compression.fp16)
    close(compressed, alone(), rtol=0.01, atol=1e-3)
    assert any(not torch.equal(one, other) for one, other in zip(compressed, alone(), strict=True))
    assert all(gradient.dtype == torch.float32 for gradient in compressed)


class Doubled(hvd.Compressor):
    """A user's compressor, which sees each gradient in its shape."""

    @staticmethod
    def compress(tensor):
        return tensor.double(), tensor.shape

    @staticmethod
    def decompress(tensor, ctx):
        assert tensor.shape == ctx
        return tensor.float()


@check
def a_compressor_of_ones_own_sees_each_gradient():
    close(together(compression=Doubled), alone())


@check
def a_sum_is_a_sum():
    close(together(op=hvd.Sum), alone(lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)))


@check
def gradients_of_several_backward_passes_are_summed_first():
    model = net()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), backward_passes_per_step=2)
    for step in (0, 2):
        optimizer.zero_grad()
        for part in (0, 1):
            x, y = own(step + part)
            (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    single = net()
    plain = make_sgd(single)
    for step in (0, 2):
        plain.zero_grad()
        for part in (0, 1):
            x, y = rows(step + part)
            (F.cross_entropy(single(x), y) / 2).backward()
        plain.step()
    close(list(model.parameters()), list(single.parameters()))


@check
def fewer_backward_passes_than_said_are_reduced_at_the_step():
    model = net()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), backward_passes_per_step=3)
    close(learnt(optimizer, model, own), alone())


@check
def a_closure_is_reduced_each_time():
    model, single = net(), net()

    def fit(model: nn.Module, optimizer: Any, batch: Any) -> None:
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)

    fit(single, torch.optim.LBFGS(single.parameters(), lr=0.1, max_iter=4), rows(0))
    fit(model, hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)), own(0))
    close(list(model.parameters()), list(single.parameters()), rtol=1e-3, atol=1e-4)


@check
def a_parameter_without_a_gradient_on_one_rank_counts_as_zero_there():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = copy.deepcopy(model.state_dict())
    model[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"] - 0.5)
    assert torch.equal(model[1].weight, before["1.weight"] - 0.5)
    assert torch.equal(model[2].weight, before["2.weight"])


@check
def gradients_may_come_in_another_order_on_each_rank():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(6))  # more than one bucket
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1), layers.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(1, 400)
        for layer in layers if hvd.rank() else reversed(layers):
            x = layer(x)
        x.sum().backward()
        optimizer.step()
    one, other = hvd.allgather_object([parameter.sum().item() for parameter in layers.parameters()])
    assert one == other


@check
def parameters_that_are_frozen_later_or_thawed_are_followed():
    model = net()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters())
    learnt(optimizer, model, own, 1)
    model[0].requires_grad_(True)
    model[4].requires_grad_(False)
    learnt(optimizer, model, own, 2)
    optimizer.add_param_group({"params": [extra := nn.Parameter(torch.zeros(3))]})
    (extra * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert extra.tolist() == pytest.approx([-0.15] * 3)
    one, other = hvd.allgather_object([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@check
def two_optimizers_take_turns():
    maker, critic = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), network.named_parameters())
        for network in (maker, critic)
    ]
    for turn in range(6):
        for index, network in enumerate((maker, critic)):
            network.requires_grad_(index == turn % 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        critic(maker(torch.rand(1, 1, 8, 8))).sum().backward()
        optimizers[turn % 2].step()
        assert all((parameter.grad is not None) == (turn % 2 == 0) for parameter in maker.parameters())


@check
def clipping_goes_between_synchronize_and_step():
    model = net()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters())
    x, y = own(0)
    (100 * F.cross_entropy(model(x), y)).backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert len(set(hvd.allgather_object(float(norm)))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    assert sum(p.grad.square().sum() for p in model.parameters()).sqrt() == pytest.approx(0.1, rel=1e-3)


@check
def a_second_synchronisation_is_warned_about():
    model = net()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters())
    F.cross_entropy(model(own(0)[0]), own(0)[1]).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\) context"):
        optimizer.step()


@check
def misuse_is_told():
    model = net()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters())
    model(own(0)[0]).sum().backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="computed more than backward_passes_per_step=1"):
        model(own(0)[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@check
def wrong_arguments_are_refused():
    model = net()
    plain = make_sgd(model)
    named = list(model.named_parameters())
    wrong = {
        "repeated: 0.weight": {"named_parameters": [*named, named[0]]},
        "5 of the optimizer's 6 parameters have no name": {"named_parameters": named[:1]},
        "pairs of name and parameter": {"named_parameters": model.parameters()},
        "backward_passes_per_step=0": {"backward_passes_per_step": 0},
        "goes with op=Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "groups=0": {"groups": 0},
        "one group only": {"groups": [[named[0][1]], [named[0][1]]]},
        "lists of parameters": {"groups": [["0.weight"]]},
    }
    for said, given in wrong.items():
        with pytest.raises(ConfigError, match=said):
            hvd.DistributedOptimizer(plain, **given)
    with pytest.raises(ConfigError, match="wrap the plain optimizer, once"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain))


@check
def it_is_still_the_optimizer_that_it_was():
    model = net()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    learnt(plain, model, rows, 1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert len(optimizer.state) == 6  # what it has learnt isn't lost
    learnt(optimizer, model, own, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    learnt(optimizer, model, own, 1)
    other.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learnt(optimizer, model, own, 1)


@check
def models_that_differ_are_an_error_and_no_hang():
    model = nn.Linear(3, 2 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(hvd.MismatchError, match=r"shape \(8,\), rank 1 \(12,\)"):
        optimizer.step()


@check
def sparse_gradients_are_gathered_or_made_dense():
    for as_dense in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
        before = copy.deepcopy(model.state_dict())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), sparse_as_dense=as_dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([hvd.rank(), 5])).sum().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
        moved = (model[0].weight - before["0.weight"]).abs().sum(1) > 0
        assert moved.nonzero().flatten().tolist() == [0, 1, 5]
        one, other = hvd.allgather_object(model[0].weight.detach())
        assert torch.equal(one, other)


@check
def adasum_combines_what_the_steps_have_changed():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Adasum)
    optimizer.zero_grad()
    model(torch.eye(2)[[hvd.rank()]]).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-1, -1]]  # orthogonal: added
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-2, -2]]  # the same: averaged
    with pytest.raises(AssertionError):
        optimizer.skip_synchronize()


@check
def a_rank_with_fewer_batches_joins():
    model = net()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), named_parameters=model.named_parameters())
    for step in range(2 + hvd.rank()):
        optimizer.zero_grad()
        F.cross_entropy(model(own(step)[0]), own(step)[1]).backward()
        optimizer.step()
    assert hvd.join() == 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert len({str(state) for state in hvd.allgather_object(model.state_dict())}) == 1


@check
def batch_norm_sees_the_rows_of_all_ranks():
    for shape, dims in itertools.product([(4,), (4, 5), (4, 3, 2)], (0,)):
        torch.manual_seed(dims)
        x = torch.randn(7, *shape, dtype=torch.float64)
        here = slice(0, 3) if hvd.rank() == 0 else slice(3, 7)  # not as many rows
        synced, plain = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
        if len(shape) == 3:
            plain = nn.BatchNorm2d(4).double()
        mine, whole = x[here].clone().requires_grad_(), x.clone().requires_grad_()
        weights = torch.randn(7, *shape, dtype=torch.float64)
        for _ in range(2):
            normed, expected = synced(mine), plain(whole)
            (normed * weights[here]).sum().backward()
            (expected * weights).sum().backward()
        torch.testing.assert_close(normed, expected[here])
        torch.testing.assert_close(mine.grad, whole.grad[here])
        torch.testing.assert_close(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(synced.state_dict()[name], value)
        torch.testing.assert_close(synced.eval()(mine), plain.eval()(whole)[here])


test_two_ranks = check.test()


def test_buckets_close_when_they_are_full_so_that_much_of_the_gradients_travels_early():
    layers = nn.Sequential(nn.Linear(32, 1024), *[nn.Linear(1024, 1024) for _ in range(3)], nn.Linear(1024, 10))
    first, second = by_size(layers.parameters())
    last_two = [*layers[3].parameters(), *layers[4].parameters()]
    assert [id(parameter) for parameter in reversed(first)] == [id(parameter) for parameter in last_two]
    assert len(second) == 6


def test_a_bucket_has_one_type():
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.float32, torch.float64)]
    assert [len(bucket) for bucket in by_size(parameters)] == [1, 2]
