"""Several loaders as one: modes, shapes, positions, ranks."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate import checkpoint
from footplate.data.adapters.adapt import adapt
from footplate.data.adapters.combination import MODES, count_batches
from footplate.data.adapters.combined import CombinedLoader
from footplate.data.adapters.evaluation import share_out
from footplate.data.adapters.rank_shares import even, weigher
from footplate.data.adapters.training_combination import TrainingCombination, rewound
from footplate.distributed.world import World

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def numbers(rows: int, batch_size: int = 1, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(rows)), batch_size, shuffle)


def plain(batch: Any) -> Any:
    """Convert a batch to plain values."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def epochs(loader: Any, first: int, count: int) -> list[list[Any]]:
    batches = []
    for epoch in range(first, first + count):
        loader.set_epoch(epoch)
        batches.append([plain(batch) for batch in itertools.islice(loader, len(loader))])
    return batches


@pytest.mark.parametrize(("mode", "expected"), [
    ("min_size", [{"a": 0, "b": 0}, {"a": 1, "b": 1}]),
    ("max_size_cycle", [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 0, "b": 2}]),
    ("max_size", [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": None, "b": 2}]),
])  # fmt: skip
def test_a_mode_says_which_batches_make_one(mode: Any, expected: Any) -> None:
    combined = CombinedLoader({"a": range(2), "b": range(3)}, mode)
    assert len(combined) == len(expected)
    assert list(combined) == [(batch, index, 0) for index, batch in enumerate(expected)]


def test_sequential_says_which_loader_a_batch_is_of() -> None:
    combined = CombinedLoader([range(2), range(1)], "sequential")
    assert (len(combined), list(combined)) == (3, [(0, 0, 0), (1, 1, 0), (0, 0, 1)])


def test_batches_are_counted_where_they_can_be() -> None:
    assert count_batches([1, 2]) == 2
    assert count_batches(iter([1, 2])) == math.inf


def test_batches_have_the_shape_of_the_collection() -> None:
    loader = numbers(2)
    (batch,) = list(adapt({"a": [loader, (loader, loader)], "b": [[1, 2, 3, 4]]}, 1))[:1]
    assert isinstance(batch["a"], list)
    assert isinstance(batch["a"][1], tuple)
    assert batch["b"] == [1, 2, 3, 4]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(fp.ConfigError, match="expected one of min_size, max_size_cycle, max_size, sequential"):
        CombinedLoader([range(2)], "longest")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:The sampler of")
@settings(max_examples=40)
@given(SIZES, st.sampled_from(MODES), st.data())
def test_a_combination_goes_on_where_it_was_and_where_it_was_before(sizes: Any, mode: Any, data: Any) -> None:
    def make() -> TrainingCombination:
        return adapt(CombinedLoader([numbers(size) for size in sizes], mode), 3)

    whole = epochs(make(), 0, 3)
    cut = data.draw(st.integers(1, len(whole[1])))
    interrupted = make()
    interrupted.set_epoch(1)
    batches = iter(interrupted)
    assert [plain(next(batches)) for _ in range(cut)] == whole[1][:cut]
    state = interrupted.state_dict()
    for back in range(min(cut, 2) + 1):
        resumed = make()
        resumed.load_state_dict(copy.deepcopy(rewound(state, cut - back) if back else state))
        resumed.set_epoch(1)
        rest = [plain(batch) for batch in itertools.islice(resumed, len(whole[1]) - cut + back)]
        assert rest == whole[1][cut - back :]
        assert epochs(resumed, 2, 1) == whole[2:]


def test_passes_and_loaders_of_one_epoch_are_shuffled_differently() -> None:
    combined = adapt([numbers(20), numbers(60), numbers(60)], 3)
    (batches,) = epochs(combined, 0, 1)
    orders = [[batch[index][0][0] for batch in batches] for index in range(3)]
    assert sorted(orders[0][:20]) == sorted(orders[0][20:40]) == list(range(20))
    assert orders[0][:20] != orders[0][20:40] != orders[0][40:]
    assert orders[1] != orders[2]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_have_as_many_batches_and_no_row_twice(mode: Any) -> None:
    worlds = [World(rank, 2, rank, 2, True) for rank in range(2)]
    loaders = [
        adapt(CombinedLoader({"a": numbers(8, 2), "b": numbers(12, 2)}, mode), 3, True, world) for world in worlds
    ]
    by_rank = [epochs(loader, 0, 1)[0] for loader in loaders]
    assert all(map(even, loaders))
    assert len(by_rank[0]) == len(by_rank[1])
    batches = [batch for rank in by_rank for batch in rank]
    if mode != "sequential":
        rows = [batch["b"][0] for batch in batches]
        assert sorted(itertools.chain(*rows))[: 4 * len(rows)] == sorted(set(itertools.chain(*rows)))
    weights = [weigher(loader, world) for loader, world in zip(loaders, worlds, strict=True)]
    assert all(weight is not None and weight(batch) == 1.0 for weight in weights for batch in range(len(by_rank[0])))


def test_a_share_weighs_as_much_as_its_loaders_do_on_average() -> None:
    loaders = [
        adapt([numbers(5, 2, False), numbers(8, 2, False)], 3, True, World(rank, 2, rank, 2, True)) for rank in range(2)
    ]
    for loader in loaders:
        list(loader)
    weights = [weigher(loader, World(rank, 2, rank, 2, True)) for rank, loader in enumerate(loaders)]
    assert [[weight(batch) for batch in range(2)] for weight in weights if weight] == [[1.0, 0.5], [1.0, 1.5]]


def test_an_evaluation_begins_at_the_first_batch_each_time() -> None:
    shared = share_out(CombinedLoader([numbers(2, shuffle=False), numbers(3, shuffle=False)], "max_size"), 1, World())
    assert [plain(list(shared)) for _ in range(2)] == [[[[[0]], [[0]]], [[[1]], [[1]]], [None, [[2]]]]] * 2


class Sums(fp.Module):
    """A module that learns from two loaders of different data, and notes each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(plain(batch))
        values = [part[0].float() for part in batch.values() if part is not None]
        return sum(self.net(value[:, None]).square().mean() for value in values) * 1e-4

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("rows", float(len(batch[0])))
        self.seen.append((dataloader_idx, plain(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stops(fp.Callback):
    """Saves after a number of batches, as if the run had been killed afterwards."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches == self.batches:
            trainer.save_checkpoint(trainer.run_dir / "cut.ckpt")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_on_several_loaders_resumes_bit_for_bit_in_the_middle_of_an_epoch(make_trainer: Any, mode: Any) -> None:
    table = fp.Table({"x": [float(row) for row in range(14)]})

    class Rows(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if mode != "sequential":
                return super().training_step(
                    {name: part and list(part.values()) for name, part in batch.items()}, batch_idx
                )
            return super().training_step({"only": list(batch.values())}, batch_idx)

    def data() -> Any:
        several = {"a": fp.Loader(table, 2, shuffle=True), "b": fp.Loader(table, 4, shuffle=True, seed=5)}
        return CombinedLoader(several, mode)

    first = Rows()
    make_trainer(max_epochs=2, callbacks=[Stops(6)]).fit(first, data())
    training = make_trainer(max_epochs=2)
    second = Rows()
    training.fit(second, data(), ckpt_path=training.run_dir / "cut.ckpt")
    assert first.seen[6:] == second.seen
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_packed_documents_beside_the_rows_of_a_table_resume_after_any_batch(tmp_path: Path, mode: Any) -> None:
    write_deltalake(tmp_path / "documents", pa.table({"tokens": [[number] * (1 + number % 7) for number in range(40)]}))
    write_deltalake(tmp_path / "rows", pa.table({"x": range(10)}))

    def fresh() -> Any:
        packed = fp.Table(tmp_path / "documents").pack(8)
        several = {
            "a": fp.Loader(packed, 4, shuffle=True),
            "b": fp.Loader(fp.Table(tmp_path / "rows"), 3, shuffle=True),
        }
        return adapt(CombinedLoader(several, mode), 0, True, World())

    first, second = epochs(fresh(), 0, 2)
    assert first != second
    for done in range(1, len(first)):
        cut, rest = fresh(), fresh()
        cut.set_epoch(0)
        begun = [plain(batch) for batch in itertools.islice(cut, done)]
        rest.load_state_dict(cut.state_dict())
        rest.set_epoch(0)
        assert begun + [plain(batch) for batch in itertools.islice(rest, len(first) - done)] == first
        assert epochs(rest, 1, 1) == [second]


def test_a_batch_that_failed_comes_again_from_each_loader(make_trainer: Any) -> None:
    class Fails(Sums):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(self.seen) == 5 and failing:
                raise RuntimeError("a machine fails")
            return super().training_step(batch, batch_idx)

    data = {"a": numbers(2), "b": numbers(7)}
    failing = False
    whole = Fails()
    make_trainer(max_epochs=2).fit(whole, data)
    failing, cut = True, Fails()
    training = make_trainer(max_epochs=2)
    with pytest.raises(RuntimeError, match="a machine fails"):
        training.fit(cut, data)
    failing, rest = False, Fails()
    training.fit(rest, data, ckpt_path="last")
    assert cut.seen + rest.seen == whole.seen


def test_evaluation_takes_the_loaders_of_a_dict_one_after_another(make_trainer: Any) -> None:
    module = Sums()
    results = make_trainer().validate(module, {"a": numbers(2, 2, False), "b": [numbers(3, 3, False)]}, verbose=False)
    assert results == [{"rows/dataloader_idx_0": 2.0}, {"rows/dataloader_idx_1": 3.0}]
    assert module.seen == [(0, [[0, 1]]), (1, [[0, 1, 2]])]


def test_evaluation_takes_combined_batches_of_a_combined_loader(make_trainer: Any) -> None:
    class Notes(Sums):
        def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.seen.append(plain(batch))

    module = Notes()
    make_trainer().validate(module, CombinedLoader({"a": numbers(1), "b": numbers(2, shuffle=False)}, "max_size"))
    assert module.seen == [{"a": [[0]], "b": [[0]]}, {"a": None, "b": [[1]]}]


def test_another_combination_is_refused_when_resuming(make_trainer: Any) -> None:
    training = make_trainer(max_epochs=1)
    training.fit(Sums(), {"a": numbers(2)})
    path = checkpoint.newest([training.checkpoint_dir])
    with pytest.raises(fp.CheckpointError, match=r"made with 1 combined loader\(s\) \(mode=max_size_cycle\)"):
        make_trainer(max_epochs=2).fit(Sums(), {"a": numbers(2), "b": numbers(2)}, ckpt_path=path)
