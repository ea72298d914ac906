"""The loader hands out every row once, decoded, in a fixed order, and keeps its position."""

from __future__ import annotations

import gc
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake

from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data import Loader, Table
from footplate.distributed.world import World

from .conftest import png


def seen(loader: Loader) -> list[int]:
    return [number for batch in loader for number in batch["id"].tolist()]


def threads_since(before: set[threading.Thread]) -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("footplate-")
    ]


def test_a_batch_holds_decoded_images_labels_and_text(delta: str) -> None:
    batches = list(Loader(Table(delta), 64, shuffle=True))
    assert [len(batch["id"]) for batch in batches] == [64, 64, 64, 8]
    for batch in batches:
        assert list(batch) == ["image", "label", "id", "name"]
        assert batch["image"].dtype == torch.uint8
        assert batch["image"].shape[1:] == (1, 8, 8)
        assert torch.equal(batch["image"][:, 0, 3, 3].long(), batch["id"])
        assert batch["label"].dtype == torch.int64
        assert torch.equal(batch["label"], batch["id"] % 10)
        assert batch["name"] == [f"row {number}" for number in batch["id"].tolist()]


def test_unshuffled_rows_come_in_the_order_of_the_table(parquet: str) -> None:
    batches = list(Loader(Table(parquet), 25))
    assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(103))
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), torch.arange(103) / 2)
    assert batches[0]["even"].dtype == torch.bool


def test_each_epoch_has_an_order_of_its_own_that_comes_again(delta: str) -> None:
    loader = Loader(Table(delta, columns=["id"]), 32, shuffle=True, seed=3)
    first, second = seen(loader), seen(loader)
    assert sorted(first) == sorted(second) == list(range(200))
    assert first != second
    loader.set_epoch(0)
    assert seen(loader) == first
    assert seen(Loader(Table(delta, columns=["id"]), 32, shuffle=True, seed=3, num_threads=1, prefetch=1)) == first
    assert seen(Loader(Table(delta, columns=["id"]), 32, shuffle=True, seed=4)) != first


def test_a_loader_goes_on_after_any_batch(delta: str) -> None:
    table = Table(delta, columns=["id"])
    whole = Loader(table, 30, shuffle=True)
    order = [batch["id"].tolist() for batch in whole] + [batch["id"].tolist() for batch in whole]
    loader = Loader(table, 30, shuffle=True)
    done = 0
    for _ in range(2):
        for _ in loader:
            done += 1
            fresh = Loader(table, 30, shuffle=True)
            fresh.load_state_dict(loader.state_dict())
            rest = [batch["id"].tolist() for _ in range(2) for batch in fresh]
            assert rest[: len(order) - done] == order[done:]
    assert done == len(order)


def test_going_on_reads_nothing_that_was_handed_out_before(parquet: str) -> None:
    table = Table(parquet, columns=["id"])
    loader = Loader(table, 10)
    for _ in islice(loader, 8):
        state = loader.state_dict()
    fresh = Loader(table, 10)
    fresh.load_state_dict(state)
    # The 69 rows of these files have been handed out.
    for part in (0, 1):
        Path(parquet, f"part-{part}.parquet").unlink()
    assert seen(fresh) == list(range(80, 103))


def test_the_state_speaks_of_what_was_handed_out_not_of_what_was_prefetched(delta: str) -> None:
    loader = Loader(Table(delta), 10, prefetch=8)
    iterator = iter(loader)
    assert loader.state_dict()["batch"] == 0
    next(iterator)
    next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 2)


def test_a_new_iterator_begins_the_epoch_anew_unless_a_state_was_loaded(delta: str) -> None:
    loader = Loader(Table(delta), 10)
    assert len(list(islice(loader, 3))) == 3
    assert len(list(loader)) == 20
    loader.load_state_dict({**Loader(Table(delta), 10).state_dict(), "batch": 15})
    loader.set_epoch(0)
    assert len(list(loader)) == 5
    assert len(list(loader)) == 20


def test_a_loader_beside_another_begins_an_epoch_and_leaves_the_others_place_alone(delta: str) -> None:
    loader = Loader(Table(delta), batch_size=4, shuffle=True, seed=3, image_size=8)
    whole = [batch["label"].tolist() for batch in loader.beside()]
    batches = iter(loader)
    begun = [next(batches)["label"].tolist() for _ in range(2)]
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch["label"].tolist() for batch in loader.beside()] == whole
    assert loader.state_dict() == state
    assert begun + [batch["label"].tolist() for batch in loader] == whole


def test_ranks_share_each_global_batch_and_another_number_of_ranks_goes_on_exactly(delta: str) -> None:
    table = Table(delta, columns=["id"])

    def ranks(size: int, batch_size: int) -> list[Loader]:
        return [Loader(table, batch_size, shuffle=True, world=World(rank, size)) for rank in range(size)]

    alone = [set(batch["id"].tolist()) for batch in Loader(table, 48, shuffle=True)]
    four = ranks(4, 12)
    assert {len(loader) for loader in four} == {len(alone)}
    iterators = [iter(loader) for loader in four]
    for batch in range(2):
        rows = [number for iterator in iterators for number in next(iterator)["id"].tolist()]
        assert len(rows) == 48
        assert set(rows) == alone[batch]
    three = ranks(3, 12)
    for loader in three:
        loader.load_state_dict(four[0].state_dict())
    rest = [list(loader) for loader in three]
    for batch in range(len(alone) - 2):
        assert {number for of_rank in rest for number in of_rank[batch]["id"].tolist()} == alone[batch + 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"batch_size": 20}, "batch_size=10"), ({"seed": 5}, "seed=0"), ({"shuffle": False}, "shuffle=True")],
)
def test_a_state_of_another_order_is_refused(delta: str, change: dict[str, Any], says: str) -> None:
    options: dict[str, Any] = {"batch_size": 10, "seed": 0, "shuffle": True}
    state = Loader(Table(delta), **options).state_dict()
    with pytest.raises(CheckpointError, match=says):
        Loader(Table(delta), **{**options, **change}).load_state_dict(state)
    with pytest.raises(CheckpointError, match="made on other rows"):
        Loader(Table(delta, version=1), **options).load_state_dict(state)
    with pytest.raises(CheckpointError, match="no state of a Loader"):
        Loader(Table(delta), **options).load_state_dict({"epoch": 1})


def test_no_thread_outlives_its_iterator(delta: str) -> None:
    # Threads of other tests.
    before = {*threading.enumerate()}
    loader = Loader(Table(delta), 10)
    iterator = iter(loader)
    next(iterator)
    assert threads_since(before)
    iterator.close()  # type: ignore[attr-defined]
    assert not threads_since(before)
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    assert not threads_since(before)
    list(loader)
    assert not threads_since(before)


def test_images_are_scaled_to_cover_and_cut_to_the_centre() -> None:
    wide = np.zeros((20, 40, 3), np.uint8)
    wide[:, 10:30] = (0, 0, 255)
    import cv2

    data = {"image": [cv2.imencode(".png", wide)[1].tobytes(), png(7, 30, 30, 3)]}
    batch = next(iter(Loader(Table(data), 2, image_size=(10, 10))))
    assert batch["image"].shape == (2, 3, 10, 10)
    assert batch["image"][0, :, 5, 5].tolist() == [255, 0, 0]
    assert batch["image"][0, 0].min() == 255
    assert batch["image"][1].unique().tolist() == [7]
    grey = next(iter(Loader(Table(data), 2, image_size=10, image_mode="L")))
    assert grey["image"].shape == (2, 1, 10, 10)


def test_images_of_different_sizes_ask_for_image_size() -> None:
    with pytest.raises(DataError, match=r"differ in size \(9x8 and 8x8\).*image_size="):
        list(Loader(Table({"image": [png(1), png(2, 9, 8)]}), 2))


def test_a_transform_gets_rows_and_a_generator_of_its_own(delta: str) -> None:
    def augment(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"image": row["image"].float(), "id": row["id"], "noise": rng.random(), "text": row["name"]}

    def noises(threads: int, epoch: int) -> dict[int, float]:
        loader = Loader(Table(delta), 32, shuffle=True, transform=augment, num_threads=threads)
        loader.set_epoch(epoch)
        batches = list(loader)
        assert batches[0]["image"].dtype == torch.float32
        assert batches[0]["noise"].dtype == torch.get_default_dtype()
        assert batches[0]["text"][0].startswith("row ")
        return {
            number: noise for b in batches for number, noise in zip(b["id"].tolist(), b["noise"].tolist(), strict=True)
        }

    assert noises(1, 0) == noises(3, 0)
    assert noises(1, 0) != noises(1, 1)
    assert len(set(noises(1, 0).values())) == 200


def test_pinned_batches_are_the_same_batches(delta: str) -> None:
    plain = Loader(Table(delta), 64, shuffle=True)
    pinned = Loader(Table(delta), 64, shuffle=True, pin_memory=True)
    for expected, batch in zip(plain, pinned, strict=True):
        assert torch.equal(expected["image"], batch["image"])
        assert torch.equal(expected["id"], batch["id"])
        assert batch["image"].is_pinned() == batch["id"].is_pinned() == torch.cuda.is_available()


def test_an_error_in_a_transform_names_the_row(delta: str) -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 // (row["id"] - 120)}

    with pytest.raises(ZeroDivisionError) as caught:
        list(Loader(Table(delta), 32, transform=broken))
    assert "row group 0, row 20" in caught.value.__notes__[0]


def test_lists_become_padded_batches_with_their_lengths() -> None:
    table = pa.table({"tokens": pa.array([[1, 2, 3], [], None, [4]], pa.list_(pa.int32()))})
    batch = next(iter(Loader(Table(table), 4)))
    assert batch["tokens"].tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0], [4, 0, 0]]
    assert batch["tokens_length"].tolist() == [3, 0, 0, 1]


def test_all_that_is_no_item_of_a_list_is_zero() -> None:
    rng = np.random.default_rng(0)
    lists = [rng.integers(1, 100, size) for size in rng.integers(0, 40, 4000)]
    table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int32()))})
    number = 0
    for batch in Loader(Table(table), 8):
        for row, length in zip(batch["tokens"], batch["tokens_length"].tolist(), strict=True):
            assert row.tolist() == lists[number].tolist() + [0] * (len(row) - length)
            number += 1
    assert number == 4000


def test_fixed_size_lists_and_other_types() -> None:
    table = pa.table(
        {
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "maybe": pa.array([1.5, None], pa.float64()),
            "day": pa.array([0, 365], pa.date32()),
            "kind": pa.array(["a", None]).dictionary_encode(),
            "raw": pa.array([b"ab", None], pa.binary()),
            "unsigned": pa.array([1, 2], pa.uint8()),
        }
    )
    batch = next(iter(Loader(Table(table), 2, shuffle=True, seed=1)))
    order = [batch["unsigned"].tolist().index(value) for value in (1, 2)]
    assert batch["vector"][order].tolist() == [[1, 2], [3, 4]]
    assert batch["vector"].dtype == torch.float32
    assert batch["maybe"][order].isnan().tolist() == [False, True]
    assert batch["day"][order].tolist() == [0, 365]
    assert [batch["kind"][i] for i in order] == ["a", None]
    assert [batch["raw"][i] for i in order] == [b"ab", None]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.list_(pa.int32(), 2)])
def test_a_null_within_a_list_is_never_taken_for_a_number(kind: pa.DataType) -> None:
    table = Table(pa.table({"tokens": pa.array([[1, 2], [3, None]], kind)}))
    with pytest.raises(DataError, match="Column 'tokens' has nulls within its lists"):
        list(Loader(table, 2))


def test_a_null_list_of_fixed_size_is_a_bad_row() -> None:
    table = Table(pa.table({"vector": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), "id": [0, 1, 2]}))
    with pytest.raises(DataError, match="Column 'vector' is null"):
        list(Loader(table, 3))
    loader = Loader(table, 3, on_error="skip")
    assert next(iter(loader))["vector"].tolist() == [[1, 2], [3, 4]]


def test_images_can_be_left_encoded(delta: str) -> None:
    batch = next(iter(Loader(Table(delta), 4, image_mode="bytes")))
    assert batch["image"] == [png(number) for number in batch["id"].tolist()]


def test_a_column_that_has_no_place_in_a_batch_is_named() -> None:
    with pytest.raises(DataError, match="Column 'nested' is struct"):
        Loader(Table({"nested": [{"a": 1}]}), 1)


def damaged(path: Path, where: int, data: bytes | None) -> str:
    images = [png(number) for number in range(40)]
    images[where] = data  # type: ignore[call-overload]
    write_deltalake(path, pa.table({"image": pa.array(images, pa.binary()), "id": range(40)}))
    return str(path)


@pytest.mark.parametrize("data", [png(1)[:-30], b"\xff\xd8\xff\xe0 no picture", b"", None])
def test_an_undecodable_image_is_named_or_skipped_and_counted(tmp_path: Path, data: bytes | None) -> None:
    table = Table(damaged(tmp_path / "t", 23, data))
    with pytest.raises(DataError, match=r"parquet, row group 0, row 23 can't be decoded.*on_error=\"skip\""):
        list(Loader(table, 8, shuffle=True))
    loader = Loader(table, 8, shuffle=True, on_error="skip")
    assert sorted(seen(loader)) == [number for number in range(40) if number != 23]
    assert loader.skipped == 1
    loader = Loader(table, 8, on_error="skip", transform=lambda row: row)
    assert seen(loader) == [number for number in range(40) if number != 23]


def test_a_null_label_is_found_before_training_or_skipped() -> None:
    data = pa.table({"id": pa.array([1, None, 3], pa.int64()), "x": [1.0, 2.0, None]})
    with pytest.raises(DataError, match="Column 'id' is null in 1 rows"):
        Loader(Table(data), 2)
    loader = Loader(Table(data), 3, on_error="skip")
    assert seen(loader) == [1, 3]
    assert loader.skipped == 1


def test_a_null_label_behind_a_filter_is_named_when_it_is_met(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": pa.array([1, None, 3], pa.int64()), "x": [1, 2, 3]}))
    with pytest.raises(DataError, match=r"Column 'id' is null in .*row group 0, row 1"):
        list(Loader(Table(tmp_path / "t", filter=[("x", ">", 1)]), 2))
    assert seen(Loader(Table(tmp_path / "t", filter=[("x", ">", 2)]), 2)) == [3]


def test_what_can_not_be_is_said_before_anything_is_read(delta: str, tmp_path: Path) -> None:
    table = Table(delta)
    for options in ({"batch_size": 0}, {"seed": -1}, {"on_error": "ignore"}, {"image_size": 0}, {"image_mode": "CMYK"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Loader(table, **{"batch_size": 8, **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transform="):
        Loader(table, 8, transform="flip")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no rows"):
        Loader(Table(delta, filter=[("id", ">", 999)]), 8)
    with pytest.raises(DataError, match="none of the columns id holds images"):
        Loader(Table(delta, columns=["id"]), 8, image_size=32)
    with pytest.raises(DataError, match="200 rows for 300 ranks"):
        len(Loader(table, 8, world=World(0, 300)))
    with pytest.raises(DataError, match="drop_last=True"):
        len(Loader(table, 300, drop_last=True))


def test_skipping_never_hands_out_an_empty_batch(tmp_path: Path) -> None:
    images = [png(1), *[b"\xff\xd8\xff"] * 3]
    write_deltalake(tmp_path / "t", pa.table({"image": pa.array(images, pa.binary())}))
    with pytest.raises(DataError, match="Not one row of a batch can be used"):
        list(Loader(Table(tmp_path / "t"), 2, on_error="skip"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_that_returns_no_row_is_named(num_workers: int) -> None:
    def forgets(row: dict[str, Any]) -> Any:
        return row if row["x"] != 3 else None

    with pytest.raises(DataError, match=r"returned a NoneType for the row <builtins.dict>, row group 0, row 3"):
        list(Loader(Table({"x": range(6)}), 4, transform=forgets, num_workers=num_workers))


@pytest.mark.parametrize(
    ("first", "other"), [(1, None), (1, "one"), (1.5, None), (np.float32(1), [1]), (np.zeros(2), None)]
)
def test_what_does_not_go_together_in_a_batch_is_said(first: Any, other: Any) -> None:
    with pytest.raises(DataError, match=r"'y' as .*, which don't go together"):
        list(Loader(Table({"x": range(4)}), 4, transform=lambda row: {"y": other if row["x"] else first}))


def test_lists_that_pass_through_a_transform_are_padded_as_without_one() -> None:
    table = Table({"tokens": [[1, 2, 3], [4], []], "id": [0, 1, 2]})
    (plain,), (same,) = (list(Loader(table, 3, transform=transform)) for transform in (None, lambda row: row))
    assert plain.keys() == same.keys()
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    (cut,) = Loader(table, 3, transform=lambda row: {"tokens": row["tokens"][:1]})
    assert (cut["tokens"].tolist(), cut["tokens_length"].tolist()) == ([[1], [4], [0]], [1, 1, 0])


def test_a_column_of_lengths_that_is_the_users_own_stays_his() -> None:
    table = Table({"text": ["a", "bb"], "text_length": [1, 2], "x": [0.5, 1.5], "x_length": [3, 4]})
    for transform in (None, lambda row: row):
        (batch,) = Loader(table, 2, transform=transform)
        assert (batch["text"], batch["text_length"].tolist()) == (["a", "bb"], [1, 2])
        assert (batch["x"].tolist(), batch["x_length"].tolist()) == ([0.5, 1.5], [3, 4])
    with pytest.raises(DataError, match="'tokens_length' has the name under which a batch holds the lengths"):
        Loader(Table({"tokens": [[1], [2, 3]], "tokens_length": [7, 8]}), 2)


def test_rows_without_a_null_can_be_asked_for_as_the_error_says() -> None:
    rows = {"label": [1, None, 3], "x": [1, 1, None]}
    with pytest.raises(DataError, match=r'filter=\[\("label", "!=", None\)\]'):
        Loader(Table(rows), 2)
    (batch,) = Loader(Table(rows, columns=["label"], filter=[("label", "!=", None)]), 2)
    assert batch["label"].tolist() == [1, 3]
    assert Table(rows, filter=[[("label", "=", None)], [("x", "==", None)]]).num_rows == 2
    with pytest.raises(DataError, match="null is never true"):
        Table(rows, filter=[("label", "<", None)])


def test_a_null_list_of_lists_of_fixed_size_is_a_bad_row_too() -> None:
    kind = pa.list_(pa.list_(pa.int32(), 2), 1)
    loader = Loader(Table(pa.table({"m": pa.array([[[1, 2]], None, [[3, 4]]], kind)})), 3, on_error="skip")
    assert [batch["m"].tolist() for batch in loader] == [[[[1, 2]], [[3, 4]]]]
    assert loader.skipped == 1


@pytest.mark.parametrize("values", [[1, 2**63], [[1], [2, 2**63]]])
def test_an_integer_beyond_int64_is_an_error_and_not_another_number(values: list[Any]) -> None:
    kind = pa.list_(pa.uint64()) if isinstance(values[0], list) else pa.uint64()
    with pytest.raises(DataError, match="'id' holds 9223372036854775808, which is too large for int64"):
        list(Loader(Table(pa.table({"id": pa.array(values, kind)})), 2))


def test_an_epoch_ends_with_its_last_batch_also_for_who_never_asks_for_more(delta: str) -> None:
    table = Table(delta, columns=["id"])
    whole = Loader(table, 32, shuffle=True)
    epochs = [seen(whole) for _ in range(2)]
    counted = Loader(table, 32, shuffle=True)
    for epoch in epochs:
        assert [row for batch in islice(counted, len(counted)) for row in batch["id"].tolist()] == epoch
    counted.set_epoch(1)
    assert seen(counted) == epochs[1]


def test_after_the_state_of_an_ended_epoch_comes_the_next_one_unless_the_ended_one_is_asked_for(delta: str) -> None:
    table = Table(delta, columns=["id"])
    whole = Loader(table, 32, shuffle=True)
    _, second = seen(whole), seen(whole)
    before = Loader(table, 32, shuffle=True)
    for _ in islice(before, len(before)):
        state = before.state_dict()

    after = Loader(table, 32, shuffle=True)
    after.load_state_dict(state)
    assert seen(after) == second
    after.load_state_dict(state)
    after.set_epoch(0)
    assert seen(after) == []


def test_the_ranks_of_a_process_group_that_somebody_else_made_are_heeded(
    delta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    rows = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        rows += seen(Loader(Table(delta, columns=["id"]), 16, shuffle=True))
    assert sorted(rows) == list(range(200))
