"""A digest is equal for equal rows, and differs after every change that docs/explanation/digests.md promises to notice."""

from __future__ import annotations

import datetime
import decimal
import fcntl
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import CheckpointError
from footplate.core.hashing import hashed
from footplate.data import FileCache, Loader, Table
from footplate.data.pipeline.decoded_cache import CachedImages
from footplate.data.pipeline.images import ImageFormat
from footplate.data.remote.filesystem import wrap
from footplate.data.sources.value_hash import hash_table

from .conftest import image_rows, png
from .test_files import example, write_records

FLOATS = st.floats(width=32, allow_nan=False).map(lambda x: x + 0.0)  # 0.0 and -0.0 are equal, their bytes aren't

COLUMNS = {
    pa.int16(): st.integers(-5, 5),
    pa.float64(): FLOATS,
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=3),
    pa.large_binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.decimal128(9, 2): st.integers(-99, 99).map(lambda n: decimal.Decimal(n) / 4),
    pa.timestamp("us"): st.datetimes(datetime.datetime(2000, 1, 1), datetime.datetime(2030, 1, 1)),
    pa.list_(pa.int32()): st.lists(st.none() | st.integers(0, 3), max_size=3),
    pa.list_(pa.float32(), 2): st.lists(FLOATS, min_size=2, max_size=2),
    pa.struct([("a", pa.int8()), ("b", pa.string())]): st.fixed_dictionaries(
        {"a": st.none() | st.integers(0, 3), "b": st.text(max_size=2)}
    ),
    pa.map_(pa.string(), pa.int8()): st.lists(st.tuples(st.text(max_size=1), st.integers(0, 3)), max_size=2),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["x", "y", "z"]),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.DataType, list[Any]]:
    kind = draw(st.sampled_from(list(COLUMNS)))
    return kind, draw(st.lists(st.none() | COLUMNS[kind], min_size=1, max_size=20))


@given(columns(), st.data())
def test_equal_values_have_one_digest_however_they_lie_in_memory(
    column: tuple[pa.DataType, list[Any]], data: st.DataObject
) -> None:
    kind, values = column
    plain = pa.table({"x": pa.array(values, kind)})
    before, after = (data.draw(st.lists(st.none() | COLUMNS[kind], max_size=9)) for _ in range(2))
    longer = pa.table({"x": pa.array([*before, *values, *after], kind)})
    cut = data.draw(st.integers(0, len(values)))
    sliced = longer.slice(len(before), len(values))
    pieces = pa.concat_tables([sliced.slice(0, cut), sliced.slice(cut)])
    assert hash_table(sliced) == hash_table(pieces) == hash_table(plain)


@given(columns(), st.data())
def test_another_value_or_order_in_memory_gives_another_digest(
    column: tuple[pa.DataType, list[Any]], data: st.DataObject
) -> None:
    kind, values = column
    table = pa.table({"x": pa.array(values, kind)})
    at = data.draw(st.integers(0, len(values) - 1))
    changed = [*values[:at], data.draw(st.none() | COLUMNS[kind]), *values[at + 1 :]]
    turned = data.draw(st.permutations(values))
    for other in (changed, turned, values[:-1], [*values, None]):
        made = pa.table({"x": pa.array(other, kind)})
        assert (hash_table(made) == hash_table(table)) == (made.to_pylist() == table.to_pylist())
    assert hash_table(table.rename_columns(["y"])) != hash_table(table)


def test_what_stands_in_the_place_of_a_null_does_not_count() -> None:
    def masked(numbers: list[int]) -> pa.Table:
        held = pa.py_buffer(np.array(numbers, np.int32).tobytes())
        return pa.table({"x": pa.Array.from_buffers(pa.int32(), 3, [pa.py_buffer(b"\x05"), held])})

    assert hash_table(masked([1, 2, 3])) == hash_table(masked([1, 9, 3])) != hash_table(masked([1, 2, 4]))


def test_a_change_in_the_middle_of_a_table_in_memory_is_noticed() -> None:
    x = np.arange(200_000)
    changed = x.copy()
    changed[100_000] = -1
    assert Table({"x": x}).fingerprint == Table(pa.table({"x": x})).fingerprint != Table({"x": changed}).fingerprint


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=2, max_size=6), st.data())
def test_another_record_or_order_in_a_tfrecord_file_gives_another_digest(
    tmp_path_factory: pytest.TempPathFactory, values: list[bytes], data: st.DataObject
) -> None:
    def digest(blobs: list[bytes]) -> str:
        folder = tmp_path_factory.mktemp("records")
        return Table(write_records(folder / "a.tfrecord", [example(x=[blob]) for blob in blobs])).fingerprint

    at = data.draw(st.integers(0, len(values) - 1))
    changed = [*values[:at], data.draw(st.binary(min_size=1, max_size=4)), *values[at + 1 :]]
    for other in (values, changed, data.draw(st.permutations(values))):
        assert (digest(other) == digest(values)) == (other == values)


def test_a_delta_table_is_known_by_its_log_and_not_by_where_it_lies(delta: str, tmp_path: Path) -> None:
    table = Table(delta)
    shutil.copytree(delta, tmp_path / "copy")
    assert Table(tmp_path / "copy").digest == table.digest

    write_deltalake(tmp_path / "other", image_rows(0, 50))
    first = Table(tmp_path / "other")
    assert (first.version, first.num_rows) == (0, Table(delta, version=0).num_rows)
    assert first.digest != Table(delta, version=0).digest
    shutil.rmtree(tmp_path / "other")
    write_deltalake(tmp_path / "other", image_rows(0, 50))
    assert Table(tmp_path / "other").digest != first.digest  # deleted, and written again with the same rows


def test_a_commit_that_changes_no_rows_leaves_a_delta_table_as_it_is(delta: str) -> None:
    before = Table(delta)
    DeltaTable(delta).alter.set_table_properties({"delta.appendOnly": "false"})
    after = Table(delta)
    assert (before.version, after.version) == (3, 4)
    assert after.digest == before.digest
    DeltaTable(delta).delete("id = 7")
    assert Table(delta).digest != before.digest


def test_rows_that_were_rewritten_in_place_change_the_digest_of_parquet(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    x, label = numbers.standard_normal(500), numbers.integers(0, 10, 500)
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": x, "label": label}), file, compression="none")
    before = Table(file).digest
    stamp = file.stat().st_mtime_ns
    # Until the clock of the file system has advanced.
    while True:
        pq.write_table(pa.table({"x": x, "label": numbers.permutation(label)}), file, compression="none")
        if file.stat().st_mtime_ns != stamp:
            break
    after = Table(file).digest
    assert after != before
    shutil.copy(file, tmp_path / "copy.parquet")
    (tmp_path / "copy").mkdir()
    shutil.copy(file, tmp_path / "copy" / "a.parquet")
    copied = Table(tmp_path / "copy" / "a.parquet").digest
    assert (copied.content, copied.rows) == (after.content, after.rows)
    assert copied.written != after.written


def test_the_values_of_a_hive_partition_are_part_of_the_digest(tmp_path: Path) -> None:
    for label in (0, 1):
        (tmp_path / "t" / f"label={label}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [label]}), tmp_path / "t" / f"label={label}" / "part.parquet")
    before = Table(tmp_path / "t").digest
    (tmp_path / "t" / "label=1").rename(tmp_path / "t" / "label=2")  # times and footers stay
    assert Table(tmp_path / "t").digest.content != before.content


def test_images_that_were_renamed_or_rewritten_change_the_digest(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "t" / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / f"class{number % 2}" / f"{number}.png").write_bytes(png(number))
    before = Table(tmp_path / "t").digest
    shutil.copytree(tmp_path / "t", tmp_path / "copy")  # with the files' times
    assert Table(tmp_path / "copy").digest == before
    image = tmp_path / "copy" / "class0" / "0.png"
    os.utime(image, ns=(0, image.stat().st_mtime_ns + 1))
    touched = Table(tmp_path / "copy").digest
    assert touched != before
    assert touched.content == before.content
    image.rename(tmp_path / "copy" / "class1" / "0.png")
    assert Table(tmp_path / "copy").digest.content != before.content


def test_a_filter_counts_by_the_rows_that_it_keeps() -> None:
    rows = Table({"x": np.arange(4000)})

    def kept(numbers: list[int]) -> str:
        return Table({"x": np.arange(4000)}, filter=pc.field("x").isin(numbers)).fingerprint

    chosen = list(range(1000))
    assert kept(chosen) != kept(
        [*chosen[:500], 2000, *chosen[501:]]
    )  # their texts are the same: the middle is left out
    assert kept(chosen) == Table({"x": np.arange(4000)}, filter=[("x", "<", 1000)]).fingerprint
    assert Table({"x": np.arange(4000)}, filter=[("x", ">=", 0)]).fingerprint == rows.fingerprint
    one, other = (rows.split({"a": 0.5}, seed=seed)["a"] for seed in (1, 2))
    assert one.fingerprint != other.fingerprint


def test_a_place_in_another_table_is_refused_with_the_names_of_both(delta: str, tmp_path: Path) -> None:
    state = Loader(Table(delta), 10, image_size=8).state_dict()
    other = str(tmp_path / "other")
    for start in range(0, 200, 50):
        write_deltalake(other, image_rows(start, start + 50), mode="append")
    with pytest.raises(
        CheckpointError, match=rf"made on other rows: on {delta}: delta version 3 .* this run has {other}"
    ):
        Loader(Table(other), 10, image_size=8).load_state_dict(state)
    with pytest.raises(CheckpointError, match="use the same filter, split and packing"):
        Loader(Table(delta, filter=[("id", "<", 90)]), 10, image_size=8).load_state_dict(state)
    with pytest.raises(CheckpointError, match="Give the delta source"):
        Loader(Table(image_rows(0, 200)), 10, image_size=8).load_state_dict(state)
    shutil.move(delta, tmp_path / "moved")
    moved = Loader(Table(tmp_path / "moved"), 10, image_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.load_state_dict(state)


def test_a_copy_of_plain_files_is_resumed_with_a_warning(parquet: str, tmp_path: Path) -> None:
    state = Loader(Table(parquet), 10).state_dict()
    shutil.copytree(parquet, tmp_path / "copy", copy_function=shutil.copy)
    with pytest.warns(UserWarning, match=r"written at other times .* If they were rewritten"):
        Loader(Table(tmp_path / "copy"), 10).load_state_dict(state)
    pq.write_table(pq.read_table(f"{parquet}/part-0.parquet").slice(1), f"{parquet}/part-0.parquet")
    with pytest.raises(CheckpointError, match="Give the same files"):
        Loader(Table(parquet), 10).load_state_dict(state)


def test_a_checkpoint_with_the_fingerprint_of_an_earlier_version_is_taken_with_a_warning(delta: str) -> None:
    loader = Loader(Table(delta), 10, image_size=8)
    state = {**loader.state_dict(), "table": "delta-3-0123456789ab"}
    with pytest.warns(UserWarning, match=r"earlier version of Footplate, .*delta-3-0123456789ab"):
        loader.load_state_dict(state)
    for fingerprint in ("delta-2-0123456789ab", "parquet-0123456789abcdef-0123456789ab"):
        with pytest.raises(CheckpointError, match=f"its table is {fingerprint}"):
            loader.load_state_dict({**state, "table": fingerprint})


def test_two_tables_that_look_alike_have_caches_of_their_own(tmp_path: Path) -> None:
    def pixels(grey: int) -> set[float]:
        rows = pa.table({"image": pa.array([png(grey)] * 20, pa.binary()), "label": [0] * 20})
        write_deltalake(tmp_path / "t", rows)
        batches = list(Loader(Table(tmp_path / "t"), 10, image_size=8, cache=tmp_path / "cache"))
        # The next table is written at the same path.
        shutil.rmtree(tmp_path / "t")
        return {float(batch["image"].float().mean()) for batch in batches}

    assert [pixels(grey) for grey in (10, 200)] == [{10.0}, {200.0}]


def test_a_complete_cache_gets_its_name_under_its_lock(tmp_path: Path) -> None:
    filling, complete = tmp_path / "key.boot-1", tmp_path / "key"
    filling.mkdir()
    (filling / "pixels").write_bytes(bytes(4))
    (filling / "state").write_bytes(b"\x01")
    images = CachedImages(filling, complete, (1, 2, 2), ImageFormat(1, (2, 2)))
    with (tmp_path / "key.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = set(threading.enumerate())
        assert images.is_complete()
        (sealing,) = [thread for thread in set(threading.enumerate()) - others if thread.name == "footplate-seal"]
        sealing.join(0.2)
        # A process that holds the lock is about to open it under this name.
        assert filling.exists()
    sealing.join()
    assert complete.exists()
    assert not filling.exists()


def test_two_services_with_a_bucket_of_one_name_share_no_blocks(tmp_path: Path) -> None:
    def read(service: str) -> bytes:
        inner = pafs.SubTreeFileSystem(str(tmp_path / service), pafs.LocalFileSystem())
        return wrap(inner, FileCache(tmp_path / "cache"), service).open_input_file("file").read()

    for service in ("one", "two"):
        (tmp_path / service).mkdir()
        (tmp_path / service / "file").write_text(service)
        os.utime(tmp_path / service / "file", ns=(0, 0))
    assert [read("one"), read("two")] == [b"one", b"two"]


def test_a_hash_sees_every_element_and_no_address() -> None:
    numbers = np.arange(5000)
    changed = numbers.copy()
    changed[2500] = -1
    assert repr(numbers) == repr(changed)
    assert hashed(numbers) != hashed(changed)
    assert hashed([torch.from_numpy(numbers)]) != hashed([torch.from_numpy(changed)])
    assert hashed(torch.zeros(2, 3)) != hashed(torch.zeros(3, 2)) != hashed(torch.zeros(3, 2, dtype=torch.int32))
    assert hashed(object()) == hashed(object())
    assert hashed(["ab", "c"]) != hashed(["a", "bc"]) != hashed([["a"], "bc"])
    assert hashed([1, 2], [3]) != hashed([1], [2, 3])
    assert hashed(np.zeros(2, [("x", "<i4"), ("y", "<i4")])) != hashed(np.zeros(2, [("y", "<i4"), ("x", "<i4")]))
    assert hashed(torch.tensor([1 + 1j])) != hashed(torch.tensor([1 + 1j]).conj()) == hashed(torch.tensor([1 - 1j]))
    assert hashed(list(range(9))) == hashed([np.int64(number) for number in range(9)])
