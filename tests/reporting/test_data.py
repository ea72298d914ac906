"""Statistics of tables, and what saved predictions tell."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import footplate as fp
from footplate.core.errors import DataError
from footplate.reporting import table_statistics
from footplate.reporting.pictures import LARGEST, data_uri, is_picture
from footplate.reporting.predictions import (
    Classes,
    Numbers,
    confusion_matrix,
    find_predictions,
    interpret,
    pictures_of,
    read_predictions,
)
from footplate.reporting.run_record import read_run
from footplate.reporting.run_tables import tables_of
from footplate.reporting.table_statistics import column_of, statistics_of
from reporting.runs import CLASSES, full_run, picture, predictions, samples, write_hparams


def column(values, kind=None):
    return column_of("x", pa.chunked_array([pa.array(values, kind)]))


def test_statistics_of_a_small_table_are_of_all_rows():
    statistics = statistics_of("train", fp.Table(samples()))
    assert (statistics.num_rows, statistics.read) == (60, 60)
    image, label, weight, note = statistics.columns
    assert image.picture == picture(0)
    assert (image.nulls, image.kind) == (0, "binary")
    assert (label.least, label.greatest, label.mean, label.distinct) == (0, 2, 1.0, 3)
    assert sorted(label.classes) == [(0, 20), (1, 20), (2, 20)]
    assert (weight.least, weight.greatest, weight.mean) == (0.0, 5.0, pytest.approx(2.5))
    assert sum(weight.bins[1]) == 60
    assert (note.nulls, note.distinct) == (15, 45)


def test_statistics_of_a_large_table_are_of_row_groups_at_equal_distances(tmp_path, monkeypatch):
    monkeypatch.setattr(table_statistics, "MOST_ROWS", 300)
    pq.write_table(pa.table({"x": np.arange(1000)}), tmp_path / "t.parquet", row_group_size=100)
    statistics = statistics_of("train", fp.Table(tmp_path / "t.parquet"))
    assert (statistics.num_rows, statistics.read) == (1000, 300)
    assert (statistics.columns[0].least, statistics.columns[0].greatest) == (0, 999)


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1.0, float("nan"), float("inf"), 3.0], None, {"least": 1.0, "greatest": 3.0, "mean": 2.0, "not_finite": 2}),
        ([float("nan")], None, {"least": None, "not_finite": 1}),
        ([1.7e308, -1.7e308], None, {"least": -1.7e308, "greatest": 1.7e308, "mean": 0.0}),
        ([None, None], pa.int64(), {"nulls": 2, "least": None}),
        ([], pa.string(), {"nulls": 0, "distinct": None}),
        ([True, False, True, None], None, {"classes": ((True, 2), (False, 1)), "nulls": 1}),
        ([[1, 2], [3]], None, {"note": "1 to 2 items"}),
        (["a", "bcd"], None, {"note": "1 to 3 characters", "distinct": 2}),
        ([2**63 - 1, 0], pa.int64(), {"greatest": 2**63 - 1, "distinct": 2}),
    ],
)
def test_statistics_of_a_column(values, kind, expected):
    statistics = column(values, kind)
    assert {name: getattr(statistics, name) for name in expected} == expected


def test_statistics_of_dates_decimals_and_dictionaries():
    dates = column(np.array(["2024-01-01", "2024-02-03"], "datetime64[D]"))
    assert (dates.least, dates.greatest) == ("2024-01-01", "2024-02-03")
    words = column_of("x", pa.chunked_array([pa.array(["a", "b", "a"]).dictionary_encode()]))
    assert words.classes == (("a", 2), ("b", 1))


def test_tables_of_a_run_are_opened_again_at_its_version(tmp_path):
    run = read_run(full_run(tmp_path / "run"))
    ((use, table),) = tables_of(run)
    assert isinstance(table, fp.Table)
    assert (use, table.version, table.num_rows) == ("predict", 0, 60)


def test_a_table_that_is_gone_is_a_sentence(tmp_path):
    write_hparams(tmp_path, val_table=f"{tmp_path}/gone@3")
    ((use, reason),) = tables_of(read_run(tmp_path))
    assert use == "val"
    assert "gone" in str(reason)


@pytest.fixture
def saved(tmp_path):
    def save(table):
        pq.write_table(table, tmp_path / "predictions.parquet")
        path = find_predictions(tmp_path)
        assert path is not None
        return read_predictions(path)

    return save


def test_classes_are_compared_named_and_counted(saved):
    result = interpret(saved(predictions()))
    assert isinstance(result, Classes)
    assert result.names == CLASSES
    assert result.accuracy == pytest.approx(0.8)
    assert result.matrix.sum() == 60
    assert all(sample.label != sample.prediction for sample in result.worst)
    assert [sample.row for sample in result.worst[:2]] == [55, 50]  # wrong, the surest first
    assert [sample.row for sample in result.best[:2]] == [59, 58]
    assert {(pair.label, pair.prediction) for pair in result.pairs} == {
        ("circle", "square"), ("square", "star"), ("star", "circle"),
    }  # fmt: skip


def test_a_loss_orders_the_worst_samples(saved):
    losses = np.zeros(60)
    losses[5] = 9.0
    result = interpret(saved(predictions().append_column("loss", pa.array(losses))))
    assert isinstance(result, Classes)
    assert (result.worst[0].row, result.worst[0].loss) == (5, 9.0)


def test_classes_may_be_texts_and_need_no_probability(saved):
    table = pa.table({"target": ["a", "b", "b"], "pred": ["a", "b", "a"]})
    result = interpret(saved(table))
    assert isinstance(result, Classes)
    assert (result.names, result.matrix.tolist()) == (("a", "b"), [[1, 0], [1, 1]])
    assert result.worst[0].probability is None


def test_numbers_have_errors(saved):
    table = pa.table({"label": [1.0, 2.0, float("nan"), 4.0], "prediction": [1.0, 2.5, 0.0, 1.0]})
    result = interpret(saved(table))
    assert isinstance(result, Numbers)
    assert result.mean_error == pytest.approx(3.5 / 3)
    assert [sample.row for sample in result.worst] == [3, 1, 0]


def test_predictions_without_labels_name_the_columns_that_there_are(saved):
    with pytest.raises(DataError, match=r"there is no column `label`\. There are: score, prediction"):
        saved(pa.table({"score": [1.0], "prediction": [1]}))


def test_rows_without_a_label_only_are_an_error(saved):
    table = pa.table({"label": pa.array([None], pa.int64()), "prediction": pa.array([1], pa.int64())})
    with pytest.raises(DataError, match="no row has a label"):
        interpret(saved(table))


def test_a_damaged_file_is_an_error(tmp_path):
    (tmp_path / "predictions.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(DataError, match="can't be read"):
        read_predictions(tmp_path / "predictions.parquet")


def test_pictures_come_from_the_rows_of_the_table(saved, tmp_path):
    read = saved(predictions())
    result = interpret(read)
    assert isinstance(result, Classes)
    pq.write_table(samples(), tmp_path / "t.parquet", row_group_size=7)
    pictures = pictures_of(result.worst, read, fp.Table(tmp_path / "t.parquet"))
    assert pictures == {sample.index: picture(sample.row) for sample in result.worst}


def test_pictures_among_the_predictions_are_preferred(saved):
    images = [picture(100 + number) for number in range(60)]
    read = saved(predictions().append_column("image", pa.array(images)))
    result = interpret(read)
    assert isinstance(result, Classes)
    assert pictures_of(result.best, read, fp.Table(samples())) == {
        sample.index: images[sample.index] for sample in result.best
    }


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=50))
def test_confusion_matrix_counts_every_pair_once(pairs):
    labels, predicted = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    matrix = confusion_matrix(labels, predicted, 5)
    assert matrix.sum() == len(pairs)
    for label, prediction in set(pairs):
        assert matrix[label, prediction] == pairs.count((label, prediction))


def test_only_pictures_that_hold_no_scripts_are_embedded():
    assert is_picture(picture(1))
    assert not is_picture(b"<svg onload='alert(1)'></svg>")
    assert not is_picture("text")


def test_a_large_picture_becomes_a_small_one():
    import cv2

    noise = np.random.default_rng(0).integers(0, 255, (400, 300, 3), dtype=np.uint8)
    large = cv2.imencode(".png", noise)[1].tobytes()
    uri = data_uri(large)
    assert uri is not None
    assert uri.startswith("data:image/jpeg;base64,")
    assert len(uri) < 2 * LARGEST < len(large)
    assert data_uri(b"\x89PNG\r\n\x1a\n" + bytes(LARGEST)) is None  # it can't be decoded
