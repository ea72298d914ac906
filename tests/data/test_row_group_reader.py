"""A row group that several windows share is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from footplate.data import Loader, Table
from footplate.data.order.plan import GroupSlice
from footplate.data.pipeline.row_group_reader import RowGroupReader

from .conftest import image_rows

GROUP = 300  # rows, which are read in pieces of 64


class CountingTable(Table):
    """A table that notes which row groups were opened."""

    opened: list[int]

    def stream_group(self, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        self.__dict__.setdefault("opened", []).append(group)
        return super().stream_group(group, columns)


@pytest.fixture
def table(tmp_path: Path) -> CountingTable:
    """900 rows in row groups of 300."""
    pq.write_table(image_rows(0, 900), tmp_path / "t.parquet", row_group_size=GROUP)
    return CountingTable(str(tmp_path / "t.parquet"))


def ids(reader: RowGroupReader, group: int, start: int, stop: int) -> list[int]:
    return [number for read in reader.read([GroupSlice(group, start, stop)]) for number in read["id"].to_pylist()]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_parts_one_after_the_other_are_the_rows_of_the_group(table: CountingTable, in_pieces: bool) -> None:
    reader = RowGroupReader(table, ["image", "id"], in_pieces)
    assert ids(reader, 1, 0, 50) == list(range(300, 350))
    assert ids(reader, 1, 50, 200) == list(range(350, 500))
    assert ids(reader, 1, 200, 300) == list(range(500, 600))
    assert ids(reader, 2, 10, 20) == list(range(610, 620))
    assert ids(reader, 2, 290, 300) == list(range(890, 900))
    assert ids(reader, 2, 0, 1) == [600]


def test_rows_that_a_filter_leaves_are_counted_and_no_others(tmp_path: Path) -> None:
    pq.write_table(image_rows(0, 900), tmp_path / "t.parquet", row_group_size=GROUP)
    reader = RowGroupReader(Table(str(tmp_path / "t.parquet"), filter=[("label", "=", 3)]), ["image", "id"], True)
    assert ids(reader, 0, 0, 7) == list(range(3, 73, 10))
    assert ids(reader, 0, 7, 30) == list(range(73, 303, 10))


def test_an_epoch_in_many_windows_opens_each_row_group_once(table: CountingTable) -> None:
    loader = Loader(table, 8, shuffle=True)
    state = {**loader.state_dict(), "streams": 1, "window": 1, "window_rows": 70}
    table.opened = []
    loader.load_state_dict(state)
    rows = [number for batch in loader for number in batch["id"].tolist()]
    assert sorted(rows) == list(range(900))
    assert sorted(table.opened) == [0, 1, 2]
    for batch in (1, 30, 100):
        loader.load_state_dict({**state, "batch": batch})
        assert [number for rest in loader for number in rest["id"].tolist()] == rows[8 * batch :]
