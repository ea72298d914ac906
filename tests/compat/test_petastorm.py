"""Petastorm code runs with a changed import line, on real Spark."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from footplate.compat.petastorm import (
    BatchedDataLoader,
    DataLoader,
    InMemBatchedDataLoader,
    SparkDatasetConverter,
    TransformSpec,
    in_lambda,
    make_batch_reader,
    make_reader,
    make_spark_converter,
    register_delete_dir_handler,
)
from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data import Table


def jpeg(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (40, 30), (number, 0, 0)).save(stream, "JPEG", quality=95)
    return stream.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> str:
    rows = {
        "content": [jpeg(number) for number in range(60)],
        "label_index": pa.array(range(60), pa.int64()),
        "score": [number / 4 for number in range(60)],
    }
    pq.write_table(pa.table(rows), tmp_path / "photos.parquet", row_group_size=7)
    return str(tmp_path / "photos.parquet")


def transform_rows(scale: float, frame: pd.DataFrame) -> pd.DataFrame:
    """As in the Databricks tutorial: decode and normalise the pictures of a frame."""
    frame["features"] = frame["content"].map(
        lambda data: np.transpose(
            np.asarray(Image.open(io.BytesIO(data)).resize((8, 8)), np.float32) * scale, (2, 0, 1)
        )
    )
    frame["label"] = frame["label_index"]
    return frame[["features", "label"]]


SPEC = TransformSpec(
    partial(transform_rows, 1 / 255),
    edit_fields=[("features", np.float32, (3, 8, 8), False), ("label", np.int32, (), False)],
    selected_fields=["features", "label"],
)


def labels(loader: Any, name: str = "label") -> list[int]:
    return [number for batch in loader for number in batch[name].tolist()]


def test_the_tutorials_transform_makes_its_batches(photos: str) -> None:
    converter = make_spark_converter(photos)
    assert len(converter) == 60
    with converter.make_torch_dataloader(batch_size=16, transform_spec=SPEC, num_epochs=1, workers_count=3) as loader:
        batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [16, 16, 16, 12]
    for batch in batches:
        assert batch["features"].shape[1:] == (3, 8, 8)
        assert batch["features"].dtype == torch.float32
        assert batch["label"].dtype == torch.int32
        assert torch.allclose(batch["features"][:, 0, 4, 4] * 255, batch["label"].float(), atol=2)
    assert sorted(labels(batches)) == list(range(60))


def test_without_a_transform_bytes_stay_bytes_and_doubles_become_floats(photos: str) -> None:
    converter = make_spark_converter(photos)
    batch = next(iter(converter.make_torch_dataloader(batch_size=4)))
    assert batch["content"][0][:2] == b"\xff\xd8"
    assert batch["score"].dtype == torch.float32
    assert (
        make_spark_converter(photos, dtype=None).make_torch_dataloader().__iter__().__next__()["score"].dtype
        == torch.float64
    )


def test_every_shard_has_the_same_number_of_batches_and_every_row_is_read_once(photos: str) -> None:
    converter = make_spark_converter(Table(photos, columns=["label_index"]))
    shards = [
        list(converter.make_torch_dataloader(10, num_epochs=1, cur_shard=shard, shard_count=4)) for shard in range(4)
    ]
    assert {len(batches) for batches in shards} == {2}
    assert sorted(number for batches in shards for number in labels(batches, "label_index")) == list(range(60))
    for _ in range(12):
        assert sorted(labels(converter.make_torch_dataloader(8, num_epochs=1), "label_index")) == list(range(60))


def test_without_a_shard_the_ranks_of_a_process_group_have_each_their_own(
    photos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group as Lightning makes it, without the variable RANK."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    label_indices = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        with make_reader(photos, num_epochs=1, schema_fields=["label_index"]) as reader:
            label_indices += [row.label_index for row in reader]
    assert sorted(label_indices) == list(range(60))


def test_epochs_end_when_asked_to_and_have_orders_of_their_own(photos: str) -> None:
    converter = make_spark_converter(Table(photos, columns=["label_index"]))
    twice = labels(converter.make_torch_dataloader(16, num_epochs=2), "label_index")
    assert sorted(twice[:60]) == sorted(twice[60:]) == list(range(60))
    assert twice[:60] != twice[60:]
    endless = iter(converter.make_torch_dataloader(16))
    assert len([next(endless) for _ in range(20)]) == 20
    assert len(converter.make_torch_dataloader(16, num_epochs=2)) == 8
    with pytest.raises(TypeError, match="num_epochs=1"):
        len(converter.make_torch_dataloader(16))


def test_it_resumes_after_the_batch_that_was_handed_out(photos: str) -> None:
    converter = make_spark_converter(photos)
    loader = converter.make_torch_dataloader(8, num_epochs=1, transform_spec=SPEC)
    whole = [batch["label"].tolist() for batch in loader]
    loader.set_epoch(0)
    iterator = iter(loader)
    assert [next(iterator)["label"].tolist() for _ in range(3)] == whole[:3]
    fresh = converter.make_torch_dataloader(8, num_epochs=1, transform_spec=SPEC)
    fresh.load_state_dict(loader.state_dict())
    assert [batch["label"].tolist() for batch in fresh] == whole[3:]


def test_readers_and_the_loaders_over_them(photos: str) -> None:
    with make_batch_reader(photos, schema_fields=["label_index", "score"], shuffle_row_groups=False) as reader:
        batches = list(reader)
    assert np.concatenate([batch.label_index for batch in batches]).tolist() == list(range(60))
    with make_reader(photos, schema_fields=["label_index"]) as reader:
        assert sorted(row.label_index for row in reader) == list(range(60))
    for kind in (DataLoader, BatchedDataLoader):
        with kind(make_batch_reader(photos, transform_spec=SPEC, seed=3), batch_size=20) as loader:
            assert sorted(labels(loader)) == list(range(60))


def test_a_transform_can_drop_columns_and_forget_one(photos: str) -> None:
    converter = make_spark_converter(photos)
    spec = TransformSpec(removed_fields=["content"])
    assert list(next(iter(converter.make_torch_dataloader(4, transform_spec=spec)))) == ["label_index", "score"]
    spec = TransformSpec(lambda frame: frame, selected_fields=["pixels"])
    with pytest.raises(DataError, match="returned no column 'pixels', only content"):
        next(iter(converter.make_torch_dataloader(4, transform_spec=spec)))
    with pytest.raises(ConfigError, match="give both or neither"):
        converter.make_torch_dataloader(4, cur_shard=1)


def test_a_transform_sees_a_column_of_lengths_that_is_no_lists() -> None:
    table = pa.table({"x": [1.5, 2.5], "x_length": [3, 4], "tokens": [[1], [2, 3]]})
    longest = TransformSpec(
        lambda frame: frame.assign(most=frame["tokens"].map(max)), selected_fields=["x_length", "most"]
    )
    with make_spark_converter(table).make_torch_dataloader(
        2, num_epochs=1, transform_spec=longest, shuffle_row_groups=False
    ) as loader:
        (batch,) = loader
    assert {name: values.tolist() for name, values in batch.items()} == {"x_length": [3, 4], "most": [1, 3]}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.mark.slow
@pytest.mark.engine
def test_a_spark_dataframe_is_computed_once_and_trained_from(spark: Any, photos: str, tmp_path: Path) -> None:
    from pyspark.sql.functions import col

    cache = tmp_path / "cache"
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, cache.as_uri())
    frame = spark.read.parquet(photos).filter(col("label_index") >= 10).withColumn("twice", col("label_index") * 2)
    converter = make_spark_converter(frame)
    assert len(converter) == 50
    assert len(make_spark_converter(frame)) == 50
    assert len(list(cache.iterdir())) == 1
    with converter.make_torch_dataloader(batch_size=16, num_epochs=1) as loader:
        batches = list(loader)
    assert sorted(labels(batches, "twice")) == [2 * number for number in range(10, 60)]
    assert len(make_spark_converter(frame.filter("twice > 50"))) == 34
    converter.delete()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.engine
def test_a_dataframe_that_is_a_plain_table_is_read_where_it_lies(spark: Any, photos: str, tmp_path: Path) -> None:
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, (tmp_path / "cache").as_uri())
    converter = make_spark_converter(spark.read.parquet(photos))
    assert [re.sub("^.*/", "", file) for file in converter.file_urls] == ["photos.parquet"]
    assert not (tmp_path / "cache").exists()
    converter.delete()
    assert Path(photos).exists()
    empty = spark.read.parquet(photos).filter("label_index < 0")
    with pytest.raises(DataError, match="no rows"):
        make_spark_converter(empty).make_torch_dataloader()


@pytest.mark.slow
@pytest.mark.engine
def test_two_plans_of_one_hash_are_computed_each(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import DataFrame
    from pyspark.sql.functions import lit

    monkeypatch.setattr(DataFrame, "semanticHash", lambda frame: 7)  # Spark's has 32 bits
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, (tmp_path / "cache").as_uri())
    wide = spark.range(3).select(*(lit(number).alias(f"c{number}") for number in range(40)))
    batches = [
        next(iter(make_spark_converter(wide.withColumn("last", lit(value))).make_torch_dataloader(batch_size=3)))
        for value in (1, 2)
    ]
    assert [batch["last"].tolist() for batch in batches] == [[1] * 3, [2] * 3]
    assert spark.conf.get("spark.sql.debug.maxToStringFields", None) in (None, "25")


@pytest.mark.slow
@pytest.mark.engine
def test_a_dataframe_is_computed_into_each_directory_that_the_setting_names(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(3).filter("id > 0")
    converters = []
    for directory in ("first", "second", "second/"):
        spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"{tmp_path.as_uri()}/{directory}")
        converters.append(make_spark_converter(frame))
    first, second, same = (converter.cache_dir_url for converter in converters)
    assert first.startswith(f"{tmp_path.as_uri()}/first/")
    assert second.startswith(f"{tmp_path.as_uri()}/second/")
    assert same == second


@pytest.mark.slow
@pytest.mark.engine
def test_the_size_of_row_groups_and_the_codec_are_those_asked_for(spark: Any, tmp_path: Path) -> None:
    import pyarrow.dataset
    import pyarrow.parquet

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, (tmp_path / "cache").as_uri())
    frame = spark.range(200_000).coalesce(1)
    converter = make_spark_converter(frame, parquet_row_group_size_bytes=2**18, compression_codec="zstd")
    (file,) = (tmp_path / "cache").rglob("*.parquet")
    footer = pyarrow.parquet.read_metadata(file)
    assert footer.num_row_groups > 1
    assert footer.row_group(0).column(0).compression == "ZSTD"
    assert len(converter) == 200_000


def test_a_codec_for_a_table_that_is_read_as_it_is_is_refused(photos: str) -> None:
    with pytest.raises(ConfigError, match=r"compression_codec=….*tables are read as they are"):
        make_spark_converter(photos, compression_codec="zstd")


@pytest.mark.slow
@pytest.mark.engine
def test_plans_that_differ_where_spark_shortens_them_are_computed_each(spark: Any) -> None:
    from pyspark.sql.functions import col, lit

    wide = spark.range(4).select(*[col("id").alias(f"c{number}") for number in range(40)])
    one, two = (wide.withColumn("c39", lit(value)) for value in (1, 2))
    assert [Table(frame).head().column("c39").to_pylist() for frame in (one, two)] == [[1] * 4, [2] * 4]
    first, last = list(range(30)), list(range(60, 70))
    numbers = spark.range(100)
    for chosen in (first + last, first + first[:10] + [99]):
        assert sorted(Table(numbers.filter(col("id").isin(chosen))).head(100)["id"].to_pylist()) == sorted(set(chosen))


@pytest.mark.slow
@pytest.mark.engine
def test_of_a_directory_only_what_spark_reads_is_read(spark: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "numbers 5%20")
    spark.range(5).coalesce(1).write.parquet(folder)
    (file,) = Path(folder).glob("*.parquet")
    frame = spark.read.parquet(folder)
    assert Table(frame).files == [str(file)]
    spark.range(5, 9).write.mode("append").parquet(folder)
    assert Table(frame).num_rows == frame.count() == 5
    chosen = spark.read.option("pathGlobFilter", file.name).parquet(folder)
    assert Table(chosen).num_rows == chosen.count() == 5
    assert Table(spark.read.parquet(folder)).num_rows == 9


@pytest.mark.slow
@pytest.mark.engine
def test_columns_have_sparks_types(spark: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "days")
    days = spark.range(4).selectExpr("id", "date_add(date'2024-01-01', cast(id % 2 as int)) day", "id % 2 side")
    days.write.partitionBy("day", "side").parquet(folder)
    table = Table(spark.read.parquet(folder), filter=[("day", ">", datetime.date(2024, 1, 1))])
    assert all(file.startswith(folder) for file in table.files)
    assert [str(field.type) for field in table.schema] == ["int64", "date32[day]", "int32"]
    assert sorted(table.head()["id"].to_pylist()) == [1, 3]
    spark.range(3).selectExpr("cast(id as int) id").write.parquet(str(tmp_path / "narrow"))
    wider = Table(spark.read.schema("id bigint").parquet(str(tmp_path / "narrow")))
    assert (str(wider.schema.field("id").type), wider.num_rows) == ("int64", 3)


@pytest.mark.parametrize("num_epochs", [1, 2, 3, None])
@pytest.mark.parametrize("taken", [3, 5, 7, 10])
def test_a_loader_of_several_epochs_resumes_exactly(num_epochs, taken):
    def loader():
        converter = make_spark_converter(Table({"x": list(range(10))}))
        return converter.make_torch_dataloader(batch_size=2, num_epochs=num_epochs, seed=3)

    total = 5 * (num_epochs or 4)
    taken = min(taken, total)
    whole = loader()
    whole.set_epoch(1)
    expected = [batch["x"].tolist() for batch, _ in zip(whole, range(total), strict=False)]
    first = loader()
    first.set_epoch(1)
    iterator = iter(first)
    assert [next(iterator)["x"].tolist() for _ in range(taken)] == expected[:taken]
    state = first.state_dict()
    iterator.close()
    second = loader()
    second.load_state_dict(state)
    second.set_epoch(1)
    assert [batch["x"].tolist() for batch, _ in zip(second, range(total - taken), strict=False)] == expected[taken:]


def test_a_state_of_another_number_of_epochs_is_refused():
    converter = make_spark_converter(Table({"x": list(range(10))}))
    state = converter.make_torch_dataloader(batch_size=2, num_epochs=2).state_dict()
    with pytest.raises(CheckpointError, match="num_epochs=2"):
        converter.make_torch_dataloader(batch_size=2, num_epochs=3).load_state_dict(state)


def test_filters_are_applied(photos):
    with make_batch_reader(
        f"file://{photos}", schema_fields=["label_index"], filters=[("label_index", "<", 3)]
    ) as reader:
        assert sorted(int(row) for batch in reader for row in batch.label_index) == [0, 1, 2]


@pytest.mark.parametrize("name", ["predicate", "rowgroup_selector", "storage_options", "no_such_setting"])
@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_reader_refuses_settings_that_would_change_its_rows(make, name, photos):
    with pytest.raises(ConfigError, match=name):
        make(f"file://{photos}", **{name: object()})


@pytest.mark.parametrize("name", ["collate_fn", "transform_fn", "inmemory_cache_all", "no_such_setting"])
def test_a_loader_refuses_settings_that_would_change_its_batches(name, photos):
    with make_batch_reader(f"file://{photos}") as reader, pytest.raises(ConfigError, match=name):
        BatchedDataLoader(reader, batch_size=5, **{name: print})


def test_settings_of_pools_and_queues_are_accepted(photos):
    with make_batch_reader(f"file://{photos}", reader_pool_type="thread", workers_count=4, predicate=None) as reader:
        assert DataLoader(reader, batch_size=5, shuffling_queue_capacity=10)


def test_a_loader_does_not_mix_the_rows_of_a_reader_that_keeps_their_order(photos):
    with make_batch_reader(f"file://{photos}", shuffle_row_groups=False) as reader:
        assert DataLoader(reader, batch_size=5)
        with pytest.raises(ConfigError, match=r"shuffling_queue_capacity=10.*shuffle_row_groups=True"):
            DataLoader(reader, batch_size=5, shuffling_queue_capacity=10)


@pytest.mark.parametrize("mixing", [{"shuffle_rows": True}, {"shuffle_row_drop_partitions": 4}])
@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_rows_are_mixed_over_the_whole_table_or_not_at_all(photos, make, mixing):
    with make(f"file://{photos}", **mixing) as reader:
        assert next(iter(reader))
    with pytest.raises(ConfigError, match=f"{next(iter(mixing))}=.*shuffle_row_groups=False"):
        make(f"file://{photos}", shuffle_row_groups=False, **mixing)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_converters_floating_point_columns_have_the_type_that_was_asked_for(dtype):
    table = pa.table({"single": pa.array([0.5, 1.5], pa.float32()), "double": [0.25, 0.75], "number": [1, 2]})
    loader = make_spark_converter(Table(table), dtype=dtype).make_torch_dataloader(2, num_epochs=1)
    (batch,) = loader
    assert batch["single"].dtype == batch["double"].dtype == getattr(torch, dtype)
    assert batch["number"].dtype == torch.int64


def test_a_converter_refuses_an_unknown_type():
    with pytest.raises(ValueError, match="dtype float16 is not supported"):
        make_spark_converter(Table({"x": [1.0]}), dtype="float16")


def test_fields_are_chosen_by_regular_expressions(photos):
    (batch,) = make_batch_reader(photos, schema_fields=["sco.*", "label_index", "unknown", "label"])
    assert batch._fields == ("label_index", "score")
    with pytest.raises(DataError, match=r"No fields matching the criteria.*unknown"):
        make_batch_reader(photos, schema_fields=["unknown"])


def test_a_reader_is_an_iterator_that_goes_on_and_begins_again_after_its_end(photos):
    with make_reader(photos, schema_fields=["score"], shuffle_row_groups=False) as reader:
        assert [next(reader).score, next(reader).score] == [0, 0.25]
        assert len(list(reader)) == 58
        with pytest.raises(StopIteration):
            next(reader)
        assert len(list(reader)) == 60


def test_columns_of_nested_types_are_left_out_with_a_warning(tmp_path):
    kinds = {"struct": [{"a": 1}], "lists": [[[1]]], "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))}
    pq.write_table(pa.table({"number": [1], **kinds}), tmp_path / "nested.parquet")
    path = str(tmp_path / "nested.parquet")
    for make in (make_batch_reader, make_spark_converter):
        with pytest.warns(UserWarning, match="left out: struct, lists, map"):
            table = make(path).table
        assert table.columns == ["number"]
    assert [batch._fields for batch in make_batch_reader(path, schema_fields=["number"])] == [("number",)]


def test_a_converter_says_where_its_rows_lie(photos):
    assert make_spark_converter(photos).cache_dir_url == Table(photos).uri


@pytest.mark.parametrize(
    ("names", "expected"), [(["007", "010"], [7, 10]), (["1e3", "2"], ["1e3", "2"]), (["1", "x"], ["1", "x"])]
)
@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_partitions_are_integers_where_all_of_them_are(make, names, expected, tmp_path):
    for name in names:
        (tmp_path / f"part={name}").mkdir()
        pq.write_table(pa.table({"x": [1]}), tmp_path / f"part={name}" / "0.parquet")
    parts = [np.atleast_1d(each.part).tolist() for each in make(str(tmp_path), shuffle_row_groups=False)]
    assert [value for values in parts for value in values] == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.int32()),
        pa.array([True, None]),
        pa.array([Decimal("1.5"), None]),
        pa.array([["text"], ["more"]]),
    ],
)
def test_a_column_that_no_tensor_can_hold_is_refused_by_name(column, tmp_path):
    pq.write_table(pa.table({"x": column, "y": [1, 2]}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match="Column 'x' is"):
        next(make_batch_reader(str(tmp_path)))
    assert sorted(next(make_batch_reader(str(tmp_path), ["y"])).y.tolist()) == [1, 2]


def test_small_types_of_a_plain_table_are_wider_in_a_batch(tmp_path):
    columns = {
        "number": pa.array([1, 2], pa.uint8()),
        "flag": [True, False],
        "day": [datetime.date(1970, 1, 2)] * 2,
        "time": pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1)] * 2, pa.timestamp("us")),
        "list": [[1, 2], None],
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    batch = next(iter(DataLoader(make_batch_reader(str(tmp_path), shuffle_row_groups=False), 2)))
    assert (batch["number"].dtype, batch["flag"].dtype) == (torch.int64, torch.bool)
    assert (batch["day"].tolist(), batch["time"].tolist()) == ([1, 1], [1000000, 1000000])
    assert (batch["list"].tolist(), batch["list_length"].tolist()) == ([[1, 2], [0, 0]], [2, 0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_epochs": -10},
        {"num_epochs": "abc"},
        {"num_epochs": 0},
        {"cur_shard": "0", "shard_count": 5},
        {"cur_shard": 0, "shard_count": "5"},
        {"cur_shard": 5, "shard_count": 5},
        {"cur_shard": 0, "shard_count": 0},
        {"predicate": in_lambda([], lambda: True)},
    ],
)
@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_reader_refuses_epochs_shards_and_predicates_without_a_meaning(make, arguments, photos):
    with pytest.raises(ConfigError, match="get_fields" if "predicate" in arguments else "=.*expected"):
        make(photos, **arguments)


@pytest.mark.parametrize("setting", ["reader_pool_type", "cache_type"])
def test_an_unknown_pool_or_cache_is_refused(setting, photos):
    with pytest.raises(ConfigError, match=f"Unknown {setting}: 'bogus'"):
        make_reader(photos, **{setting: "bogus"})


def test_several_threads_read_from_one_reader(photos):
    with make_reader(photos, ["label_index"]) as reader, ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda _: next(reader), range(reader.table.num_rows)))
    assert sorted(row.label_index for row in rows) == sorted(row.label_index for row in make_reader(photos))


def test_a_reader_is_reset_after_its_end_and_gives_nothing_after_stop(photos):
    with make_reader(photos, ["label_index"], num_epochs=2) as reader:
        rows = len(list(reader))
        reader.reset()
        assert len(list(reader)) == rows
        reader.reset()
        next(reader)
        with pytest.raises(NotImplementedError, match="before the end"):
            reader.reset()
    with pytest.raises(RuntimeError, match="Trying to read a sample"):
        next(reader)


def test_a_reader_without_rows_is_refused(photos):
    with pytest.raises(DataError, match="no rows"):
        make_reader(photos, predicate=in_lambda(["label_index"], lambda _: False))


# Loaders of Petastorm's other names


def in_memory(photos: str, rows: int = 60, **settings: Any) -> InMemBatchedDataLoader:
    reader = make_batch_reader(photos, schema_fields=["label_index"], shuffle_row_groups=False)
    return InMemBatchedDataLoader(reader, 16, rows_capacity=rows, **{"shuffle": True, **settings})


def test_rows_in_memory_keep_their_order_or_are_mixed_again_in_each_pass(photos: str) -> None:
    kept = labels(in_memory(photos, shuffle=False, num_epochs=2), "label_index")
    assert kept == [*range(60), *range(60)]

    mixed = labels(in_memory(photos, num_epochs=3, seed=1), "label_index")
    passes = [mixed[:60], mixed[60:120], mixed[120:]]
    assert all(sorted(numbers) == list(range(60)) for numbers in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert labels(in_memory(photos, num_epochs=3, seed=1), "label_index") == mixed
    assert labels(in_memory(photos, num_epochs=3, seed=2), "label_index") != mixed


def test_rows_in_memory_are_read_once_and_then_the_reader_is_stopped(photos: str) -> None:
    reader = make_batch_reader(photos, schema_fields=["label_index"])
    with InMemBatchedDataLoader(reader, 16, rows_capacity=60) as loader:
        assert reader.stopped
        assert [len(batch["label_index"]) for batch in loader] == [16, 16, 16, 12]
        assert len(loader) == 4
        assert sorted(labels(loader, "label_index")) == list(range(60))


def test_rows_beyond_the_capacity_are_left_out_with_a_warning(photos: str, caplog: pytest.LogCaptureFixture) -> None:
    loader = in_memory(photos, rows=20, shuffle=False)
    assert labels(loader, "label_index") == list(range(20))
    assert "rows_capacity=20" in caplog.text


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_shards_in_memory_have_the_same_number_of_batches_and_lose_no_row(photos: str, batch_size: int) -> None:
    """Thirteen rows for three shards."""
    shards = []
    for shard in range(3):
        filters = [("label_index", "<", 13)]
        reader = make_batch_reader(
            photos, filters=filters, schema_fields=["label_index"], cur_shard=shard, shard_count=3
        )
        shards.append(list(InMemBatchedDataLoader(reader, batch_size)))
    assert len({len(batches) for batches in shards}) == 1
    assert sorted(number for batches in shards for number in labels(batches, "label_index")) == list(range(13))


@pytest.mark.parametrize("num_epochs", [1, 3, None])
@pytest.mark.parametrize("taken", [2, 4, 6])
def test_rows_in_memory_resume_exactly(photos: str, num_epochs: int | None, taken: int) -> None:
    whole, part, resumed = (in_memory(photos, num_epochs=num_epochs) for _ in range(3))
    for loader in (whole, part):
        loader.set_epoch(2)
    expected = [batch["label_index"].tolist() for batch, _ in zip(whole, range(10), strict=False)]
    iterator = iter(part)
    seen = [next(iterator)["label_index"].tolist() for _ in range(min(taken, len(expected)))]

    resumed.load_state_dict(part.state_dict())
    resumed.set_epoch(2)
    rest = [batch["label_index"].tolist() for batch, _ in zip(resumed, range(10 - len(seen)), strict=False)]

    assert seen + rest == expected


def test_a_state_of_other_rows_in_memory_is_refused(photos: str) -> None:
    state = in_memory(photos).state_dict()
    with pytest.raises(CheckpointError, match=r"made with rows=60, not 20"):
        in_memory(photos, rows=20).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"made with num_epochs=1, not 2"):
        in_memory(photos, num_epochs=2).load_state_dict(state)


def test_a_loader_in_memory_refuses_a_reader_of_several_epochs_and_a_size_without_a_meaning(photos: str) -> None:
    with pytest.raises(ConfigError, match=r"its reader has num_epochs=None.*Make the reader with num_epochs=1"):
        InMemBatchedDataLoader(make_batch_reader(photos, num_epochs=None))
    for settings in ({"batch_size": 0}, {"rows_capacity": 0}):
        with pytest.raises(ConfigError, match="expected a number from 1"):
            InMemBatchedDataLoader(make_batch_reader(photos), **settings)
    with pytest.raises(ConfigError, match=r"transform_fn=.*give a transform_spec"):
        InMemBatchedDataLoader(make_batch_reader(photos), transform_fn=torch.as_tensor)


def test_lists_of_different_lengths_are_padded_alike_in_memory(tmp_path: Path) -> None:
    lists = [[number] * (1 + number // 1024) for number in range(2100)]
    pq.write_table(pa.table({"values": lists}), tmp_path / "lists.parquet")
    reader = make_batch_reader(str(tmp_path / "lists.parquet"), shuffle_row_groups=False)
    (batch,) = InMemBatchedDataLoader(reader, 2100, rows_capacity=2100, shuffle=False)
    assert batch["values"].shape == (2100, 3)
    assert batch["values"][0].tolist() == [0, 0, 0]
    assert batch["values_length"].tolist() == [len(values) for values in lists]


@pytest.mark.parametrize("make", [DataLoader, partial(InMemBatchedDataLoader, rows_capacity=60)])
def test_the_converter_makes_the_loader_that_it_is_asked_for(make: Any, photos: str) -> None:
    converter = make_spark_converter(photos)
    with converter.make_torch_dataloader(16, num_epochs=1, transform_spec=SPEC, data_loader_fn=make) as loader:
        assert isinstance(loader, (DataLoader, InMemBatchedDataLoader))
        batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [16, 16, 16, 12]
    assert sorted(labels(batches)) == list(range(60))
    plain = converter.make_torch_dataloader(16, num_epochs=1, data_loader_fn=make)
    assert next(iter(plain))["score"].dtype == torch.float32


def test_a_loader_of_ones_own_gets_the_converters_reader(photos: str) -> None:
    made = []

    def batches_of(reader: Any, batch_size: int) -> Iterator[Any]:
        made.append((reader, batch_size))
        return iter(reader)

    converter = make_spark_converter(photos)
    with converter.make_torch_dataloader(16, num_epochs=1, data_loader_fn=batches_of) as loader:
        assert sorted(number for batch in loader for number in batch.label_index.tolist()) == list(range(60))
    ((reader, batch_size),) = made
    assert (batch_size, reader.stopped) == (16, True)


@pytest.mark.slow
@pytest.mark.engine
def test_a_registered_handler_deletes_what_a_dataframe_was_computed_into(spark: Any, tmp_path: Path) -> None:
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, (tmp_path / "cache").as_uri())
    deleted: list[str] = []
    register_delete_dir_handler(deleted.append)
    try:
        converter = make_spark_converter(spark.range(3).selectExpr("id * 7 AS seventh"))
        converter.delete()
        assert deleted == [converter.cache_dir_url]
        assert any((tmp_path / "cache").iterdir())
    finally:
        register_delete_dir_handler(None)

    again = make_spark_converter(spark.range(3).selectExpr("id * 7 AS seventh"))
    directory = Path(urlsplit(again.cache_dir_url).path)
    assert directory.exists()
    again.delete()
    assert not directory.exists()
