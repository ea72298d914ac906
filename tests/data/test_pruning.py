"""A row group whose statistics rule out every row isn't read, and no row is lost."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.core.errors import DataError
from footplate.data import Loader, Table

DAY = date(2024, 1, 1)
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)


def write(path: Path, rows: int = 100, **columns: Any) -> str:
    """Row groups of ten rows."""
    pq.write_table(pa.table({"id": range(rows), **columns}), path, row_group_size=10)
    return str(path)


def damage_all_but(path: str, kept: set[int]) -> None:
    """Overwrite the pages of the other row groups, so that reading one of them fails."""
    metadata = pq.read_metadata(path)
    data = bytearray(Path(path).read_bytes())
    for group in set(range(metadata.num_row_groups)) - kept:
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    Path(path).write_bytes(data)


def ids(table: Table) -> list[int]:
    return sorted(row for batch in Loader(table, 7, shuffle=True) for row in batch["id"].tolist())


def test_damaged_row_groups_can_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    damage_all_but(path, {2})
    with pytest.raises(DataError, match="can't be read"):
        ids(Table(path))


@pytest.mark.parametrize(
    ("filter", "matching", "read"),
    [
        ([("id", ">=", 38), ("id", "<", 42)], range(38, 42), {3, 4}),
        ([("id", "=", 55)], [55], {5}),
        ([("id", "in", [3, 97])], [3, 97], {0, 9}),
        ([[("id", "<", 2)], [("name", "=", "row 99")]], [0, 1, 99], {0, 9}),
        ([("day", ">", DAY + timedelta(97))], [98, 99], {9}),
        ([("time", "<=", NOON + timedelta(hours=1))], [0, 1], {0}),
        ([("x", "<", 1.0)], [0, 1], {0}),
        (pc.field("rare").is_valid(), [50], {5}),
        ((pc.field("id") > 94) & ~(pc.field("id") == 99), range(95, 99), {9}),
    ],
)
def test_row_groups_that_can_not_match_are_not_read(
    tmp_path: Path, filter: Any, matching: list[int], read: set[int]
) -> None:
    path = write(
        tmp_path / "a.parquet",
        name=[f"row {number:02}" for number in range(100)],
        day=[DAY + timedelta(number) for number in range(100)],
        time=[NOON + timedelta(hours=number) for number in range(100)],
        x=[number / 2 for number in range(100)],
        rare=[50 if number == 50 else None for number in range(100)],
    )
    damage_all_but(path, read)
    assert ids(Table(path, columns=["id"], filter=filter)) == list(matching)


def test_a_filter_that_matches_nothing_reads_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    damage_all_but(path, set())
    assert Table(path, filter=[("id", ">", 1000)]).num_rows == 0


def test_partitions_of_a_delta_table_that_can_not_match_are_not_read(tmp_path: Path) -> None:
    rows = pa.table({"id": range(20), "part": ["a", "b"] * 10})
    write_deltalake(tmp_path / "t", rows, partition_by=["part"])
    for file in (tmp_path / "t").glob("part=b/*.parquet"):
        damage_all_but(str(file), set())
    assert ids(Table(tmp_path / "t", columns=["id"], filter=[("part", "=", "a")])) == list(range(0, 20, 2))


def test_a_column_added_later_rules_older_files_out(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2]}))
    for file in (tmp_path / "t").glob("*.parquet"):
        damage_all_but(str(file), set())
    write_deltalake(tmp_path / "t", pa.table({"id": [3], "new": [7]}), mode="append", schema_mode="merge")
    assert ids(Table(tmp_path / "t", columns=["id"], filter=[("new", "=", 7)])) == [3]


def test_nan_passes_what_bounds_would_rule_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows=10, x=[5.0] * 9 + [math.nan])
    assert ids(Table(path, filter=[("x", "!=", 5.0)])) == [9]
    assert ids(Table(path, filter=~(pc.field("x") < 9.0))) == [9]


numbers = st.one_of(st.none(), st.integers(-5, 5))
floats = st.one_of(st.none(), st.sampled_from([-2.0, -0.0, 0.0, 1.5, math.nan, math.inf]))
texts = st.one_of(st.none(), st.sampled_from(["", "a", "ab", "b", "é", "z" * 100]))


def conditions() -> st.SearchStrategy[pc.Expression]:
    def compared(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[pc.Expression]:
        operators = st.sampled_from(["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"])
        value = values.filter(lambda bound: bound is not None)
        return st.builds(lambda operator, bound: getattr(pc.field(name), operator)(pa.scalar(bound)), operators, value)

    leaves = st.one_of(
        compared("i", numbers),
        compared("x", floats),
        compared("s", texts),
        st.sampled_from(["i", "x", "s"]).map(lambda name: pc.field(name).is_null()),
        st.lists(st.integers(-5, 5), min_size=1, max_size=3).map(lambda values: pc.field("i").isin(values)),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            inner.map(lambda a: ~a),
        ),
        max_leaves=4,
    )


@given(st.lists(st.tuples(numbers, floats, texts), min_size=1, max_size=24), conditions())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_row_is_lost(tmp_path: Path, rows: list[tuple[Any, Any, Any]], condition: pc.Expression) -> None:
    table = pa.table(
        {
            "i": pa.array([row[0] for row in rows], pa.int32()),
            "x": pa.array([row[1] for row in rows], pa.float32()),
            "s": pa.array([row[2] for row in rows], pa.string()),
            "id": range(len(rows)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    filtered = Table(tmp_path / "a.parquet", columns=["id"], filter=condition)
    groups = [filtered.read_group(number)["id"].to_pylist() for number in range(len(filtered.row_groups))]
    assert [row for group in groups for row in group] == table.filter(condition)["id"].to_pylist()
