"""Sharding of an epoch: every row once, the same global batches for any number of ranks, resumed anywhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from footplate.core.errors import CheckpointError
from footplate.data.adapters.adapt import adapt
from footplate.data.adapters.evaluation import share_out
from footplate.data.adapters.rank_shares import weigher
from footplate.data.order.sharding import share, share_batches, share_rows
from footplate.distributed.world import World

RANKS = st.integers(1, 7)


@given(st.integers(1, 40), RANKS)
def test_the_shares_of_a_batch_are_its_rows_in_order_and_their_weights_their_parts_of_the_mean(rows, ranks):
    shares = [share(range(rows), rank, ranks) for rank in range(ranks)]
    assert all(part.rows for part in shares)
    counted = [part for part in shares if part.weight]
    assert [row for part in counted for row in part.rows] == list(range(rows))
    mean = sum(part.weight * sum(part.rows) / len(part.rows) for part in shares) / ranks
    assert mean == pytest.approx(sum(range(rows)) / rows)
    assert max(len(part.rows) for part in shares) - min(len(part.rows) for part in counted) <= 1


@given(st.integers(1, 60), st.integers(1, 12), RANKS, RANKS, st.booleans())
def test_global_batches_do_not_depend_on_the_number_of_ranks(rows, size, ranks, others, drop_last):
    def batches(world):
        by_rank = [share_rows(range(rows), size, drop_last, rank, world) for rank in range(world)]
        assert len({len(shares) for shares in by_rank}) == 1
        return [[row for part in batch if part.weight for row in part.rows] for batch in zip(*by_rank, strict=True)]

    assert batches(ranks) == batches(others)
    kept = rows - rows % size if drop_last else rows
    assert list(itertools.chain(*batches(ranks))) == list(range(kept))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), RANKS, RANKS)
def test_ready_batches_are_dealt_out_and_on_other_ranks_their_rows_are_spread(sizes, ranks, others):
    rows = iter(range(sum(sizes)))
    batches = [[next(rows) for _ in range(size)] for size in sizes]
    dealt = [share_batches(batches, ranks, rank, ranks) for rank in range(ranks)]
    own = [part.rows for step in zip(*dealt, strict=True) for part in step if part.weight]
    assert own == batches
    spread = [share_batches(batches, ranks, rank, others) for rank in range(others)]
    for before, after in zip(zip(*dealt, strict=True), zip(*spread, strict=True), strict=True):
        rows_before = [row for part in before if part.weight for row in part.rows]
        assert rows_before == [row for part in after if part.weight for row in part.rows]
        assert sum(part.weight for part in after) == pytest.approx(others)


LOADERS = {
    "shuffled": lambda data: DataLoader(data, 3, shuffle=True),
    "in order, the tail dropped": lambda data: DataLoader(data, 3, drop_last=True),
    "batches of a sampler's own": lambda data: DataLoader(data, batch_sampler=Pairs(RandomSampler(data), 3, False)),
}


class Pairs(BatchSampler):
    """A user's batch sampler."""


def rows_of(loader, epoch, start=None, steps=None):
    """Global batches: the rows of all ranks' loaders at each step, without padding."""
    for rank_loader in loader:
        if start is not None:
            rank_loader.load_state_dict(start)
        rank_loader.set_epoch(epoch)
    iterators = [iter(rank_loader) for rank_loader in loader]
    first = start["batch"] if start else 0
    batches = []
    for step in range(steps if steps is not None else len(loader[0]) - first):
        step_rows = [next(iterator)[0].tolist() for iterator in iterators]
        weights = [rank_loader.weight(first + step) for rank_loader in loader]
        batches.append([row for rows, weight in zip(step_rows, weights, strict=True) if weight for row in rows])
    return batches


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("rows", [29, 32, 36])
def test_resumed_at_every_position_on_any_ranks_the_rest_of_the_rows_are_the_same(name, rows):
    data = TensorDataset(torch.arange(float(rows)))

    def on(ranks):
        return [adapt(LOADERS[name](data), 5, world=World(rank, ranks)) for rank in range(ranks)]

    whole = rows_of(on(4), 1)
    if "dropped" not in name:
        assert sorted(row for batch in whole for row in batch) == list(range(rows))
    for position in range(len(whole)):
        before = on(4)
        assert rows_of(before, 1, steps=position) == whole[:position]
        state = before[0].state_dict()
        for ranks in (1, 2, 3, 4, 6):
            assert rows_of(on(ranks), 1, state) == whole[position:], (position, ranks)


def test_after_resuming_on_fewer_ranks_later_epochs_keep_the_global_batch():
    data = TensorDataset(torch.arange(24.0))
    four = [adapt(DataLoader(data, 2, shuffle=True), 5, world=World(rank, 4)) for rank in range(4)]
    alone = adapt(DataLoader(data, 2, shuffle=True), 5)
    alone.load_state_dict(four[0].state_dict())
    assert len(alone) == len(four[0]) == 3
    assert rows_of([alone], 2) == rows_of(four, 2)


def test_another_batch_size_in_mid_epoch_is_refused_and_taken_from_the_next_epoch_on():
    data = TensorDataset(torch.arange(24.0))
    loader = adapt(DataLoader(data, 2), 5)
    iterator = iter(loader)
    next(iterator)
    other = adapt(DataLoader(data, 3), 5)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="batch_size=2"):
        next(iter(other))
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    assert len(next(iter(other))[0]) == 3


def test_a_sampler_that_shares_out_by_itself_is_left_to_do_so():
    data = TensorDataset(torch.arange(10.0))
    rows = []
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=False)
        loader = adapt(DataLoader(data, 2, sampler=sampler), 5, world=World(rank, 2))
        rows += [row for batch in loader for row in batch[0].tolist()]
        assert weigher(loader, World(rank, 2))(0) == 1.0
    assert sorted(rows) == list(range(10))


def test_batches_that_are_ready_can_not_be_shared_out_anew():
    data = TensorDataset(torch.arange(10.0))
    two = adapt(DataLoader(data, batch_size=None), 5, world=World(0, 2))
    iterator = iter(two)
    next(iterator)
    alone = adapt(DataLoader(data, batch_size=None), 5)
    alone.load_state_dict(two.state_dict())
    with pytest.raises(CheckpointError, match="Resume on 2"):
        next(iter(alone))


def test_evaluation_gives_no_row_twice():
    data = TensorDataset(torch.arange(13.0))
    loaders = [share_out(DataLoader(data, 2), 5, World(rank, 3)) for rank in range(3)]
    assert list(itertools.chain(*rows_of(loaders, 0))) == list(range(13))
    ordered = [loader.original.sampler for loader in loaders]
    assert all(isinstance(sampler, SequentialSampler) for sampler in ordered)


def test_ranks_draw_different_augmentation_for_their_rows():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(())

    drawn = [next(iter(adapt(DataLoader(Noisy(), 2), 5, world=World(rank, 2)))) for rank in range(2)]
    assert not torch.equal(drawn[0], drawn[1])
