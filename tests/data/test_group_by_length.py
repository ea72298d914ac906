"""`Loader(group_by_length=…)` puts rows of similar length into a batch, and keeps all else that a loader promises."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data import Loader, Table
from footplate.data.lengths import RowLengths
from footplate.distributed.world import World
from footplate.training.table_datamodule import TableDataModule

from .conftest import image_rows

ROWS = 600


def documents(rows: int = ROWS, seed: int = 0) -> pa.Table:
    """Documents of 0 to 80 tokens. Those with a number that 50 divides are null."""
    rng = np.random.default_rng(seed)
    tokens = [None if n % 50 == 0 else rng.integers(1, 1000, rng.integers(0, 80)).tolist() for n in range(rows)]
    lengths = [len(document or ()) for document in tokens]
    columns = {"id": pa.array(range(rows)), "tokens": pa.array(tokens, pa.list_(pa.int32())), "length": lengths}
    texts = [None if document is None else "é" * len(document) for document in tokens]
    return pa.table({**columns, "text": texts, "raw": [text and text.encode()[::2] for text in texts]})


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """The documents in three files of small row groups."""
    (tmp_path / "documents").mkdir()
    for part in range(3):
        rows = documents().slice(part * ROWS // 3, ROWS // 3)
        pq.write_table(rows, tmp_path / "documents" / f"{part}.parquet", row_group_size=20)
    return str(tmp_path / "documents")


def in_streams(table: Table, batch_size: int, world: World | None = None) -> Loader:
    """A loader with the streams and windows of a large table."""
    loader = Loader(table, batch_size, shuffle=True, seed=2, group_by_length="tokens", world=world or World(0, 1))
    loader._streams, loader._window = 4, 1
    return loader


def ids(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def padding(loader: Loader) -> float:
    """The share of padding in an epoch."""
    batches = list(loader)
    return 1 - sum(int(b["tokens_length"].sum()) for b in batches) / sum(b["tokens"].numel() for b in batches)


def test_little_of_a_batch_is_padding(parquet: str) -> None:
    table = Table(parquet)
    assert padding(Loader(table, 8, shuffle=True)) > 0.4
    assert padding(Loader(table, 8, shuffle=True, group_by_length="tokens")) < 0.1


def test_an_epoch_has_every_row_once_in_another_order_each_time(parquet: str) -> None:
    loader = Loader(Table(parquet), 8, shuffle=True, group_by_length="tokens")
    epochs = [ids(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for batches in epochs:
        assert len(batches) == len(loader)
        assert sorted(row for batch in batches for row in batch) == list(range(ROWS))


def test_the_values_of_a_row_stay_together(parquet: str) -> None:
    given = documents().to_pylist()
    for batch in in_streams(Table(parquet), 8):
        for row, number in enumerate(batch["id"].tolist()):
            length = int(batch["tokens_length"][row])
            assert batch["tokens"][row, :length].tolist() == (given[number]["tokens"] or [])
            assert length == batch["length"][row] == given[number]["length"]
            assert batch["text"][row] == given[number]["text"]


@pytest.mark.parametrize("column", ["tokens", "length", "text", "raw"])
def test_lists_texts_bytes_and_counted_lengths_group_alike(parquet: str, column: str) -> None:
    expected = [len(row["tokens"] or ()) for row in documents().to_pylist()]
    assert RowLengths(Table(parquet), column).values.tolist() == expected
    loader = Loader(Table(parquet, columns=["id", "tokens"]), 8, shuffle=True, group_by_length=column)
    assert ids(loader) == ids(Loader(Table(parquet), 8, shuffle=True, group_by_length="tokens"))


@pytest.mark.parametrize("kind", [pa.large_list(pa.int8()), pa.list_(pa.string())])
def test_any_list_has_a_length(kind: pa.DataType) -> None:
    table = pa.table({"values": pa.array([[], [1, 2], None, [3]], pa.list_(pa.int64())).cast(kind)})
    assert RowLengths(Table(table), "values").values.tolist() == [0, 2, 0, 1]


def test_lengths_are_those_of_the_selected_rows_and_take_four_bytes_a_row(parquet: str) -> None:
    table = Table(parquet, filter=[("length", ">", 30)]).split({"train": 0.5}, seed=1)["train"]
    loader = Loader(table, 8, shuffle=True, group_by_length="tokens")
    lengths = RowLengths(table, "tokens").values
    assert lengths.nbytes == 4 * table.num_rows
    handed_out = [length for batch in loader for length in batch["tokens_length"].tolist()]
    assert sorted(lengths.tolist()) == sorted(handed_out)
    assert min(handed_out) > 30


def test_the_first_batch_of_the_first_epoch_has_the_longest_row(parquet: str) -> None:
    loader = in_streams(Table(parquet), 8)
    longest = int(np.argmax(documents()["length"].to_numpy()))
    assert longest in ids(loader)[0]
    assert longest not in ids(loader)[0]


@pytest.mark.parametrize("rows", [ROWS, 597])
def test_a_run_continues_after_any_batch_also_on_another_number_of_ranks(parquet: str, rows: int) -> None:
    table = Table(parquet, filter=[("id", "<", rows)])
    whole = ids(in_streams(table, 24))
    for done in range(0, len(whole), 3):
        before = in_streams(table, 24)
        iterator = iter(before)
        assert ids(islice(iterator, done)) == whole[:done]
        iterator.close()
        loaders = [in_streams(Table(parquet, filter=[("id", "<", rows)]), 8, World(rank, 3)) for rank in range(3)]
        for loader in loaders:
            loader.load_state_dict(before.state_dict())
        shares = [ids(loader) for loader in loaders]
        assert [[row for share in parts for row in share] for parts in zip(*shares, strict=True)] == whole[done:]


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_have_as_many_batches_and_rows_of_similar_length(parquet: str, ranks: int) -> None:
    loaders = [in_streams(Table(parquet), 10, World(rank, ranks)) for rank in range(ranks)]
    lengths = [[batch["tokens_length"].float().mean() for batch in loader] for loader in loaders]
    assert {len(of_rank) for of_rank in lengths} == {len(loaders[0])}
    differences = torch.tensor(lengths).amax(0) - torch.tensor(lengths).amin(0)
    # Lengths are up to 80. The last batch is smaller, and isn't grouped.
    assert differences[:-1].max() < 12


def test_unreadable_rows_are_left_out_and_counted_as_without_grouping(tmp_path: Path) -> None:
    table = documents().append_column("label", pa.array([None if n % 7 == 0 else n for n in range(ROWS)]))
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=20)
    loader = Loader(Table(tmp_path / "t.parquet"), 8, shuffle=True, group_by_length="tokens", on_error="skip")
    assert sorted(row for batch in ids(loader) for row in batch) == [n for n in range(ROWS) if n % 7]
    assert loader.skipped == len(range(0, ROWS, 7))


def test_a_transform_gets_rows_of_similar_length(parquet: str) -> None:
    def shortened(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "size": len(row["tokens"])}

    loader = Loader(Table(parquet), 8, shuffle=True, group_by_length="tokens", transform=shortened)
    spread = [int(batch["size"].max() - batch["size"].min()) for batch in loader]
    assert np.mean(spread) < 10


def test_images_beside_the_text_are_those_of_their_rows(tmp_path: Path) -> None:
    rows = image_rows(0, 200).append_column("caption", pa.array(["x" * (n * 37 % 90) for n in range(200)]))
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=10)
    loader = Loader(Table(tmp_path / "t.parquet"), 4, shuffle=True, group_by_length="caption", image_size=8)
    loader._streams, loader._window, loader._window_rows = 2, 2, 7
    for _ in range(2):
        batches = list(loader)
        assert sorted(row for batch in batches for row in batch["id"].tolist()) == list(range(200))
        assert all(batch["image"][:, 0, 0, 0].tolist() == batch["id"].tolist() for batch in batches)


def test_a_cache_spares_reading_the_lengths_again(
    parquet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = RowLengths(Table(parquet), "tokens", tmp_path / "cache")
    counted = lengths.values.tolist()
    # So that reading again would fail.
    monkeypatch.delattr(RowLengths, "_read")
    again = RowLengths(Table(parquet), "tokens", tmp_path / "cache")
    travelled = pickle.loads(pickle.dumps(lengths))
    assert again.values.tolist() == travelled.values.tolist() == counted


def test_each_selection_and_column_has_lengths_of_its_own_in_a_cache(parquet: str, tmp_path: Path) -> None:
    for table in (Table(parquet), Table(parquet, filter=[("id", "<", 100)])):
        for column in ("tokens", "raw"):
            cached = RowLengths(table, column, tmp_path / "cache").values
            assert cached.tolist() == RowLengths(table, column).values.tolist()
    assert len([*(tmp_path / "cache").iterdir()]) == 4


def test_lengths_on_a_network_are_asked_for_together(parquet: str) -> None:
    class FarTable(Table):
        """A table whose server answers when sixteen row groups have been asked for."""

        is_remote = True

        def read_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
            asked.wait()
            return super().read_group(group, columns)

    asked = threading.Barrier(16, timeout=60)
    assert len(RowLengths(FarTable(parquet, filter=[("id", "<", 16 * 20)]), "length").values) == 16 * 20


def test_a_damaged_cache_is_written_again(parquet: str, tmp_path: Path) -> None:
    counted = RowLengths(Table(parquet), "tokens", tmp_path / "cache").values.tolist()
    (file,) = (tmp_path / "cache").iterdir()
    for damaged in (file.read_bytes()[:-5], b""):
        file.write_bytes(damaged)
        assert RowLengths(Table(parquet), "tokens", tmp_path / "cache").values.tolist() == counted
        assert np.load(file).tolist() == counted


def test_a_data_module_groups_the_rows_to_train_on_and_keeps_the_order_of_the_others(
    parquet: str, tmp_path: Path
) -> None:
    split = {"train": 0.8, "val": 0.2}
    data = TableDataModule(parquet, batch_size=8, split=split, group_by_length="tokens", cache=tmp_path / "cache")
    training, validation = data.train_dataloader(), data.val_dataloader()
    assert training is not None
    assert validation is not None
    assert padding(training) < 0.15
    in_order = [row for batch in ids(validation) for row in batch]
    assert in_order == sorted(in_order)


@pytest.mark.parametrize(("saved", "own"), [(None, "tokens"), ("tokens", None), ("tokens", "length")])
def test_a_state_of_another_grouping_is_refused(parquet: str, saved: str | None, own: str | None) -> None:
    state = Loader(Table(parquet), 8, shuffle=True, group_by_length=saved).state_dict()
    with pytest.raises(CheckpointError, match=f"made with group_by_length={saved!r}, not {own!r}"):
        Loader(Table(parquet), 8, shuffle=True, group_by_length=own).load_state_dict(state)


def test_a_run_continues_with_its_megabatches_although_this_version_would_choose_others(parquet: str) -> None:
    before, loader = in_streams(Table(parquet), 8), in_streams(Table(parquet), 8)
    before._megabatch = 3
    whole = ids(before)
    before.set_epoch(0)
    state = {**before.state_dict(), "batch": 20}
    assert ids(loader) != whole
    loader.load_state_dict(state)
    assert ids(loader) == whole[20:]
    assert loader.state_dict()["megabatch"] == 3


def test_a_state_of_an_earlier_version_is_of_a_loader_that_does_not_group(parquet: str) -> None:
    loader = Loader(Table(parquet), 8, shuffle=True)
    added = ("group_by_length", "megabatch", "lengths")
    state = {name: value for name, value in loader.state_dict().items() if name not in added}
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError, match="group_by_length=None, not 'tokens'"):
        Loader(Table(parquet), 8, shuffle=True, group_by_length="tokens").load_state_dict(state)


def test_a_state_of_other_lengths_is_refused_and_ranks_compare_them(parquet: str) -> None:
    loader = Loader(Table(parquet), 8, shuffle=True, group_by_length="tokens")
    state, content = loader.state_dict(), loader.content
    assert loader._lengths is not None
    other = Loader(Table(parquet), 8, shuffle=True, group_by_length="tokens")
    assert other.content == content
    other._lengths = RowLengths(Table(parquet), "tokens")
    other._lengths.values = loader._lengths.values[::-1]
    with pytest.raises(CheckpointError, match=r"made with other lengths in the column 'tokens'.*empty cache="):
        other.load_state_dict(state)
    assert other.content != content


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"shuffle": False},
            ConfigError,
            "shuffle=False keeps it: pass shuffle=True to train, or leave group_by_length=",
        ),
        (
            {"group_by_length": True},
            ConfigError,
            "group_by_length=True: expected the name of a column: one of id, tokens",
        ),
        ({"group_by_length": "score"}, DataError, "is double, whose values have no lengths. Name a column of lists"),
        ({"group_by_length": "pair"}, DataError, "whose values have no lengths"),
        ({"group_by_length": "token"}, DataError, 'Did you mean "tokens"'),
    ],
)
def test_what_has_no_lengths_is_refused_at_once(options: dict[str, Any], error: type[Exception], says: str) -> None:
    pair = pa.array([[1.0, 2.0]] * ROWS, pa.list_(pa.float64(), 2))
    table = documents().append_column("score", pa.array([0.5] * ROWS)).append_column("pair", pair)
    with pytest.raises(error, match=says):
        Loader(Table(table), 8, **{"shuffle": True, "group_by_length": "tokens", **options})


def test_packed_sequences_are_refused_since_they_have_one_length(parquet: str) -> None:
    with pytest.raises(ConfigError, match=r"all have 16 tokens\. Leave group_by_length= out"):
        Loader(Table(parquet, columns=["tokens"]).pack(16), 8, shuffle=True, group_by_length="tokens")


@pytest.mark.parametrize("value", [-1, 2**31])
def test_an_integer_that_is_no_length_is_an_error_with_its_row(value: int) -> None:
    table = Table(pa.table({"length": pa.array([3, value, 5])}))
    with pytest.raises(DataError, match=f"'length': the value in <.*row 1 is {value}, and a length is between 0 and"):
        RowLengths(table, "length").values  # noqa: B018
