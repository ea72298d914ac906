"""A loader of several tables mixes their rows by weights, and resumes exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data import Loader, MixedLoader, Table
from footplate.data.adapters.adapt import adapt
from footplate.data.adapters.rank_shares import even, shared_content
from footplate.data.order.mixed_table import most_streams
from footplate.data.order.mixing import parse_weights
from footplate.data.order.stream_sizes import choose_streams
from footplate.distributed.world import World

from .conftest import png

SIZES = {"web": 120, "code": 50, "books": 31}
WEIGHTS = {"web": 2, "code": 1, "books": 1}
SCHEDULE = {0: WEIGHTS, 4: {"web": 0, "code": 1, "books": 3}, 9: {"web": 1, "code": 1, "books": 0}}


def tables() -> dict[str, Table]:
    """Rows whose thousands are the number of their table."""
    return {
        name: Table({"id": np.arange(1000 * number, 1000 * number + size)})
        for number, (name, size) in enumerate(SIZES.items())
    }


def mixed(world: World | None = None, batch_size: int = 12, **options: Any) -> MixedLoader:
    return MixedLoader(tables(), batch_size, **{"weights": SCHEDULE, "shuffle": True, "world": world, **options})


def ids(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def test_a_batch_has_the_rows_of_each_table_and_says_whose_they_are() -> None:
    loader = mixed(weights=WEIGHTS)
    batches = list(loader)
    assert len(batches) == len(loader) == 20
    for batch in batches:
        assert torch.equal(batch["id"] // 1000, batch["table_ids"])
        assert Counter(batch["table_ids"].tolist()) == {0: 6, 1: 3, 2: 3}


def test_every_row_is_read_once_before_a_table_begins_again() -> None:
    times = Counter(number for batch in ids(mixed(weights=WEIGHTS)) for number in batch)
    assert {number for number in times if number < 1000} == {*range(120)}
    assert {times[number] for number in range(120)} == {1}
    assert {times[number] for number in range(1000, 1050)} == {1, 2}
    assert {times[number] for number in range(2000, 2031)} == {1, 2}


def test_min_size_gives_no_row_twice() -> None:
    batches = ids(mixed(weights=WEIGHTS, mode="min_size"))
    assert len(batches) == 10
    assert max(Counter(number for batch in batches for number in batch).values()) == 1


def test_weights_change_by_schedule() -> None:
    counts = [Counter(number // 1000 for number in batch) for batch in ids(mixed())]
    assert [counts[batch] for batch in (0, 3, 4, 8, 9)] == [
        {0: 6, 1: 3, 2: 3},
        {0: 6, 1: 3, 2: 3},
        {1: 3, 2: 9},
        {1: 3, 2: 9},
        {0: 6, 1: 6},
    ]


def test_each_epoch_and_each_pass_has_an_order_of_its_own() -> None:
    loader = mixed(weights=WEIGHTS)
    first, second = ids(loader), ids(loader)
    assert first != second
    loader.set_epoch(0)
    assert ids(loader) == first
    books = [number for batch in first for number in batch if number >= 2000]
    assert sorted(books[:31]) == [*range(2000, 2031)]
    assert books[31:58] != books[:27]


def test_without_shuffle_each_table_keeps_its_order() -> None:
    batches = ids(mixed(weights=WEIGHTS, shuffle=False))
    assert [number for batch in batches for number in batch if number < 1000] == [*range(120)]
    assert [number for batch in batches for number in batch if number >= 2000][:33] == [*range(2000, 2031), 2000, 2001]


def test_a_mixture_goes_on_after_any_batch() -> None:
    whole = mixed()
    order = ids(whole) + ids(whole)
    loader, done = mixed(), 0
    for _ in range(2):
        for _ in loader:
            done += 1
            fresh = mixed()
            fresh.load_state_dict(loader.state_dict())
            assert (ids(fresh) + ids(fresh))[: len(order) - done] == order[done:]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_global_batches_are_the_same_rows_on_any_number_of_ranks(ranks: int) -> None:
    alone = ids(mixed(World(0, 1), 30))
    shares = [ids(mixed(World(rank, ranks), 30 // ranks)) for rank in range(ranks)]
    assert {len(batch) for share in shares for batch in share} == {30 // ranks}
    for batch, parts in zip(alone, zip(*shares, strict=True), strict=True):
        assert sorted(number for part in parts for number in part) == sorted(batch)


def test_another_number_of_ranks_goes_on_exactly() -> None:
    alone = ids(mixed(World(0, 1)))
    two = [mixed(World(rank, 2), 6) for rank in range(2)]
    for loader in two:
        iterator = iter(loader)
        next(iterator), next(iterator)
    three = [mixed(World(rank, 3), 6) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(two[0].state_dict())
    rest = [ids(loader) for loader in three]
    for batch, parts in zip(alone[2:], zip(*rest, strict=True), strict=True):
        assert sorted(number for part in parts for number in part) == sorted(batch)


def test_tables_in_streams_and_small_windows_are_mixed_as_well(tmp_path: Path) -> None:
    large = {}
    for number, (name, size) in enumerate((("a", 3000), ("b", 900))):
        rows = pa.table({"id": np.arange(size) + 10_000 * number})
        pq.write_table(rows, tmp_path / f"{name}.parquet", row_group_size=40)
        large[name] = Table(tmp_path / f"{name}.parquet")

    def loader(rank: int, ranks: int) -> MixedLoader:
        loader = MixedLoader(
            large, 48 // ranks, weights={"a": 3, "b": 1}, shuffle=True, seed=4, world=World(rank, ranks)
        )
        loader._streams = [(8, 1), (4, 2)]
        return loader

    alone = ids(loader(0, 1))
    assert {number for batch in alone for number in batch} == {*range(3000), *range(10_000, 10_900)}
    shares = [ids(loader(rank, 4)) for rank in range(4)]
    for batch, parts in zip(alone, zip(*shares, strict=True), strict=True):
        assert sorted(number for part in parts for number in part) == sorted(batch)


def test_tables_share_the_memory_of_one_and_a_batch_has_a_row_of_each_stream() -> None:
    groups = [4 * 2**20] * 700
    assert choose_streams(groups) == (64, 1)
    assert choose_streams(groups, most_streams=20, tables=4) == (16, 1)
    assert choose_streams(groups, most_streams=1, tables=4) == (1, 8)
    phases = parse_weights({0: {"a": 9, "b": 1}, 7: {"a": 1, "b": 0}}, ["a", "b"])
    assert [most_streams(phases, table, 64) for table in (0, 1)] == [57, 6]
    assert most_streams(phases, 1, 4) == 1


def test_packed_tables_are_mixed() -> None:
    rng = np.random.default_rng(0)

    def documents(first: int, count: int) -> Table:
        texts = [[first, *rng.integers(1, 100, length).tolist()] for length in rng.integers(1, 12, count)]
        return Table(pa.table({"tokens": pa.array(texts, pa.list_(pa.int32()))})).pack(16)

    loader = MixedLoader(
        {"a": documents(1000, 200), "b": documents(2000, 60)}, 4, weights={"a": 3, "b": 1}, shuffle=True
    )
    for batch in loader:
        assert batch["tokens"].shape == batch["document_ids"].shape == (4, 16)
        first = batch["tokens"][:, 0]
        assert torch.equal(first // 1000 - 1, batch["table_ids"])


def test_lists_texts_and_images_of_several_tables_are_one_batch() -> None:
    a = Table({"tokens": [[1, 2, 3]], "text": ["x"], "image": [png(1)]})
    b = Table({"tokens": [[4]], "text": ["y"], "image": [png(2)]})
    batch = next(iter(MixedLoader({"a": a, "b": b}, 2, weights={"a": 1, "b": 1})))
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["tokens_length"].tolist() == [3, 1]
    assert batch["text"] == ["x", "y"]
    assert batch["image"][:, 0, 0, 0].tolist() == [1, 2]


def test_a_trainer_shares_a_mixture_out_as_any_loader() -> None:
    loader = mixed(World(0, 2))
    assert adapt(loader, 0) is loader
    assert even(loader)
    assert shared_content(loader) == loader.content == mixed(World(1, 2)).content
    assert loader.content != mixed(World(0, 2), weights=WEIGHTS).content


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 10}, "batch_size=12"),
        ({"seed": 5}, "seed=0"),
        ({"shuffle": False}, "shuffle=True"),
        ({"mode": "min_size"}, "mode='max_size_cycle'"),
        ({"weights": {0: {"web": 1, "code": 1, "books": 1}}}, "after 6 batches with the weights"),
        ({"weights": {**SCHEDULE, 5: WEIGHTS}}, "You may change them from batch 6 on"),
    ],
)
def test_a_state_of_another_mixture_is_refused(change: dict[str, Any], says: str) -> None:
    loader = mixed()
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    with pytest.raises(CheckpointError, match=says):
        mixed(**change).load_state_dict(loader.state_dict())


def test_a_state_of_other_tables_is_refused() -> None:
    state = mixed().state_dict()
    weights = {"web": 1, "code": 1}
    fewer = MixedLoader({name: tables()[name] for name in weights}, 12, weights=weights, shuffle=True)
    with pytest.raises(CheckpointError, match="with the tables web, code, books, not web, code"):
        fewer.load_state_dict(state)
    other = MixedLoader({**tables(), "books": Table({"id": [1, 2]})}, 12, weights=SCHEDULE, shuffle=True)
    with pytest.raises(CheckpointError, match="made on other rows"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="no state of a MixedLoader: it has no"):
        mixed().load_state_dict(Loader(tables()["web"], 12).state_dict())


def test_weights_may_change_from_the_position_on() -> None:
    loader = mixed()
    iterator = iter(loader)
    before = [next(iterator)["id"].tolist() for _ in range(6)]
    annealed = mixed(weights={**{batch: SCHEDULE[batch] for batch in (0, 4)}, 7: {"web": 1, "code": 1, "books": 0}})
    annealed.load_state_dict(loader.state_dict())
    after = ids(annealed)
    assert [Counter(number // 1000 for number in batch) for batch in after[:2]] == [{1: 3, 2: 9}, {0: 6, 1: 6}]
    # No row of a table comes twice before the table has been read once.
    web = [number for batch in (*before, *after) for number in batch if number < 1000]
    assert sorted(web[:120]) == [*range(120)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "max_size"}, 'mode=\'max_size\': expected "max_size_cycle" or "min_size"'),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"weights": {"web": 1}}, "a weight for each of the tables web, code, books"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mixed(**options)


def test_tables_that_do_not_go_together_are_refused() -> None:
    def mix(a: Table, b: Table) -> MixedLoader:
        return MixedLoader({"a": a, "b": b}, 2, weights={"a": 1, "b": 1})

    numbers, lists = Table({"x": [1, 2]}), Table({"x": [[1], [2]]})
    with pytest.raises(DataError, match=r"Tables 'a' and 'b' differ.*x: int64; x: list<item: int64>"):
        mix(numbers, lists)
    with pytest.raises(DataError, match="x: int64; y: int64"):
        mix(numbers, Table({"y": [1]}))
    with pytest.raises(DataError, match=r"in sequences of 4; .*in sequences of 8"):
        mix(lists.pack(4), lists.pack(8))
    with pytest.raises(DataError, match=r"Table 'b'.*has no rows"):
        mix(numbers, Table(pa.table({"x": pa.array([], pa.int64())})))
    with pytest.raises(DataError, match="'table_ids' has the name of a value that mixing adds"):
        mix(Table({"table_ids": [1]}), Table({"table_ids": [1]}))
    with pytest.raises(DataError, match="images of different sizes"):
        mix(Table({"image": [png(1)]}), Table({"image": [png(1, 9, 9)]}))
    with pytest.raises(ConfigError, match="expected tables by name"):
        MixedLoader([numbers], 2, weights={"a": 1})  # type: ignore[arg-type]
    assert len(mix(numbers, Table(pa.table({"x": pa.array([1], pa.uint8())})))) == 2
