"""A table in a notebook: it is described without reading what nobody asked for."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

import footplate as fp
from footplate.data.order import selection
from footplate.data.sources import memory
from footplate.data.sources.parquet import ParquetSource


@pytest.fixture
def path(tmp_path):
    rows = {"x": range(1000), "name": [f"name {row}" for row in range(1000)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=500)
    return tmp_path / "rows.parquet"


@pytest.fixture
def reads(monkeypatch):
    """The names of the calls that read values from a Parquet file."""
    calls = []
    for name in ("read", "peek"):
        method = getattr(ParquetSource, name)
        monkeypatch.setattr(
            ParquetSource,
            name,
            lambda self, *args, method=method, name=name: (calls.append(name), method(self, *args))[1],
        )
    return calls


def test_it_shows_the_types_the_size_and_the_first_rows(path, reads):
    shown = fp.Table(path)._repr_html_()
    assert ">int64<" in shown
    assert ">1,000<" in shown
    assert ">name 2<" in shown
    assert "name 3" not in shown
    assert reads == ["peek"]


def test_it_shows_the_version_of_a_delta_table(tmp_path):
    for _ in range(2):
        write_deltalake(tmp_path / "lake", pa.table({"x": [1]}), mode="append")
    assert '>version</th><td style="text-align: left">1<' in fp.Table(tmp_path / "lake")._repr_html_()


def test_the_rows_of_a_filter_are_not_counted_for_it(path, reads):
    table = fp.Table(path, filter=[("x", ">=", 999)])
    assert "not counted yet" in table._repr_html_()
    assert reads == []


def test_the_rows_of_a_filter_are_shown_once_they_are_counted(path):
    table = fp.Table(path, filter=[("x", ">=", 999)])
    assert table.num_rows == 1
    assert '>rows</th><td style="text-align: left">1<' in table._repr_html_()


def test_a_split_draws_no_rows_for_it(path, monkeypatch):
    monkeypatch.setattr(selection, "_hash_addresses", None)
    assert "not counted yet" in fp.Table(path).split({"train": 0.9})["train"]._repr_html_()


def test_a_table_in_memory_is_not_hashed_for_it(monkeypatch):
    monkeypatch.setattr(memory, "hash_table", None)
    assert ">7<" in fp.Table({"x": [7, 8]})._repr_html_()


def test_a_row_group_is_not_read_for_its_first_rows(tmp_path, reads):
    write_deltalake(tmp_path / "lake", pa.table({"x": range(100)}))
    mapped = fp.Table(tmp_path / "lake").map(doubled, tmp_path / "cache")
    reads.clear()
    assert ">100<" in mapped._repr_html_()
    assert reads == []


def doubled(batch):
    return {"y": [2 * x for x in batch["x"]]}


def test_the_sequences_of_a_packed_table_are_not_counted_for_it():
    packed = fp.Table({"tokens": [[1, 2, 3], [4, 5], [6]]}).pack(4)
    assert "not counted yet" in packed._repr_html_()
    assert packed.num_rows == 2
    assert ">2<" in packed._repr_html_()


def test_names_and_values_are_escaped_and_long_ones_cut():
    shown = fp.Table({"<b>": ["<script>" + "x" * 1000]})._repr_html_()
    assert "<script>" not in shown
    assert "&lt;b&gt;" in shown
    assert "x" * 61 not in shown


def test_of_many_columns_the_first_are_shown():
    shown = fp.Table({f"column {number}": [number] for number in range(60)})._repr_html_()
    assert "column 49" in shown
    assert "column 50" not in shown
    assert "10 more columns" in shown
