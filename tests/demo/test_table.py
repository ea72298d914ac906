"""The demo's Delta tables: what is shipped, and the script that makes it."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import DataError
from footplate.data import Table
from footplate.demo import LABEL_NAMES, TABLES
from footplate.demo.make_table import draw, make_tables, read_idx
from footplate.training.table_datamodule import TableDataModule

SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int32()), ("label_name", pa.string())])


def read(folder: Path) -> pa.Table:
    return pa.table(DeltaTable(str(folder)).to_pyarrow_table())


@pytest.fixture(scope="module", params=[("train", 1200, 4, 24), ("val", 200, 2, 4)], ids=["train", "val"])
def shipped(request):
    """One shipped table: its folder, its rows, and how many rows of a class, files and row groups it should have."""
    name, *expected = request.param
    return TABLES / name, read(TABLES / name), expected


def test_shipped_tables_hold_every_class_equally_often(shipped):
    _, rows, (per_class, _, _) = shipped
    assert rows.schema.equals(SCHEMA)
    assert np.bincount(rows["label"].to_numpy()).tolist() == [per_class] * 10


def test_shipped_tables_have_several_files_and_row_groups_of_mixed_classes(shipped):
    folder, _, (_, files, groups) = shipped
    table = Table(folder)
    assert (table.kind, len(table.files), len(table.row_groups)) == ("delta", files, groups)
    for group in range(groups):
        assert set(table.read_group(group)["label"].to_pylist()) == set(range(10))


def test_label_names_belong_to_their_labels(shipped):
    _, rows, _ = shipped
    assert [LABEL_NAMES[label] for label in rows["label"].to_pylist()] == rows["label_name"].to_pylist()


def test_every_shipped_image_is_a_distinct_grey_png_of_28_pixels(shipped):
    _, rows, _ = shipped
    pngs = rows["image"].to_pylist()
    images = [cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED) for png in pngs]
    assert {(image.shape, str(image.dtype)) for image in images} == {((28, 28), "uint8")}
    assert len(set(pngs)) == len(pngs)


def test_no_validation_image_is_among_the_training_images():
    assert not set(read(TABLES / "train")["image"].to_pylist()) & set(read(TABLES / "val")["image"].to_pylist())


def test_delta_logs_name_files_relative_to_the_table_and_nothing_of_the_machine(shipped):
    folder, _, (_, files, _) = shipped
    commits = [
        json.loads(line)
        for log in sorted((folder / "_delta_log").glob("*.json"))
        for line in log.open()
        if line.strip()
    ]
    added = [commit["add"]["path"] for commit in commits if "add" in commit]
    assert sorted(added) == sorted(file.name for file in folder.glob("*.parquet"))
    assert len(added) == files
    infos = [commit["commitInfo"] for commit in commits if "commitInfo" in commit]
    assert {key for info in infos for key in info} == {
        "timestamp", "operation", "operationParameters", "operationMetrics", "engineInfo", "clientVersion",
    }  # fmt: skip


def test_all_that_is_shipped_fits_in_8_mb():
    assert sum(file.stat().st_size for file in TABLES.rglob("*") if file.is_file()) <= 8_000_000


def test_data_module_turns_the_tables_into_batches_for_the_model():
    data = TableDataModule(train=TABLES / "train", val=TABLES / "val", batch_size=64)
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (64, 1, 28, 28)
    assert str(batch["image"].dtype) == "torch.uint8"
    assert sum(len(batch["label"]) for batch in data.val_dataloader()) == 2000


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    """A folder like the original one, with 40 training and 30 test images of random pixels."""
    rng = np.random.default_rng(0)
    for prefix, rows in (("train", 40), ("t10k", 30)):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(rows, dtype=np.uint8) % 10)
    return tmp_path


def test_making_the_tables_twice_gives_the_same_rows_in_the_same_order(originals, tmp_path):
    made = []
    for attempt in ("first", "second"):
        make_tables(originals, tmp_path / attempt, {"train": 3, "val": 2})
        made.append([read(tmp_path / attempt / split) for split in ("train", "val")])
    assert made[0] == made[1]
    assert [rows.num_rows for rows in made[0]] == [30, 20]


def test_making_a_table_again_replaces_it(originals, tmp_path):
    for _ in range(2):
        make_tables(originals, tmp_path / "tables", {"train": 3, "val": 2})
    assert read(tmp_path / "tables" / "train").num_rows == 30


def test_pixels_and_labels_of_the_originals_arrive_unchanged(originals, tmp_path):
    make_tables(originals, tmp_path / "tables", {"train": 3, "val": 2})
    images = read_idx(originals / "train-images-idx3-ubyte.gz")
    labels = read_idx(originals / "train-labels-idx1-ubyte.gz")
    label_of = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    for row in read(tmp_path / "tables" / "train").to_pylist():
        image = cv2.imdecode(np.frombuffer(row["image"], np.uint8), cv2.IMREAD_UNCHANGED)
        assert label_of[image.tobytes()] == row["label"]


def test_missing_original_is_named_with_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: no such file.*dataset-fashion-mnist"):
        make_tables(tmp_path, tmp_path / "tables", {"train": 1, "val": 1})


def test_file_that_is_no_idx_file_is_refused(originals, tmp_path):
    (originals / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\x89PNG and so on"))
    with pytest.raises(DataError, match="not an IDX file"):
        make_tables(originals, tmp_path / "tables", {"train": 1, "val": 1})


@given(classes=st.integers(1, 5), available=st.integers(1, 8), share=st.floats(0, 1), seed=st.integers(0, 100))
def test_draw_takes_as_many_of_each_class_and_none_twice(classes, available, share, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), available))
    per_class = round(share * available)
    chosen = draw(labels, per_class, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == len(chosen)
    assert np.bincount(labels[chosen], minlength=classes).tolist() == [per_class] * classes
