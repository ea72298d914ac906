"""`predict(output=…)`: a table that reads back, complete or not at all."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from models.small import Classifier, dataset, loader

import footplate as fp
from footplate.training.predictions import PredictionWriter, to_record_batch


class Predicts(Classifier):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self(batch[0])
        return {"class": logits.argmax(1), "logits": logits, "name": [f"row {i}" for i in range(len(logits))]}


def test_predictions_become_a_table_that_reads_back_in_order(make_trainer, tmp_path):
    model = Predicts().eval()
    table = make_trainer().predict(model, loader(47, shuffle=False), output=tmp_path / "out")
    read = table.head(100)
    with torch.no_grad():
        expected = model(dataset(47).tensors[0])
    assert len(table) == read.num_rows == 47
    assert read["class"].to_pylist() == expected.argmax(1).tolist()
    assert torch.allclose(torch.tensor(read["logits"].to_pylist()), expected, atol=1e-6)
    assert read["name"].to_pylist()[:2] == ["row 0", "row 1"]


def test_they_are_returned_too_when_asked(make_trainer, tmp_path):
    predictions = make_trainer().predict(Predicts(), loader(40), output=tmp_path / "out", return_predictions=True)
    assert len(predictions) == 4
    assert pq.read_table(tmp_path / "out").num_rows == 40


def test_all_loaders_go_into_one_table(make_trainer, tmp_path):
    make_trainer().predict(Predicts(), [loader(40), loader(20)], output=tmp_path / "out")
    assert pq.read_table(tmp_path / "out").num_rows == 60


def test_without_a_predict_step_the_modules_output_is_the_column_prediction(make_trainer, tmp_path):
    class Plain(Classifier):
        def forward(self, batch):
            return super().forward(batch[0])

    make_trainer().predict(Plain(), loader(40), output=tmp_path / "out")
    assert pq.read_table(tmp_path / "out").column_names == ["prediction"]


def test_an_older_table_is_replaced(make_trainer, tmp_path):
    for rows in (100, 30):
        make_trainer().predict(Predicts(), loader(rows), output=tmp_path / "out")
    assert pq.read_table(tmp_path / "out").num_rows == 30


def test_a_run_that_fails_leaves_the_older_table_and_no_litter(make_trainer, tmp_path):
    class Fails(Predicts):
        def predict_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("out of luck")
            return super().predict_step(batch, batch_idx)

    make_trainer().predict(Predicts(), loader(40), output=tmp_path / "out")
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer().predict(Fails(), loader(100), output=tmp_path / "out")
    assert pq.read_table(tmp_path / "out").num_rows == 40
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_something_else_is_not_replaced(make_trainer, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(fp.ConfigError, match="holds something else"):
        make_trainer().predict(Predicts(), loader(40), output=tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_large_tables_are_split_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr("footplate.training.predictions.ROWS_PER_FILE", 5)
    with PredictionWriter(tmp_path / "out") as writer:
        for first in range(0, 18, 3):
            writer.write(torch.arange(first, first + 3))
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert pq.read_table(tmp_path / "out")["prediction"].to_pylist() == list(range(18))


def test_tensors_of_every_kind_become_columns():
    batch = to_record_batch(
        {
            "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
            "flag": torch.tensor([True, False]),
            "image": torch.zeros(2, 3, 4, dtype=torch.uint8),
            "array": np.arange(4.0).reshape(2, 2),
            "text": ["a", "b"],
        }
    )
    assert batch["half"].to_pylist() == [1.0, 1.0]
    assert batch["flag"].to_pylist() == [True, False]
    assert batch["image"].to_pylist() == [[[0] * 4] * 3] * 2
    assert batch["image"].type.value_type.value_type == pa.uint8()
    assert batch["text"].to_pylist() == ["a", "b"]
    assert batch["array"].to_pylist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "different lengths"),
        ({"a": 3}, "returned int for"),
        ("text", "returned str"),
    ],
)
def test_what_is_no_batch_of_columns_is_refused(prediction, message):
    with pytest.raises(fp.DataError, match=message):
        to_record_batch(prediction)


def test_columns_that_change_are_named_with_their_types(tmp_path):
    with PredictionWriter(tmp_path / "out") as writer:
        writer.write({"a": torch.zeros(2)})
        with pytest.raises(fp.DataError, match="a int64; before: a float"):
            writer.write({"a": torch.zeros(2, dtype=torch.int64)})
