"""`footplate table`, and the shortening of values."""

from __future__ import annotations

import json
from datetime import datetime

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.data.preview import describe_bytes, plain, short
from footplate.demo import TABLES

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_a_delta_tables_columns_size_and_rows_are_shown(footplate):
    result = footplate("table", TABLES / "val", "--rows=2")
    assert result.code == 0
    for text in ("delta", "2,000", "label_name", "string", "PNG 28×28", "row groups"):
        assert text in result.out


def test_a_table_of_many_columns_still_shows_a_line_with_values_for_each(footplate, tmp_path):
    wide = {f"column_{i}": [i * 1000 + row for row in range(3)] for i in range(40)}
    pq.write_table(pa.table({**wide, "text": ["word " * 9] * 3}), tmp_path / "wide.parquet")
    lines = [" ".join(line.split()) for line in footplate("table", tmp_path / "wide.parquet").out.splitlines()]
    assert "column_17 int64 17000 · 17001 · 17002" in lines
    (text,) = (line for line in lines if line.startswith("text"))
    assert text.startswith("text string word word")
    assert text.endswith("…")


def test_no_rows_are_shown_where_none_are_asked_for(footplate):
    printed = footplate("table", TABLES / "val", "--rows=0").out
    assert "label_name" in printed
    assert "first rows" not in printed
    assert "no rows" not in printed


def test_json_holds_everything(footplate):
    document = json.loads(footplate("table", TABLES / "val", "--json", "--rows=3").out)
    assert (document["kind"], document["num_rows"], len(document["sample"])) == ("delta", 2000, 3)
    assert document["columns"] == {"image": "binary", "label": "int32", "label_name": "string"}
    assert {name: document["sample"][0]["image"][name] for name in ("image", "height", "width")} == {
        "image": "PNG",
        "height": 28,
        "width": 28,
    }


def test_a_version_is_chosen(footplate):
    newest = json.loads(footplate("table", TABLES / "train", "--json").out)
    older = json.loads(footplate("table", TABLES / "train", "--version=1", "--json").out)
    assert older["version"] == 1
    assert older["num_rows"] < newest["num_rows"]


def test_a_version_may_be_a_time(footplate):
    now = datetime.now().isoformat()
    document = json.loads(footplate("table", TABLES / "train", f"--version={now}", "--json").out)
    assert document["version"] == json.loads(footplate("table", TABLES / "train", "--json").out)["version"]


def test_markup_in_names_and_values_is_shown_as_it_is(footplate, tmp_path):
    pq.write_table(pa.table({"[red]name": ["[bold]value"]}), tmp_path / "t.parquet")
    result = footplate("table", tmp_path / "t.parquet")
    assert "[red]name" in result.out
    assert "[bold]value" in result.out


def test_an_empty_table_is_shown_as_empty(footplate):
    result = footplate("table", "empty.parquet")
    assert result.code == 0
    assert "no rows" in result.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "footplate table: nowhere: there is nothing at this path."),
        (["flowers.py"], "neither a Delta table"),
        ([], "footplate table: path: not given."),
        (["rows.parquet", "--version=2"], "only Delta tables have versions"),
        (["rows.parquet", "--rows=many"], 'rows="many": expected an integer.'),
        (["rows.parquet", "--rows=-1"], "--rows=-1: expected a number of at least 0."),
        (["rows.parquet", "--row=1"], 'Did you mean "--rows"?'),
    ],
)
def test_mistakes(footplate, argv, message):
    result = footplate("table", *argv)
    assert result.code == 2
    assert message in result.err


@given(VALUES)
def test_any_value_becomes_short_and_jsonable(value):
    assert len(short(value)) <= 60
    json.dumps(plain(value))


@pytest.mark.parametrize(("extension", "kind"), [("png", "PNG"), ("jpg", "JPEG")])
def test_an_images_size_is_read_from_its_header(extension, kind):
    encoded = cv2.imencode(f".{extension}", np.zeros((20, 30, 3), np.uint8))[1].tobytes()
    assert describe_bytes(encoded) == {"bytes": len(encoded), "image": kind, "height": 20, "width": 30}
    assert short(encoded) == f"{kind} 20×30, {len(encoded):,} bytes"


@pytest.mark.parametrize("value", [b"", b"\x00" * 100, b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"BM", b"RIFF????WEBP"])
def test_bytes_that_are_no_whole_image_are_shown_too(value):
    assert f"{len(value)} bytes" in short(value)
