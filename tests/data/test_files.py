"""Directories of images and TFRecord files are tables too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboard.summary.writer.record_writer import RecordWriter

from footplate.core.errors import DataError
from footplate.data import Loader, Table

from .conftest import png


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """70 images in three classes; image i of a class is flat grey i."""
    for kind, count in (("rose", 40), ("daisy", 20), ("tulip", 10)):
        (tmp_path / "flowers" / kind).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "flowers" / kind / f"{number:03}.png").write_bytes(png(number))
    (tmp_path / "flowers" / "README.txt").write_text("not an image")
    return tmp_path / "flowers"


def test_a_directory_of_images_has_its_classes_as_labels(flowers: Path) -> None:
    table = Table(flowers)
    assert (table.kind, table.num_rows, table.schema.names) == (
        "imagefolder",
        70,
        ["image", "label", "label_name", "path"],
    )
    seen = set()
    for batch in Loader(table, 16, shuffle=True):
        for image, label, name, path in zip(*batch.values(), strict=True):
            assert ["daisy", "rose", "tulip"][label] == name == path.partition("/")[0]
            assert image.unique().tolist() == [int(path[-7:-4])]
            seen.add(path)
    assert len(seen) == 70


def test_a_glob_of_images_without_classes_has_no_labels(flowers: Path) -> None:
    table = Table(flowers / "rose" / "*.png")
    assert table.schema.names == ["image", "path"]
    assert table.num_rows == 40


def test_a_class_may_have_any_name_that_does_not_hide_it(flowers: Path) -> None:
    for name in ("_background", "50% [a]", "day=3", ".thumbnails"):
        (flowers / name).mkdir()
        (flowers / name / "a picture.PNG").write_bytes(png(1))
    names = Table(flowers).head(100)["label_name"].to_pylist()
    assert sorted(set(names)) == ["50% [a]", "_background", "daisy", "day=3", "rose", "tulip"]


def test_an_image_that_vanished_or_changed_is_noticed(flowers: Path) -> None:
    table = Table(flowers)
    version = table.version
    (flowers / "daisy" / "003.png").unlink()
    with pytest.raises(DataError, match=r"003.png: this file .* can't be read any more"):
        list(Loader(table, 16))
    table = Table(flowers)
    assert table.version != version
    (flowers / "daisy" / "004.png").write_bytes(png(5))
    with pytest.raises(DataError, match=r"004.png: this file .* can't be read any more"):
        list(Loader(table, 16))


def example_type() -> Any:
    """The protobuf messages of tf.train.Example, from their published definition."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        message = file.message_type.add(name=name)
        for label, number, repeated, kind, type_name in fields:
            message.field.add(name=label, number=number, label=repeated, type=kind, type_name=type_name or None)
        return message

    optional, repeated, nested = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
    message("BytesList", ("value", 1, repeated, kinds.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, repeated, kinds.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, repeated, kinds.TYPE_INT64, ""))
    lists = [("bytes_list", 1, "BytesList"), ("float_list", 2, "FloatList"), ("int64_list", 3, "Int64List")]
    message("Feature", *[(name, number, optional, nested, f".tf.{kind}") for name, number, kind in lists])
    features = message("Features", ("feature", 1, repeated, nested, ".tf.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=optional, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=optional, type=nested, type_name=".tf.Feature")
    message("Example", ("features", 1, optional, nested, ".tf.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def example(**features: list[Any]) -> bytes:
    example = example_type()()
    for name, values in features.items():
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0])]
        getattr(example.features.feature[name], kind).value.extend(values)
    return example.SerializeToString()


def write_records(path: Path, records: list[bytes]) -> Path:
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        writer.flush()
    return path


def test_tensorflow_examples_become_rows(tmp_path: Path) -> None:
    for part in range(2):
        records = [
            example(image=[png(number)], label=[number % 3 - 1], box=[0.5, number + 0.25], id=[number])
            for number in range(part * 50, part * 50 + 50)
        ]
        write_records(tmp_path / f"train.tfrecord-{part:05}-of-00002", records)
    table = Table(tmp_path)
    assert (table.kind, table.num_rows, table.schema.names) == ("tfrecord", 100, ["box", "id", "image", "label"])
    ids = []
    for batch in Loader(table, 16, shuffle=True):
        assert torch.equal(batch["image"][:, 0, 0, 0].long(), batch["id"])
        assert torch.equal(batch["label"], batch["id"] % 3 - 1)
        assert torch.equal(batch["box"], torch.stack([torch.full((len(batch["id"]),), 0.5), batch["id"] + 0.25], 1))
        ids += batch["id"].tolist()
    assert sorted(ids) == list(range(100))


def test_large_files_are_read_in_parts(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.tfrecord", [example(blob=[bytes(700_000)], id=[number]) for number in range(20)])
    table = Table(file)
    assert len(table.row_groups) > 3
    assert [number for batch in Loader(table.select(["id"]), 8) for number in batch["id"].tolist()] == list(range(20))


def test_a_feature_of_another_kind_is_named_and_an_empty_one_is_null(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.tfrecord", [example(x=[1])] * 20 + [example(x=[1.5])])
    with pytest.raises(DataError, match="feature 'x' holds float in a record, but int64 in the first"):
        Table(file).head(21)
    empty = example_type()()
    empty.features.feature["x"].SetInParent()
    file = write_records(tmp_path / "b.tfrecord", [example(x=[1]), empty.SerializeToString()])
    assert Table(file).head().to_pylist() == [{"x": 1}, {"x": None}]


def test_a_sequence_example_is_not_taken_for_an_example(tmp_path: Path) -> None:
    lists_of_features = b"\x12\x00"
    file = write_records(tmp_path / "a.tfrecord", [example(x=[1]) + lists_of_features])
    assert Table(file).schema.names == ["record"]


def test_records_that_are_written_anew_while_they_are_read_are_noticed(tmp_path: Path) -> None:
    def write(numbers: range) -> Path:
        return write_records(tmp_path / "a.tfrecord", [example(x=[number]) for number in numbers])

    table = Table(write(range(1000, 1100)))
    assert table.head(1).to_pylist() == [{"x": 1000}]
    write(range(2000, 2101))
    with pytest.raises(DataError, match="can't be read any more"):
        table.head(1)


def test_a_missing_feature_is_null_and_other_records_are_bytes(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.tfrecord", [example(x=[1.0], y=[2.0]), example(x=[3.0])])
    assert Table(file).head().to_pylist() == [{"x": 1.0, "y": 2.0}, {"x": 3.0, "y": None}]
    file = write_records(tmp_path / "b.tfrecord", [b"\x07plain", b"bytes"])
    assert Table(file).head().to_pylist() == [{"record": b"\x07plain"}, {"record": b"bytes"}]


def test_a_damaged_tfrecord_file_is_named(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.tfrecord", [example(x=[1.0])] * 5)
    whole = file.read_bytes()
    for damaged, says in (
        (whole[:-3], "truncated"),
        (whole[:8] + b"\0\0\0\0" + whole[12:], "damaged at byte 0"),
        (b"\x1f\x8b" + whole, "compressed"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=f"a.tfrecord: .*{says}"):
            Table(file)


class Changing:
    """A file system on which files grow as soon as they are open."""

    type_name = "local"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_file_info(self, path: str) -> Any:
        return self._inner.get_file_info(path)

    def open_input_file(self, path: str) -> Any:
        opened = self._inner.open_input_file(path)
        with Path(path).open("ab") as file:
            file.write(b"more")
        return opened


@pytest.mark.parametrize("kind", ["images", "records"])
def test_a_file_that_changes_between_its_check_and_its_read_is_noticed(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    records = write_records(tmp_path / "a.tfrecord", [example(x=[number]) for number in range(5)])
    source = Table(flowers if kind == "images" else records)._source
    monkeypatch.setattr(source, "_filesystem", Changing(source._filesystem))
    with pytest.raises(DataError, match=r"can't be read any more .*was replaced by another file"):
        source.read(0, source.schema.names)
