"""A packed table hands out sequences of whole documents, in an order that resumes like any other."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data import Loader, PackedTable, Table
from footplate.data.order.packing import plan_packing
from footplate.data.packing.source import PackedSource
from footplate.distributed.world import World

SIZE = 16


def documents(count: int = 300, seed: int = 0) -> list[list[int]]:
    """Documents of 0 to 40 tokens. The first token of each is a number of its own."""
    rng = np.random.default_rng(seed)
    return [[1000 + n, *rng.integers(1, 1000, rng.integers(0, 40)).tolist()] for n in range(count)]


def columns(texts: list[list[int]]) -> pa.Table:
    return pa.table({"tokens": pa.array(texts, pa.list_(pa.int32()))})


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """300 documents in three files of small row groups."""
    for part in range(3):
        path = tmp_path / "documents" / f"{part}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(columns(documents()[100 * part : 100 * (part + 1)]), path, row_group_size=30)
    return str(tmp_path / "documents")


def unpacked(batch: dict[str, torch.Tensor], column: str = "tokens") -> list[list[Any]]:
    """The pieces of documents in a batch, sequence by sequence."""
    pieces = []
    for values, ids in zip(batch[column], batch["document_ids"], strict=True):
        pieces += [values[ids == number].tolist() for number in range(1, int(ids.max()) + 1)]
    return pieces


def pieces_of(table: PackedTable, unit: int) -> list[list[int]]:
    return [piece for sequence in table.read_group(unit)["tokens"].to_pylist() for piece in sequence]


def cut(texts: list[list[int]]) -> list[list[int]]:
    """The pieces of documents, in the order of the table."""
    return [text[start : start + SIZE] for text in texts for start in range(0, len(text), SIZE)]


def in_streams(table: Table, batch_size: int, world: World) -> Loader:
    """A loader with the streams and windows of a large table."""
    loader = Loader(table, batch_size, shuffle=True, seed=2, world=world)
    loader._streams, loader._window = 4, 1
    return loader


def test_an_epoch_has_every_token_of_every_document_once(parquet: str) -> None:
    table = Table(parquet).pack(SIZE)
    loader = Loader(table, 8, shuffle=True)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted(piece for batch in batches for piece in unpacked(batch)) == sorted(cut(documents()))
    assert {tuple(batch["tokens"].shape) for batch in batches[:-1]} == {(8, SIZE)}


def test_ids_tell_documents_places_and_padding() -> None:
    table = Table(columns([[1, 2, 3], [], [4, 5], [6, 7, 8, 9, 10]])).pack(4, padding_value=-1)
    batch = next(iter(Loader(table, 8)))
    assert batch["tokens"].tolist() == [[1, 2, 3, 10], [4, 5, -1, -1], [6, 7, 8, 9]]
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=40) | st.lists(st.integers(500, 900), min_size=1, max_size=6),
    st.sampled_from([5, 600]),
    st.integers(1, 7),
    st.booleans(),
)
def test_a_batch_is_what_its_documents_are_token_by_token(
    lengths: list[int], size: int, batch_size: int, shuffle: bool
) -> None:
    ends = np.cumsum(lengths)
    texts = [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths, strict=True)]
    plan = plan_packing(np.array(lengths), size)
    rows = []
    for first, last in pairwise(plan.first_piece.tolist()):
        row: list[list[int]] = []
        for number, piece in enumerate(range(first, last), 1):
            start, length = int(plan.start[piece]), int(plan.length[piece])
            pieces = texts[plan.document[piece]][start : start + length]
            row += [[token, number, place] for place, token in enumerate(pieces)]
        rows.append(row + [[0, 0, place] for place in range(size - len(row))])

    table = Table(columns(texts)).pack(size)
    loader = Loader(table, batch_size, shuffle=shuffle) if table.num_rows else []
    batches = [
        torch.stack([batch[name] for name in ("tokens", "document_ids", "position_ids")], -1).tolist()
        for batch in loader
    ]
    made = [row for batch in batches for row in batch]
    assert (sorted(made) if shuffle else made) == (sorted(rows) if shuffle else rows)


def test_truncation_leaves_out_the_rest_of_a_document() -> None:
    table = Table(columns([[6, 7, 8, 9, 10], [1, 2]])).pack(4, truncate=True)
    assert next(iter(Loader(table, 8)))["tokens"].tolist() == [[6, 7, 8, 9], [1, 2, 0, 0]]


@pytest.mark.parametrize("kind", [pa.uint16(), pa.int64(), pa.float32(), pa.bool_()])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_lists_of_any_number_are_packed(kind: pa.DataType, make: Any) -> None:
    values = pa.array([[1, 0, 1], None, [1], [0, 0, 0, 1, 1, 1]], make(pa.int64())).cast(make(kind))
    batch = next(iter(Loader(Table(pa.table({"values": values})).pack(3), 8)))
    assert unpacked(batch, "values") == [[1, 0, 1], [1], [0, 0, 0], [1, 1, 1]]
    assert batch["values"].dtype == {pa.float32(): torch.float32, pa.bool_(): torch.bool}.get(kind, torch.int64)


def test_a_loader_of_sequences_goes_on_after_any_batch(parquet: str) -> None:
    table = Table(parquet).pack(SIZE)
    whole = [batch["tokens"].tolist() for batch in in_streams(table, 8, World(0, 1))]
    loader = in_streams(table, 8, World(0, 1))
    for done, _ in enumerate(loader, 1):
        fresh = Loader(Table(parquet).pack(SIZE), 8, shuffle=True, seed=2)
        fresh.load_state_dict(loader.state_dict())
        if done < len(whole):
            assert [batch["tokens"].tolist() for batch in fresh] == whole[done:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_global_batches_are_the_same_sequences_on_any_number_of_ranks(parquet: str, ranks: int) -> None:
    table = Table(parquet).pack(SIZE)
    alone = [batch["tokens"].tolist() for batch in in_streams(table, 12, World(0, 1))]
    loaders = [in_streams(table, 12 // ranks, World(rank, ranks)) for rank in range(ranks)]
    shares = [[batch["tokens"].tolist() for batch in loader] for loader in loaders]
    assert [[row for share in parts for row in share] for parts in zip(*shares, strict=True)] == alone


def test_deleted_and_filtered_documents_are_not_packed(tmp_path: Path) -> None:
    texts = documents(100)
    rows = columns(texts).append_column("id", pa.array(range(100)))
    write_deltalake(tmp_path / "lake", rows)
    DeltaTable(tmp_path / "lake").delete("id < 10")
    table = Table(tmp_path / "lake", columns=["tokens"], filter=[("id", "!=", 50)]).pack(SIZE)
    kept = texts[10:50] + texts[51:]
    assert sorted(piece for batch in Loader(table, 8) for piece in unpacked(batch)) == sorted(cut(kept))


def test_columns_are_packed_alike_each_with_its_own_padding() -> None:
    rows = pa.table({"input_ids": [[1, 2, 3], [4, 5, 6, 7, 8]], "labels": [[-100, 2, 3], [4, 5, 6, 7, 8]]})
    table = Table(rows).pack(4, padding_value={"input_ids": 9, "labels": -100})
    batch = next(iter(Loader(table, 2)))
    assert list(batch) == ["input_ids", "labels", "document_ids", "position_ids"]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 8], [4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 8], [4, 5, 6, 7]]
    only = table.select(["labels"])
    assert next(iter(Loader(only, 2)))["labels"].tolist() == batch["labels"].tolist()


def test_columns_of_different_lengths_are_an_error_that_names_the_row() -> None:
    rows = pa.table({"a": [[1, 2], [3]], "b": [[1, 2], [3, 4]]})
    table = Table(rows).pack(4, padding_value={"a": 0, "b": 0})
    with pytest.raises(DataError, match=r"row group 0, row 1: column 'a' has 1 items and column 'b' has 2"):
        list(Loader(table, 2))


def test_a_null_within_a_document_is_an_error() -> None:
    table = Table(columns([[1, None, 2]])).pack(4)  # type: ignore[list-item]
    with pytest.raises(DataError, match="Column 'tokens' has nulls within its lists"):
        list(Loader(table, 2))


def test_a_transform_gets_sequences(parquet: str) -> None:
    def counted(row: dict[str, Any]) -> dict[str, Any]:
        return {"documents": int(row["document_ids"].max()), "first": row["tokens"][0]}

    batch = next(iter(Loader(Table(parquet).pack(SIZE), 8, transform=counted)))
    assert batch["documents"].shape == batch["first"].shape == (8,)


def test_documents_of_a_sequence_are_named(parquet: str) -> None:
    table = Table(parquet).pack(SIZE)
    batches = list(in_streams(table, 8, World(0, 1)))
    plan = in_streams(table, 8, World(0, 1))._plan(0)
    for number, batch in enumerate(batches):
        addresses = table.addresses(plan.rows(number))
        pieces = [
            pq.read_table(address.file)["tokens"][address.row_in_file].as_py()[address.start : address.stop]  # type: ignore[attr-defined]
            for address in addresses
        ]
        assert pieces == unpacked(batch)
    assert [address.sequence for address in table.addresses(np.array([[0, 4], [0, 2]]))][-1] == 1  # type: ignore[attr-defined]


def test_documents_of_several_ranks_are_named_from_one_read_of_their_unit(parquet: str, tmp_path: Path) -> None:
    table = Table(parquet).pack(SIZE)
    ranks = np.array([[0, 0], [0, 1]]), np.array([[0, 2], [0, 3]])
    expected = [Table(parquet).pack(SIZE).addresses(rows) for rows in ranks]
    first = table.addresses(ranks[0])
    assert pickle.loads(pickle.dumps(table)).addresses(ranks[0]) == first
    for file in Path(parquet).glob("*.parquet"):
        file.rename(tmp_path / file.name)
    assert [first, table.addresses(ranks[1])] == expected


def test_a_record_opens_the_same_sequences_again(parquet: str) -> None:
    table = (
        Table(parquet, filter=None).split({"train": 0.5}, seed=3)["train"].pack(SIZE, truncate=True, padding_value=7)
    )
    again = Table.reopen(table.record())
    assert isinstance(again, PackedTable)
    assert again.digest == table.digest
    assert [b["tokens"].tolist() for b in Loader(again, 4)] == [b["tokens"].tolist() for b in Loader(table, 4)]


def test_a_state_of_another_packing_is_refused(parquet: str) -> None:
    state = Loader(Table(parquet).pack(SIZE), 8).state_dict()
    for other in (Table(parquet).pack(SIZE, truncate=True), Table(parquet).pack(2 * SIZE), Table(parquet)):
        with pytest.raises(CheckpointError, match="use the same filter, split and packing"):
            Loader(other, 8).load_state_dict(state)
    Loader(Table(parquet).pack(SIZE), 8).load_state_dict(state)


def test_cached_counts_spare_reading_the_documents(parquet: str, tmp_path: Path) -> None:
    counted = Table(parquet).pack(SIZE, cache=tmp_path / "cache").num_rows
    again = Table(parquet).pack(SIZE, cache=tmp_path / "cache")
    for file in Path(parquet).glob("*.parquet"):
        file.rename(tmp_path / file.name)
    assert again.num_rows == counted


def test_counts_travel_with_a_pickled_table(parquet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(parquet).pack(SIZE)
    counted = table.num_rows
    again = pickle.loads(pickle.dumps(table))
    # So that counting again would fail.
    monkeypatch.delattr(PackedSource, "plan")
    assert again.num_rows == counted


def test_wrong_counts_in_a_cache_are_an_error(parquet: str, tmp_path: Path) -> None:
    list(Loader(Table(parquet).pack(SIZE, cache=tmp_path), 8))
    (file,) = tmp_path.glob("sequences-*.npy")
    np.save(file, np.load(file) + 1)
    with pytest.raises(DataError, match=r"make \d+ sequences, and made \d+ when they were counted.*empty cache="):
        list(Loader(Table(parquet).pack(SIZE, cache=tmp_path), 8))


def test_a_damaged_cache_is_written_again(parquet: str, tmp_path: Path) -> None:
    counted = Table(parquet).pack(SIZE, cache=tmp_path).num_rows
    (file,) = tmp_path.glob("sequences-*.npy")
    for damaged in (file.read_bytes()[:-5], b""):
        file.write_bytes(damaged)
        assert Table(parquet).pack(SIZE, cache=tmp_path).num_rows == counted
        assert np.load(file).sum() == counted


def test_row_groups_without_selected_documents_are_packed_as_nothing(tmp_path: Path) -> None:
    rows = columns(documents(100)).append_column("id", pa.array(range(100)))
    pq.write_table(rows, tmp_path / "documents.parquet", row_group_size=10)
    for condition, first in ((("id", ">=", 95), 95), (("id", "<", 0), 100)):
        table = Table(tmp_path / "documents.parquet", columns=["tokens"], filter=[condition]).pack(SIZE)
        expected = sorted(cut(documents(100)[first:]))
        assert sorted(piece for unit in range(len(table.row_groups)) for piece in pieces_of(table, unit)) == expected


def test_other_documents_have_counts_of_their_own_in_a_cache(parquet: str, tmp_path: Path) -> None:
    every = Table(parquet)
    for table in (every, every.split({"a": 0.5})["a"], Table(parquet, filter=None)):
        for packed in (table.pack(SIZE, cache=tmp_path), table.pack(SIZE, cache=tmp_path, truncate=True)):
            assert packed.num_rows == table.pack(SIZE, truncate=packed.packing.truncate).num_rows
    assert len([*tmp_path.glob("sequences-*.npy")]) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sequence_length": 0}, "sequence_length=0: expected an integer of at least 1"),
        ({"sequence_length": True}, "sequence_length=True"),
        ({"sequence_length": 8, "cache": "s3://lake/cache"}, "cache='s3://lake/cache': expected a directory"),
        ({"sequence_length": 8, "padding_value": {"text": 0}}, "one value for each of the columns tokens; got 'text'"),
        ({"sequence_length": 8, "padding_value": "0"}, "padding_value='0' for column 'tokens': expected a number"),
        (
            {"sequence_length": 8, "padding_value": 0.5},
            "padding_value=0.5 for column 'tokens' of int32: expected an int",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Table(columns([[1]])).pack(**options)


@pytest.mark.parametrize("value", [2, -100, 0.5])
def test_booleans_are_padded_with_0_or_1(value: float) -> None:
    table = Table({"mask": [[True]]})
    assert next(iter(Loader(table.pack(2, padding_value=1), 1)))["mask"].tolist() == [[True, True]]
    with pytest.raises(ConfigError, match=f"padding_value={value} for column 'mask' of bool: expected 0 or 1"):
        table.pack(2, padding_value=value)


def test_several_columns_need_a_padding_value_each() -> None:
    with pytest.raises(ConfigError, match=r"one value for each of the columns a, b; got 0.*padded with -100"):
        Table({"a": [[1]], "b": [[1]]}).pack(4)


def test_tables_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(DataError, match=r"column 'text' is string, and only lists of numbers.*columns=.*Table.map"):
        Table({"text": ["a"]}).pack(4)
    with pytest.raises(DataError, match="'position_ids' has the name of a value that packing adds"):
        Table({"tokens": [[1]], "position_ids": [[1]]}).pack(4)
    packed = Table(columns([[1]])).pack(4)
    with pytest.raises(ConfigError, match="Split the documents"):
        packed.split({"train": 0.5})
    with pytest.raises(ConfigError, match="packed already, into sequences of 4"):
        packed.pack(8)


def test_a_table_of_empty_documents_has_no_sequences() -> None:
    table = Table(columns([[], []])).pack(4)
    assert table.num_rows == 0
    with pytest.raises(DataError, match="no rows"):
        Loader(table, 1)
