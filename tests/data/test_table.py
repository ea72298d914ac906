"""A table has exactly the rows of its version, without deleted rows, or raises an error."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from footplate.core.errors import ConfigError, DataError
from footplate.data import Loader, Table


def ids(table: Table, column: str = "id") -> list[int]:
    groups = [table.read_group(number, [column])[column].to_pylist() for number in range(len(table.row_groups))]
    return sorted(value for group in groups for value in group)


def test_a_delta_table_without_what_was_deleted(delta: str) -> None:
    DeltaTable(delta).delete("id < 30")
    table = Table(delta)
    assert (table.kind, table.version, table.num_rows) == ("delta", 4, 170)
    assert ids(table) == list(range(30, 200))


class FarTable(Table):
    """A table on a network whose server answers when four row groups have been asked for."""

    is_remote = True
    asked = threading.Barrier(4, timeout=60)

    def read_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        self.asked.wait()
        return super().read_group(group, columns)


def test_row_groups_on_a_network_are_asked_for_together_and_come_in_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(80)}), tmp_path / "t.parquet", row_group_size=10)
    read = FarTable(tmp_path / "t.parquet").read_groups([6, 1, 0, 3, 7, 2, 5, 4], ["id"])
    assert [rows["id"][0].as_py() for rows in read] == [60, 10, 0, 30, 70, 20, 50, 40]


def test_few_row_groups_on_a_network_are_read_before_somebody_takes_them(tmp_path: Path) -> None:
    class AskedTable(Table):
        is_remote = True

        def read_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
            asked.append(group)
            return super().read_group(group, columns)

    pq.write_table(pa.table({"id": range(80)}), tmp_path / "t.parquet", row_group_size=1)
    asked: list[int] = []
    taken = AskedTable(tmp_path / "t.parquet").read_groups(range(80))
    assert [next(taken)["id"][0].as_py() for _ in range(10)] == list(range(10))
    assert len(asked) <= 10 + 3


def test_a_window_and_a_unit_of_documents_ask_for_their_row_groups_together(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [[number] for number in range(80)]}), tmp_path / "t.parquet", row_group_size=20)
    plain = [batch["id"].flatten().tolist() for batch in Loader(FarTable(tmp_path / "t.parquet"), 80)]
    assert plain == [list(range(80))]
    packed = FarTable(tmp_path / "t.parquet").pack(8)
    assert [batch["id"].flatten().tolist() for batch in Loader(packed, 10)] == [list(range(80))]


def test_time_travel_by_number_and_by_timestamp(delta: str) -> None:
    between = datetime.now(UTC)
    DeltaTable(delta).delete("id < 30")
    assert Table(delta, version=0).num_rows == 50
    assert Table(delta, version="3").num_rows == 200
    assert Table(delta, version=between).num_rows == 200
    assert Table(delta, version=between.isoformat()).num_rows == 200


def test_a_table_stays_at_its_version_while_others_write(delta: str) -> None:
    table = Table(delta)
    DeltaTable(delta).delete("id >= 0")
    assert ids(table) == list(range(200))


def test_partition_columns_come_back_with_their_types(tmp_path: Path) -> None:
    rows = pa.table(
        {"id": [1, 2, 3, 4], "day": pa.array([0, 1, 1, None], pa.date32()), "what": ["a b", "x/y", "50%", "é"]}
    )
    write_deltalake(tmp_path / "t", rows, partition_by=["day", "what"])
    table = Table(tmp_path / "t")
    assert table.schema.field("day").type == pa.date32()
    assert sorted(table.head(9).to_pylist(), key=lambda row: row["id"]) == rows.to_pylist()


def test_a_column_added_later_is_null_in_older_files(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1]}))
    write_deltalake(tmp_path / "t", pa.table({"id": [2], "new": ["x"]}), mode="append", schema_mode="merge")
    rows = sorted(Table(tmp_path / "t").head(9).to_pylist(), key=lambda row: row["id"])
    assert rows == [{"id": 1, "new": None}, {"id": 2, "new": "x"}]


def test_parquet_as_file_directory_and_glob(parquet: str) -> None:
    assert ids(Table(parquet)) == list(range(103))
    assert ids(Table(f"{parquet}/part-0.parquet")) == list(range(35))
    assert ids(Table(f"{parquet}/part-[12].parquet")) == list(range(35, 103))
    assert ids(Table(f"file://{parquet}/*.parquet")) == list(range(103))
    assert [group.num_rows for group in Table(parquet).row_groups][:4] == [10, 10, 10, 5]


def test_hive_partitions_become_columns(tmp_path: Path) -> None:
    pq.write_to_dataset(pa.table({"id": [1, 2], "year": [2023, 2024]}), tmp_path / "t", partition_cols=["year"])
    assert Table(tmp_path / "t", filter=[("year", "=", 2024)]).head(5).to_pylist() == [{"id": 2, "year": 2024}]


@pytest.mark.parametrize(
    "data",
    [
        pa.table({"id": [0, 1, 2]}),
        pa.record_batch({"id": [0, 1, 2]}),
        pd.DataFrame({"id": [0, 1, 2]}),
        pl.DataFrame({"id": [0, 1, 2]}),
        {"id": np.arange(3)},
    ],
    ids=lambda data: type(data).__module__,
)
def test_what_lies_in_memory_is_a_table(data: object) -> None:
    assert ids(Table(data)) == [0, 1, 2]


def test_filter_and_columns(parquet: str) -> None:
    table = Table(parquet, columns=["x"], filter=(pc.field("id") > 50) & pc.field("even"))
    assert table.num_rows == 26
    assert table.schema.names == ["x"]
    assert ids(table) == list(range(52, 103, 2))
    assert ids(Table(parquet, filter=[("id", "<", 3)])) == [0, 1, 2]


def test_a_split_is_disjoint_complete_and_stable_as_the_table_grows(delta: str) -> None:
    before = {name: ids(part) for name, part in Table(delta).split({"train": 0.8, "val": 0.2}).items()}
    assert sorted(before["train"] + before["val"]) == list(range(200))
    assert 0.65 < len(before["train"]) / 200 < 0.95
    write_deltalake(delta, DeltaTable(delta).to_pyarrow_table(), mode="append")
    after = Table(delta).split({"train": 0.8, "val": 0.2})
    assert set(before["val"]) <= set(ids(after["val"]))
    assert len(ids(after["val"])) > len(before["val"])


def test_a_split_by_key_keeps_equal_keys_together_in_any_layout(delta: str) -> None:
    first = Table(delta).split({"train": 0.5, "val": 0.5}, key="label")
    labels = {name: set(ids(part, "label")) for name, part in first.items()}
    assert labels["train"] | labels["val"] == set(range(10))
    assert not labels["train"] & labels["val"]
    DeltaTable(delta).optimize.compact()
    assert ids(Table(delta).split({"train": 0.5, "val": 0.5}, key="label")["val"]) == ids(first["val"])


def test_the_fingerprint_tells_versions_filters_and_splits_apart(delta: str) -> None:
    table = Table(delta)
    parts = table.split({"train": 0.5, "val": 0.5})
    prints = [
        t.fingerprint for t in (table, Table(delta, version=2), Table(delta, filter=[("id", "<", 9)]), *parts.values())
    ]
    assert len(set(prints)) == 5
    assert Table(delta).fingerprint == table.fingerprint
    assert pickle.loads(pickle.dumps(parts["val"])).fingerprint == parts["val"].fingerprint


def test_plain_parquet_that_was_rewritten_has_another_version(parquet: str) -> None:
    before = Table(parquet).version
    assert Table(parquet).version == before
    pq.write_table(pa.table({"id": [1], "x": [1.0], "even": [False]}), f"{parquet}/part-0.parquet")
    pq.write_table(
        pa.table({"id": [1], "x": pa.array([1.0], pa.float32()), "even": [False]}), f"{parquet}/part-0.parquet"
    )
    assert Table(parquet).version != before


def test_describe_is_what_the_command_line_shows(delta: str) -> None:
    info = Table(delta, columns=["id", "label"]).describe(rows=1)
    assert (info.kind, info.version, info.num_rows, info.num_files, info.num_row_groups) == ("delta", 3, 200, 4, 4)
    assert info.columns == {"id": "int64", "label": "int32"}
    assert info.nbytes > 0
    assert len(info.sample) == 1


def test_a_missing_or_foreign_place_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no table")
    with pytest.raises(DataError, match="there is nothing"):
        Table(tmp_path / "missing")
    with pytest.raises(DataError, match="neither a Delta table"):
        Table(tmp_path)
    with pytest.raises(DataError, match="no file matches"):
        Table(tmp_path / "*.parquet")
    with pytest.raises(DataError, match="neither a Delta table"):
        Table(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"unknown scheme gopher://.*s3://, gs://, abfss:// or hf://"):
        Table("gopher://lake/flowers")
    for address in ("dbfs:/lake/flowers", "dbfs:///lake/flowers"):
        with pytest.raises(DataError, match="its path is /dbfs/lake/flowers; of a volume"):
            Table(address)
    with pytest.raises(DataError, match="expected a path or URI"):
        Table(7)
    with pytest.raises(DataError, match="~nobody_of_this_name/table: there is no such user here"):
        Table("~nobody_of_this_name/table")


def test_a_wrong_column_version_or_filter_names_what_there_is(delta: str) -> None:
    with pytest.raises(DataError, match='Did you mean "label"'):
        Table(delta, columns=["labels"])
    with pytest.raises(DataError, match='Did you mean "label"'):
        Table(delta, filter=[("labels", ">", 2)])
    with pytest.raises(DataError, match="there are 0 to 3"):
        Table(delta, version=9)
    with pytest.raises(DataError, match="neither a number"):
        Table(delta, version="yesterday")
    with pytest.raises(DataError, match="only Delta tables have versions"):
        Table({"x": [1]}, version=1)
    with pytest.raises(ConfigError, match="sum to 1 at most"):
        Table(delta).split({"train": 0.9, "val": 0.2})


def test_files_of_a_delta_table_are_not_read_without_its_log(delta: str) -> None:
    with pytest.raises(DataError, match="inside of the Delta table"):
        Table(Table(delta).files[0])
    for path in (Path(delta).parent, Path(delta).parent / "**" / "*.parquet", f"{delta[:-1]}*/*.parquet"):
        with pytest.raises(DataError, match="there is a Delta table in it"):
            Table(path)


def test_a_glob_finds_what_a_shell_would_find(tmp_path: Path) -> None:
    for name in (
        "1.parquet",
        "2.parquet",
        "deep/er/3.parquet",
        "_temporary/4.parquet",
        ".5.parquet",
        "run [6]/6.parquet",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [int(name[-9])]}), tmp_path / name)
    expected = {
        "*.parquet": [1, 2],
        "[!1].parquet": [2],
        "[12].parquet": [1, 2],
        "**/*.parquet": [1, 2, 3, 6],
        "_temporary/*.parquet": [4],
        "run [6]": [6],
        "run [6]/6.parquet": [6],
    }
    assert {pattern: ids(Table(tmp_path / pattern)) for pattern in expected} == expected


def test_files_that_disagree_on_their_columns_are_refused(parquet: str) -> None:
    pq.write_table(pa.table({"id": ["one"], "x": [1.0], "even": [True]}), f"{parquet}/part-9.parquet")
    with pytest.raises(DataError, match=r"part-9.parquet: column 'id' is string, but int64 in .*part-0"):
        Table(parquet)
    pq.write_table(pa.table({"id": [1]}), f"{parquet}/part-9.parquet")
    with pytest.raises(DataError, match="missing: even, x"):
        Table(parquet)


def test_a_truncated_file_is_named(parquet: str) -> None:
    file = Path(parquet) / "part-1.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"part-1.parquet: not a complete Parquet file"):
        Table(parquet)


def test_a_file_that_was_vacuumed_meanwhile_says_so(delta: str) -> None:
    table = Table(delta)
    assert table.num_rows == 200
    Path(table.files[2]).unlink()
    with pytest.raises(DataError, match="vacuumed or rewritten"):
        ids(table)


@pytest.mark.parametrize("shuffle", [False, True])
def test_plain_parquet_that_is_rewritten_while_it_is_read_says_so(tmp_path: Path, shuffle: bool) -> None:
    def write(first: int) -> None:
        numbers = pa.table({"id": np.arange(first, first + 40_000)})
        pq.write_table(numbers, tmp_path / "t.parquet", row_group_size=500, use_dictionary=False)

    write(0)
    loader = Loader(Table(tmp_path), 100, shuffle=shuffle)
    batches = iter(loader)
    assert int(next(batches)["id"].max()) < 40_000
    write(40_000)
    seen: list[int] = []
    with pytest.raises(DataError, match="rewritten while it was read"):
        seen.extend(int(batch["id"].max()) for batch in itertools.chain(batches, loader))
    assert max(seen, default=0) < 40_000


@pytest.mark.parametrize("what", ["other rows", "no Parquet"])
def test_a_file_that_is_rewritten_between_its_check_and_its_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "t.parquet"

    def write(first: int) -> None:
        pq.write_table(
            pa.table({"id": np.arange(first, first + 4_000)}), path, row_group_size=500, use_dictionary=False
        )

    def read_row_group(file: pq.ParquetFile, *args: Any, **kwargs: Any) -> pa.Table:
        if what == "other rows":
            write(4_000)
        else:
            path.write_bytes(bytes(path.stat().st_size))
        return read(file, *args, **kwargs)

    write(0)
    loader = Loader(Table(path), 100)
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    with pytest.raises(DataError, match="rewritten while it was read"):
        next(iter(loader))


def test_timestamps_as_spark_writes_them_have_the_years_1_to_9999(tmp_path: Path) -> None:
    moments = [datetime(1, 1, 1), datetime(2020, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)]
    written = pa.table({"at": pa.array(moments, pa.timestamp("us")), "id": [0, 1, 2]})
    pq.write_table(written, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    table = Table(tmp_path)
    assert table.head()["at"].to_pylist() == moments
    assert table.schema == written.schema
    assert next(iter(Loader(table, 3)))["at"].tolist() == written["at"].cast(pa.int64()).to_pylist()
    assert ids(Table(tmp_path, filter=[("at", ">", datetime(2020, 1, 1))])) == [2]


def test_the_size_of_a_row_group_is_that_of_its_decoded_columns(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([0.5, 1.5] * 5000, pa.float32()), "y": pa.array([1] * 10_000, pa.int64())})
    pq.write_table(table, tmp_path / "t.parquet", compression="snappy")  # dictionaries, so 3 KB in the file
    assert Table(str(tmp_path / "t.parquet")).row_groups[0].nbytes == 12 * 10_000
    pq.write_table(table.rename_columns(["user.x", "y"]), tmp_path / "dots.parquet")
    assert Table(tmp_path / "dots.parquet", columns=["user.x"]).row_groups[0].nbytes == 4 * 10_000
