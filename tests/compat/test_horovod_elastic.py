"""Elastic training: ranks return to the last commit, in the same processes or in new ones."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import horovod_ranks
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import footplate.compat.horovod as hvd
from footplate.core.errors import LaunchError
from footplate.launch import Restarts, launch, worker

check = horovod_ranks.Checks(2)


@check
def an_object_state_goes_back_to_its_commit():
    state = hvd.elastic.ObjectState(epoch=1, batch=2)
    state.epoch = 5
    state.commit()
    state.epoch, state.batch = 6, 7
    state.restore()
    assert (state.epoch, state.batch) == (5, 2)
    state.epoch = 10 + hvd.rank()
    state.sync()
    assert state.epoch == 10


@check
def a_torch_state_holds_model_optimizer_and_sampler():
    torch.manual_seed(hvd.rank())
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank())
    sampler = hvd.elastic.ElasticSampler(range(10))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=hvd.rank())
    state.sync()
    weights, *_ = hvd.allgather_object(model.weight.detach())
    assert torch.equal(model.weight, weights)
    assert (optimizer.param_groups[0]["lr"], state.batch, state.model) == (0.1, 0, model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sampler.record_batch(0, 2)
    state.commit()
    committed = model.weight.detach().clone()
    for _ in range(2):
        optimizer.step()
        sampler.record_batch(1, 2)
        state.restore()
        assert torch.equal(model.weight, committed)
        assert sampler.processed_num == 4
        assert float(optimizer.state_dict()["state"][0]["step"]) == 1
    other = nn.Linear(2, 2)
    state.model = other
    nn.init.zeros_(other.weight)
    state.restore()
    assert other.weight.abs().sum() > 0


@check
def after_a_failed_collective_all_ranks_meet_again_and_go_back():
    for failing in (0, 1):
        go_back(failing)


def go_back(failing: int) -> None:
    seen = []

    @hvd.elastic.run
    def train(state):
        seen.append((state.batch, state.total))
        while state.batch < 6:
            state.total += hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step").item()
            state.batch += 1
            if len(seen) == 1 and state.batch == 4 and hvd.rank() == failing:
                raise hvd.HorovodInternalError("a cable was pulled")
            if state.batch % 3 == 0:
                state.commit()
        return state.total

    resets = []
    state = hvd.elastic.ObjectState(batch=0, total=0.0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    assert train(state) == 12
    assert seen == [(0, 0), (3, 6)]
    assert resets == [2]


@check
def when_the_hosts_have_changed_nothing_is_lost():
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.batch)
        state.batch += 1
        if len(calls) < 3:
            raise hvd.HostsUpdatedInterrupt(skip_sync=len(calls) == 2)
        return state.batch

    assert train(hvd.elastic.ObjectState(batch=0)) == 3
    assert calls == [0, 1, 2]


@check
def a_mistake_is_not_tried_again():
    @hvd.elastic.run
    def train(state):
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="x")

    with pytest.raises(hvd.MismatchError):
        train(hvd.elastic.ObjectState(batch=0))


test_two_ranks = check.test()


class Place:
    """A sampler of one rank of a world, without processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def sampler(self, rows: int, rank: int, size: int, seed: int = 0) -> hvd.elastic.ElasticSampler:
        self._patch.setattr("footplate.compat.horovod.sampler.rank", lambda: rank)
        self._patch.setattr("footplate.compat.horovod.sampler.size", lambda: size)
        return hvd.elastic.ElasticSampler(range(rows), seed=seed)


@given(
    rows=st.integers(1, 50),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_the_rest_of_an_epoch_is_shared_out_among_the_ranks_there_are_then(rows, before, after, steps, seed):
    with pytest.MonkeyPatch.context() as patch:
        place = Place(patch)
        first = [place.sampler(rows, rank, before, seed) for rank in range(before)]
        done = [index for sampler in first for index in list(sampler)[: steps * 2]]
        for step in range(steps):
            first[0].record_batch(step, 2)
        rest = []
        for rank in range(after):
            sampler = place.sampler(rows, rank, after, seed)
            sampler.load_state_dict(first[0].state_dict())
            assert len(list(sampler)) == len(sampler) == -(-max(0, rows - steps * 2 * before) // after)
            rest += list(sampler)
    assert set(done) | set(rest) == set(range(rows))
    if steps * 2 * before <= rows:
        assert not set(done) & set(rest)
        assert len(rest) - len(set(rest)) < after  # filled up with a few rows twice


def test_another_epoch_has_another_order():
    with pytest.MonkeyPatch.context() as patch:
        sampler = Place(patch).sampler(20, 0, 2)
        before = list(sampler)
        sampler.set_epoch(1)
        assert list(sampler) != before
        expected = list(range(20))
        random.Random(1).shuffle(expected)
        assert list(sampler) == expected[::2]


def train_elastic(killed: tuple[int, int, int], notes: Path, commit_every: int) -> dict:
    """Training as in Horovod's documentation. At batch killed[1] of attempt killed[0], rank killed[2] dies."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    lr, epochs, batches = 0.05, 3, 4
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        with (notes / f"{worker.attempt()}-{hvd.rank()}").open("a") as file:
            file.write(f"{state.epoch} {state.batch}\n")
        for state.epoch in range(state.epoch, epochs):  # noqa: B020  as the documents have it
            for state.batch in range(state.batch, batches):  # noqa: B020
                number = state.epoch * batches + state.batch
                if (worker.attempt(), number, hvd.rank()) == killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                numbers = torch.Generator().manual_seed(number)
                data, target = torch.randn(8, 3, generator=numbers), torch.randint(0, 2, (8,), generator=numbers)
                optimizer.zero_grad()
                F.cross_entropy(model(data[hvd.rank() :: hvd.size()]), target[hvd.rank() :: hvd.size()]).backward()
                optimizer.step()
                if (number + 1) % commit_every == 0:
                    state.batch += 1
                    state.commit()
                    state.batch -= 1
            state.batch = 0

    def on_state_reset():
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    hvd.broadcast_parameters(model.state_dict(), 0)
    train(state)
    return {
        "weights": model.state_dict(),
        "lr": optimizer.param_groups[0]["lr"],
        "attempt": worker.attempt(),
        "size": hvd.size(),
        "kept": worker.kept(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_the_steps_since_the_last_commit_and_nothing_else(victim, tmp_path):
    quick = Restarts(peers_grace_s=2.0, max_delay_s=0.1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    untouched = launch(train_elastic, (-1, 0, 0), tmp_path / "a", 1, world_size=2, restarts=quick)
    outcome = launch(train_elastic, (0, 7, victim), tmp_path / "b", 3, world_size=2, restarts=quick)
    assert (outcome["attempt"], outcome["size"]) == (1, 2)
    for name, value in untouched["weights"].items():
        assert torch.equal(outcome["weights"][name], value), name
    assert (tmp_path / "b" / "0-0").read_text() == "0 0\n"
    assert (tmp_path / "b" / "1-0").read_text() == (tmp_path / "b" / "1-1").read_text() == "1 2\n"  # batch 6 of 12
    assert not outcome["kept"].exists()


@pytest.mark.slow
def test_with_fewer_workers_it_goes_on_with_the_learning_rate_for_them(tmp_path):
    shrinking = Restarts(peers_grace_s=2.0, max_delay_s=0.1, min_world_size=1, drop_after=1)
    # killed before its first commit of the attempt, so that its slot is given up
    outcome = launch(train_elastic, (0, 0, 1), tmp_path, 1, world_size=2, restarts=shrinking)
    assert (outcome["size"], outcome["lr"]) == (1, 0.05)


def test_what_a_launch_keeps_is_gone_when_it_has_failed_for_good(tmp_path):
    def work():
        directory = worker.kept()
        (directory / "file").write_text("kept")
        (tmp_path / "where").write_text(str(directory))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LaunchError):
        launch(work, world_size=1, restarts=Restarts(max_restarts=0))
    directory = Path((tmp_path / "where").read_text())
    assert not directory.exists()


def test_outside_a_launch_nothing_is_kept(monkeypatch):
    monkeypatch.delenv(worker.LAUNCH, raising=False)
    assert worker.kept() is None
