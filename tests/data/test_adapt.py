"""Loaders of every kind: after resuming at any position, the rest of the epoch is the same."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.small import Classifier, dataset
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import footplate as fp
from footplate.data.adapters.adapt import adapt
from footplate.data.adapters.evaluation import share_out
from footplate.data.adapters.rank_shares import even
from footplate.data.adapters.seeded_dataloader import SeededDataLoader
from footplate.data.adapters.workers import pin_for
from footplate.data.adapters.wrappers import ReplayedLoader, StatefulLoader
from footplate.data.loader import Loader
from footplate.data.table import Table
from footplate.distributed.world import SINGLE, World


class Noisy(Dataset):
    """A data set that draws its items from torch's global generator."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class Many(Noisy):
    """A data set that reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [index + torch.rand(()) for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0))


def test_a_position_that_was_loaded_is_the_position_before_any_batch_is_asked_for():
    for data in (DataLoader(Noisy(20), 2), [1, 2, 3, 4, 5]):
        loader = adapt(data, seed=1)
        loader.load_state_dict({**loader.state_dict(), "epoch": 3, "batch": 4})
        loader.set_epoch(3)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (3, 4)


class Positioned:
    """A loader that keeps its own position, as torchdata's does."""

    def __init__(self, batches: int = 10) -> None:
        self.batches, self.at = batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for index in range(self.at, self.batches):
            self.at = index + 1
            yield torch.tensor([float(index)])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Changing(DataLoader):
    """A subclass with an iteration of its own."""

    def __iter__(self):
        for batch in super().__iter__():
            yield -batch


class Twice(DataLoader):
    """A subclass that makes two batches of each batch."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch + 100)

    def __len__(self) -> int:
        return 2 * super().__len__()


class Mapping(DataLoader):
    """A subclass after torch_geometric's pattern."""

    def _get_iterator(self):
        return (batch + 100 for batch in super()._get_iterator())


class Apart(DataLoader):
    """A subclass that doesn't use its sampler."""

    def __iter__(self):
        return iter([torch.tensor([float(number)]) for number in range(6)])


class Endless(DataLoader):
    """A subclass that always keeps one iterator, after timm's and YOLO's pattern."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.batches = len(self.batch_sampler)
        object.__setattr__(self, "batch_sampler", itertools.repeat([0, 1]))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        return itertools.islice(self.iterator, len(self))


def weighted(rows: int) -> DataLoader:
    return DataLoader(Noisy(rows), 3, sampler=WeightedRandomSampler(torch.arange(1.0, rows + 1), rows))


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(20), 3, shuffle=True),
    "in order, last dropped": lambda: DataLoader(Noisy(20), 3, drop_last=True),
    "a generator of its own": lambda: DataLoader(Noisy(20), 3, shuffle=True, generator=torch.Generator()),
    "many at once": lambda: DataLoader(Many(20), 3, shuffle=True),
    "weighted": lambda: weighted(20),
    "a subset": lambda: DataLoader(Noisy(20), 3, sampler=SubsetRandomSampler(range(5, 17))),
    "a batch sampler": lambda: DataLoader(Noisy(20), batch_sampler=BatchSampler(RandomSampler(range(20)), 3, True)),
    "unbatched": lambda: DataLoader(Noisy(8), batch_size=None, shuffle=True),
    "a list of batches": lambda: [torch.tensor([float(i)]) for i in range(8)],
    "a list of batches, in order": lambda: DataLoader(Noisy(20), 3, sampler=SequentialSampler(range(20))),
    "a subclass": lambda: Changing(Noisy(20), 3, shuffle=True),
    "a subclass that makes more batches": lambda: Twice(Noisy(8), 3, shuffle=True),
    "a subclass that maps its iterator": lambda: Mapping(Noisy(20), 3, shuffle=True),
    "a subclass that reads by itself": lambda: Apart(Noisy(20), 3),
    "an iterable set": lambda: DataLoader(Stream(), 3),
    "one that knows where it is": Positioned,
}


def epochs(loader, count: int = 2) -> list[list[list[float]]]:
    """Return the batches of some epochs."""
    batches = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        batches.append([batch.reshape(-1).tolist() for batch in loader])
    return batches


@pytest.mark.parametrize("name", LOADERS)
def test_resumed_at_every_position_the_rest_is_as_it_would_have_been(name):
    whole = epochs(adapt(LOADERS[name](), seed=3))
    for epoch, batches in enumerate(whole):
        for position in range(len(batches) + 1):
            first = adapt(LOADERS[name](), seed=3)
            for done in range(epoch):
                first.set_epoch(done)
                assert len(list(first)) == len(whole[done])
            first.set_epoch(epoch)
            iterator = iter(first)
            for _ in range(position):
                next(iterator)
            state = first.state_dict()

            # Other draws have no influence.
            torch.rand(7)
            second = adapt(LOADERS[name](), seed=3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                second.load_state_dict(state)
                second.set_epoch(epoch)
                rest = [batch.reshape(-1).tolist() for batch in second]
                assert rest == batches[position:], (epoch, position)
                if epoch == 0:
                    second.set_epoch(1)
                    assert [batch.reshape(-1).tolist() for batch in second] == whole[1]


@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 2**63 - 1), st.data())
@settings(max_examples=40, deadline=None)
def test_any_shuffled_loader_resumes_anywhere(rows, batch_size, shuffle, drop_last, seed, data):
    def make():
        return adapt(DataLoader(Noisy(rows), batch_size, shuffle=shuffle, drop_last=drop_last), seed)

    (whole,) = epochs(make(), 1)
    position = data.draw(st.integers(0, len(whole)))
    resumed = make()
    resumed.load_state_dict({"epoch": 0, "batch": position})
    assert epochs(resumed, 1)[0] == whole[position:]


def test_the_order_differs_by_epoch_and_by_seed_and_holds_each_row_once():
    first, second = epochs(adapt(DataLoader(Noisy(50), 5, shuffle=True), seed=1))
    other = epochs(adapt(DataLoader(Noisy(50), 5, shuffle=True), seed=2))[0]
    rows = [[int(x) for batch in epoch for x in batch] for epoch in (first, second, other)]
    assert rows[0] != rows[1] != rows[2] != rows[0]
    assert all(sorted(order) == list(range(50)) for order in rows)


def test_reading_leaves_the_global_generators_order_to_the_step():
    """Drawing the order of an epoch doesn't change the global generators, from which a user draws."""
    loader = adapt(DataLoader(list(range(20)), 5, shuffle=True), seed=1)
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    loader.set_epoch(0)
    loader._sampler_order.draw(0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_does_not_depend_on_the_number_of_workers(workers):
    alone = epochs(adapt(DataLoader(Noisy(12), 3, shuffle=True), seed=4), 1)
    shared = epochs(adapt(DataLoader(Noisy(12), 3, shuffle=True, num_workers=workers), seed=4), 1)
    assert shared == alone


def test_unshuffled_the_first_batches_are_the_same_in_every_epoch():
    first, second = epochs(adapt(DataLoader(list(range(20)), 5, shuffle=True), seed=1, shuffle=False))
    assert first == second == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]


@pytest.fixture
def table(tmp_path) -> fp.Table:
    (tmp_path / "table").mkdir()
    pq.write_table(pa.table({"x": list(range(40))}), tmp_path / "table" / "a.parquet")
    return fp.Table(str(tmp_path / "table"))


def test_our_own_loader_is_taken_as_it_is(table):
    loader = fp.Loader(table, batch_size=4)
    assert adapt(loader, seed=1) is loader


def test_our_own_loader_is_held_still_too(table):
    loader = adapt(fp.Loader(table, batch_size=4, shuffle=True), seed=1, shuffle=False)
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen.append([batch["x"].tolist() for batch in loader])
    assert seen[0] == seen[1]


def test_a_sampler_or_set_that_wants_to_know_the_epoch_is_told():
    class Told(RandomSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    epochs(adapt(DataLoader(Noisy(6), 3, sampler=Told(range(6))), seed=1))
    assert Told.epochs == [0, 1]


def test_a_stream_is_read_again_with_a_warning_that_says_what_that_means():
    loader = adapt(DataLoader(Stream(), 4), seed=1)
    loader.load_state_dict({"epoch": 0, "batch": 3})
    with pytest.warns(UserWarning, match="first 3 batches are read again to resume"):
        assert [batch.tolist() for batch in loader] == [[12.0, 13.0, 14.0, 15.0], [16.0, 17.0, 18.0, 19.0]]


def test_each_kind_gets_its_own():
    assert isinstance(adapt(DataLoader(Noisy(3)), 1), SeededDataLoader)
    assert isinstance(adapt(DataLoader(Stream()), 1), ReplayedLoader)
    assert isinstance(adapt([1, 2], 1), ReplayedLoader)
    assert isinstance(adapt(Positioned(), 1), StatefulLoader)
    assert len(adapt(Positioned(7), 1)) == 7
    assert adapt(DataLoader(Noisy(3)), 1).dataset.rows == 3


@pytest.mark.parametrize("given", [3, {"a": 3}, {"a": DataLoader(Noisy(3)), "b": [3.0, DataLoader(Noisy(3))]}])
def test_what_is_no_loader_is_refused(given):
    with pytest.raises(fp.ConfigError, match=r"returned (int|float), which can't be iterated"):
        adapt(given, 1)


def test_a_sampler_that_is_used_as_it_is_gives_each_rank_its_own_rows():
    def of(rank, rows):
        return adapt(DataLoader(range(8), 2, sampler=rows), 1, world=World(rank, 2, rank, 2, True), shared=False)

    loaders = [of(0, range(0, 8, 2)), of(1, [7, 7])]
    assert [len(loader) for loader in loaders] == [2, 1]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0, 2], [4, 6]], [[7, 7]]]
    assert not any(even(loader) for loader in loaders)
    given = DataLoader(Noisy(8), 2)
    assert share_out(given, 1, World(0, 2, 0, 2, True), shared=False) is given


def test_overfitting_resumes_at_the_first_batch_of_the_next_epoch_and_in_the_middle_of_one():
    table = Table({"x": [float(row) for row in range(8)]})

    def make():
        return adapt(Loader(table, 2, shuffle=True), 1, shuffle=False)

    def batches(loader, epoch, count):
        loader.set_epoch(epoch)
        return [batch["x"].tolist() for batch in itertools.islice(loader, count)]

    first = make()
    expected = batches(first, 0, 2)
    assert batches(first, 1, 2) == expected
    ended, middle = make(), make()
    ended.load_state_dict(first.state_dict())
    assert batches(ended, 2, 2) == expected
    middle.load_state_dict({**first.state_dict(), "batch": 1})
    assert batches(middle, 1, 1) == expected[1:]


@pytest.mark.parametrize(("asked", "device", "pinned"), [
    (None, "cuda:0", True), (None, "cpu", False), (None, "mps", False), (False, "cuda:0", False), (True, "cpu", True),
])  # fmt: skip
def test_batches_for_cuda_are_pinned_unless_their_user_has_decided(
    asked: bool | None, device: str, pinned: bool
) -> None:
    loader = Loader(Table({"x": [1.0]}), 1, pin_memory=asked)
    pin_for(loader, torch.device(device))
    assert loader.pin_memory is pinned


def test_a_data_loader_of_torch_pins_as_its_user_said() -> None:
    loader = DataLoader([1, 2])
    pin_for(loader, torch.device("cuda"))
    pin_for([1, 2], torch.device("cuda"))
    assert loader.pin_memory is False


def test_the_iteration_and_the_length_of_a_subclass_count():
    plain = epochs(adapt(DataLoader(Noisy(7), 3, shuffle=True), seed=1))
    assert epochs(adapt(Changing(Noisy(7), 3, shuffle=True), seed=1)) == [[[-x for x in b] for b in e] for e in plain]
    mapped = epochs(adapt(Mapping(Noisy(7), 3, shuffle=True, num_workers=1), seed=1))
    assert mapped == [[(torch.tensor(b) + 100).tolist() for b in epoch] for epoch in plain]
    twice = adapt(Twice(Noisy(7), 3), seed=1)
    assert (len(twice), [len(epoch) for epoch in epochs(twice)]) == (6, [6, 6])
    assert len(adapt(Apart(Noisy(7), 3), seed=1)) == 3


def test_a_loader_that_keeps_one_iterator_is_read_as_it_is():
    loader = adapt(Endless(Noisy(7), 3), seed=1)
    assert isinstance(loader, ReplayedLoader)
    assert [len(epoch) for epoch in epochs(loader)] == [3, 3]


def test_a_subclass_is_shared_out_unless_it_reads_without_its_sampler():
    rows = []
    for rank in range(2):
        loader = adapt(Changing(list(range(10)), 2), seed=1, world=World(rank, 2))
        rows += [-row for batch in epochs(loader, 1)[0] for row in batch]
    assert sorted(rows) == list(range(10))
    with pytest.raises(fp.ConfigError, match="Apart makes its batches without its sampler"):
        epochs(adapt(Apart(Noisy(7), 3), seed=1, world=World(1, 2)), 1)


class Opened(Noisy):
    """A data set whose workers open a file first."""

    file = None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.file == "open"
        return super().__getitem__(index)


def open_file(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.file = "open"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_knows_the_set_of_the_user(context):
    workers = {"num_workers": 1, "multiprocessing_context": context}
    opened = epochs(adapt(DataLoader(Opened(4), 2, worker_init_fn=open_file, **workers), seed=1), 1)
    assert opened == epochs(adapt(DataLoader(Noisy(4), 2), seed=1), 1)


def test_in_mid_epoch_another_data_set_is_refused_and_another_order_warned_of():
    first = adapt(DataLoader(Noisy(20), 3, shuffle=True), seed=1)
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    half = torch.utils.data.Subset(Noisy(40), range(20))
    for other in (Noisy(21), half):
        resumed = adapt(DataLoader(other, 3, shuffle=True), seed=1)
        resumed.load_state_dict(state)
        with pytest.raises(fp.CheckpointError, match="on another data set"):
            list(resumed)
        resumed.set_epoch(1)
        assert len(list(resumed)) == 7
    unshuffled = adapt(DataLoader(Noisy(20), 3), seed=1)
    unshuffled.load_state_dict(state)
    with pytest.warns(UserWarning, match="gives another order of epoch 0"):
        assert len(list(unshuffled)) == 6
    for known in (state, {name: value for name, value in state.items() if name != "data"}):
        resumed = adapt(DataLoader(Noisy(20), 3, shuffle=True), seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.load_state_dict(known)
            assert len(list(resumed)) == 6


def test_the_samplers_of_every_loader_are_told_the_epoch(tmp_path):
    told = []

    class Told(RandomSampler):
        def __init__(self, name: str) -> None:
            super().__init__(range(4))
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            told.append((self.name, epoch))

    class Model(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[:, None]).mean()

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    inner = DataLoader(Noisy(4), batch_sampler=BatchSampler(Told("training"), 2, True))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    trainer = fp.Trainer(
        max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **quiet
    )
    trainer.fit(Model(), inner, DataLoader(Noisy(4), 2, sampler=Told("validation")))
    assert told == [("training", 0), ("validation", 0), ("training", 1), ("validation", 1)]


class EndlessSampler(Sampler):
    """A sampler that yields random rows without an end."""

    def __init__(self, rows):
        self.rows, self.drawn = rows, 0

    def __iter__(self):
        while True:
            self.drawn += 1
            yield random.randrange(self.rows) + 0 * int(torch.randint(2, ()))


class EndlessBatches(EndlessSampler):
    """A batch sampler that yields batches of 1 to 3 rows without an end."""

    def __iter__(self):
        for row in super().__iter__():
            yield [row] * (1 + row % 3)


def endless(kind, world=SINGLE):
    loader = DataLoader(Noisy(10), **kind)
    return adapt(loader, seed=3, world=world), loader


ENDLESS = [
    lambda: {"sampler": EndlessSampler(10), "batch_size": 3},
    lambda: {"batch_sampler": EndlessBatches(10)},
    lambda: {"sampler": EndlessSampler(10), "batch_size": None},
    lambda: {"sampler": EndlessSampler(10), "batch_size": 3, "num_workers": 1},
]


@pytest.mark.parametrize("kind", ENDLESS, ids=["rows", "batches", "items", "workers"])
def test_a_sampler_that_never_ends_is_drawn_while_it_is_used_and_resumes_exactly(kind):
    whole, loader = endless(kind())
    with pytest.raises(TypeError):
        len(whole)
    random.seed(5)
    torch.manual_seed(5)
    expected, states = [], []
    for batch in itertools.islice(whole, 200):
        expected.append(batch)
        states.append(whole.state_dict())
        # A step draws too. That doesn't change the order.
        torch.rand(3)
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.batch_sampler or loader.sampler
    assert sampler.drawn < 2000
    for position in (1, 100, 150):
        resumed, _ = endless(kind())
        resumed.load_state_dict(states[position - 1])
        rest = list(itertools.islice(resumed, 200 - position))
        assert all(map(torch.equal, rest, expected[position:]))


def test_ranks_share_an_endless_sampler_out_and_weights_are_kept_of_the_newest_batches_only():
    kind = {"batch_sampler": EndlessBatches(10)}
    ranks = [endless({"batch_sampler": EndlessBatches(10)}, World(rank=rank, size=2))[0] for rank in range(2)]
    alone, _ = endless(kind)
    assert ranks[0].draw_order() == ranks[1].draw_order()
    sizes = [len(batch) for batch in itertools.islice(alone, 40)]
    for rank, loader in enumerate(ranks):
        assert not even(loader)
        for index, batch in enumerate(itertools.islice(loader, 20)):
            own, both = sizes[2 * index + rank], sizes[2 * index] + sizes[2 * index + 1]
            assert (len(batch), loader.weight(index)) == (own, 2 * own / both)
    for _ in itertools.islice(ranks[0], 6000):
        pass
    assert len(ranks[0]._weights) <= 4096


def test_max_steps_and_limits_end_a_run_over_an_endless_sampler(tmp_path):
    class Model(fp.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch.float().reshape(-1, 1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    for limits, steps in (({"max_steps": 5}, 5), ({"max_epochs": 2, "limit_train_batches": 3}, 6)):
        trainer = fp.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, logger=False, **limits)
        trainer.fit(Model(), DataLoader(Noisy(10), sampler=EndlessSampler(10), batch_size=2))
        assert trainer.global_step == steps


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_that_persist_between_epochs_end_with_the_call(kind, make_trainer):
    class Workers(fp.Callback):
        def __init__(self) -> None:
            self.seen: set[int] = set()

        def on_train_batch_end(self, *_):
            self.seen |= {child.pid for child in multiprocessing.active_children()}

    class Pairs(IterableDataset):
        def __iter__(self):
            return iter(dataset(40))

    before = set(multiprocessing.active_children())
    loader = DataLoader(dataset(40) if kind == "map" else Pairs(), 10, num_workers=1, persistent_workers=True)
    workers = Workers()
    training = make_trainer(max_epochs=2, callbacks=[workers])
    training.fit(Classifier(), loader, loader)
    # One worker trains and one validates, the same in both epochs.
    assert len(workers.seen) == 2
    assert set(multiprocessing.active_children()) <= before
    # The loader can be read again.
    training.validate(Classifier(), loader)
    assert set(multiprocessing.active_children()) <= before


def test_validation_in_mid_epoch_on_the_training_loader_leaves_its_persistent_workers_alone(make_trainer):
    class Pairs(IterableDataset):
        def __iter__(self):
            return iter(dataset(80))

    class Counts(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch, batch_idx):
            self.seen += batch[0][:, 0].tolist()
            return super().training_step(batch, batch_idx)

    loader = DataLoader(Pairs(), 10, num_workers=1, persistent_workers=True)
    model = Counts()
    make_trainer(max_epochs=2, val_check_interval=3).fit(model, loader, loader)
    rows = dataset(80).tensors[0][:, 0].tolist()
    assert model.seen == rows + rows
