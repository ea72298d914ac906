"""Images, histograms, texts, figures and tables: their files, and that every logger takes them as its tool can."""

import contextlib
import io
import json
import sqlite3
import time

import matplotlib.figure
import numpy as np
import pytest
import torch
from PIL import Image

import footplate as fp
from footplate.tracking import media
from footplate.tracking.base import Logger
from footplate.tracking.event_queue import pending
from footplate.tracking.silent import Silent


def decoded(item):
    return np.asarray(Image.open(io.BytesIO(item.data)))


@pytest.mark.parametrize(
    ("value", "pixels"),
    [
        (torch.tensor([[[0.0, 1.0]], [[0.5, 0.0]], [[0.0, 0.0]]]), [[[0, 128, 0], [255, 0, 0]]]),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), [[0, 255]]),
        (torch.tensor([[3, 300]]), [[3, 255]]),
        (np.array([[True, False]]), [[255, 0]]),
        (np.array([[[1, 2, 3, 4]]], np.uint8), [[[1, 2, 3, 4]]]),
        (np.array([[2.0, np.nan]]), [[255, 0]]),
        (Image.new("RGB", (1, 1), (9, 8, 7)), [[[9, 8, 7]]]),
    ],
)
def test_an_image_is_a_png_that_other_programs_read(value, pixels):
    (item,) = media.images("x", value, None)
    assert decoded(item).tolist() == pixels


@pytest.mark.parametrize("shape", [(2, 5, 5), (4,), (0, 3, 3), (1, 2, 3, 4)])
def test_a_shape_that_is_no_image_is_refused(shape):
    with pytest.raises(ValueError, match="expected an image with 1, 3 or 4 channels, got shape"):
        media.images("x", torch.zeros(shape), None)


def test_a_histogram_counts_finite_values():
    item = media.histogram("x", torch.tensor([0.0, 1.0, 1.0, float("nan"), float("inf")])).parsed()
    assert sum(item["counts"]) == 3
    assert (item["edges"][0], item["edges"][-1]) == (0.0, 1.0)
    assert sum(media.histogram("x", []).parsed()["counts"]) == 0


def test_a_table_has_plain_cells_and_equal_rows():
    rows = [[1, torch.tensor(2.5)], [None, float("nan")]]
    assert media.table("t", ["a", "b"], rows).parsed() == {"columns": ["a", "b"], "data": [[1, 2.5], [None, "nan"]]}
    with pytest.raises(ValueError, match="row 1 has 1 values for 2 columns"):
        media.table("t", ["a", "b"], [[1, 2], [3]])


@pytest.mark.parametrize("key", ["../../etc", "a b/c", "..", "", "x" * 300])
def test_no_key_leads_out_of_the_folder(key):
    path = media.text(key, "").path(3)
    assert path.count("/") == 2
    assert ".." not in path.split("/")
    assert len(path) < 150


def test_a_value_that_cannot_be_logged_is_a_warning(run_dir, caplog):
    logger = fp.JSONLines()
    logger.setup(run_dir, {})
    logger.log_image("bad", torch.zeros(7))
    logger.log_image("bad", np.zeros((2, 2)), caption=["a", "b"])
    logger.log_figure("bad", "no figure")
    logger.log_metrics({"loss": 1.0}, 1, 0)
    logger.finalize("success")
    assert [record.getMessage().partition(" is not logged: ")[0] for record in caplog.records] == [
        "The image bad", "The image bad", "The figure bad",
    ]  # fmt: skip
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 1


def figure():
    drawn = matplotlib.figure.Figure(figsize=(1, 1), dpi=50)
    drawn.add_subplot().plot([1, 2])
    return drawn


def log_all(logger, run_dir, finish=True):
    """Call each method of the contract as a module does."""
    logger.setup(run_dir, {"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, 4, 0)
    logger.log_image("samples", [torch.zeros(3, 4, 5), np.ones((4, 5))], 5, ["first", "second"])
    logger.log_histogram("weights", torch.arange(10.0), 5)
    logger.log_text("answer", "forty-two")
    logger.log_figure("curve", figure(), 5)
    logger.log_table("mistakes", ["row", "label"], [[1, "boot"], [2, "shirt"]], 5)
    if finish:
        logger.finalize("success")


@pytest.mark.parametrize("kind", [Logger, Silent, fp.CSV, fp.JSONLines, fp.Console, fp.TensorBoard])
def test_no_call_of_the_contract_blocks_or_raises(kind, run_dir):
    logger = kind()
    began = time.monotonic()
    log_all(logger, run_dir, finish=False)
    # Before `setup` and after `finalize`, the calls do nothing.
    logger.finalize("success")
    kind().log_text("early", "x")
    logger.log_text("late", "x")
    logger.flush()
    assert time.monotonic() - began < 60


def test_json_lines_name_files_and_hold_the_rest(run_dir):
    log_all(fp.JSONLines(), run_dir)
    _, first, second, weights, answer, curve, mistakes = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert (first["image"], first["caption"], first["step"]) == ("samples", "first", 5)
    assert second["file"] == "media/image/samples/5-1.png"
    assert np.asarray(Image.open(run_dir / first["file"])).shape == (4, 5, 3)
    assert np.asarray(Image.open(run_dir / curve["file"])).shape == (50, 50, 4)
    assert sum(weights["data"]["counts"]) == 10
    assert (answer["text"], answer["data"], answer["step"]) == ("answer", "forty-two", 4)
    assert mistakes["data"] == {"columns": ["row", "label"], "data": [[1, "boot"], [2, "shirt"]]}


def test_the_console_prints_texts_and_tables(run_dir, capsys):
    log_all(fp.Console(interval_s=0), run_dir)
    printed = capsys.readouterr().out
    assert "step 4  text answer: forty-two\n" in printed
    assert "step 5  table mistakes:\nrow\tlabel\n1\tboot\n2\tshirt\n" in printed
    assert "step 5  image samples (first)\n" in printed
    assert "step 5  histogram weights\n" in printed


def test_tensorboard_shows_them(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_all(fp.TensorBoard(), run_dir)
    events = EventAccumulator(str(run_dir / "tensorboard"), {"tensors": 0, "images": 0})
    events.Reload()
    (image,) = events.Images("samples")
    assert (image.step, image.width, image.height) == (5, 5, 4)
    assert np.asarray(Image.open(io.BytesIO(events.Images("samples/1")[0].encoded_image_string))).max() == 255
    assert events.Images("curve")[0].width == 50
    assert events.Histograms("weights")[0].histogram_value.num == 10
    assert events.Tensors("answer/text_summary")[0].tensor_proto.string_val[0] == b"forty-two"
    assert b"| 2 | shirt |" in events.Tensors("mistakes/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.engine
def test_mlflow_keeps_them_as_artifacts(run_dir, database, tmp_path):
    logger = fp.MLflow(log_model=False)
    log_all(logger, run_dir)
    folder = database.download_artifacts(logger.run_id, "media", str(tmp_path))
    files = {path.relative_to(folder).as_posix(): path for path in tmp_path.joinpath("media").rglob("*.*")}
    assert files.keys() == {
        "image/samples/5.png", "image/samples/1/5-1.png", "histogram/weights/5.json", "text/answer/4.txt",
        "figure/curve/5.png", "table/mistakes/5.json",
    }  # fmt: skip
    assert files["text/answer/4.txt"].read_text() == "forty-two"
    assert np.asarray(Image.open(files["image/samples/1/5-1.png"])).max() == 255
    # The files of the queue are gone with it.
    assert sorted(path.name for path in run_dir.iterdir()) == [".mlflow.lock", "mlflow.json"]


@pytest.mark.engine
def test_wandb_keeps_them_in_its_own_files(run_dir):
    log_all(fp.WandB(mode="offline"), run_dir)
    files = [path.name for path in (run_dir / "wandb").rglob("media/**/*.*")]
    for kind, ending in [("samples", ".png"), ("curve", ".png"), ("answer", ".html"), ("mistakes", ".table.json")]:
        assert [name for name in files if name.startswith(kind) and name.endswith(ending)], (kind, files)
    assert pending(run_dir, "wandb") == []


@pytest.mark.engine
def test_trackio_keeps_pictures_in_its_folder_and_the_rest_in_its_rows(run_dir, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir.parent / "trackio"))
    log_all(fp.Trackio(), run_dir)
    with contextlib.closing(sqlite3.connect(run_dir.parent / "trackio/default.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    values = {name: (step, value) for step, row in rows for name, value in json.loads(row).items()}
    for name, size in (("samples", (5, 4)), ("curve", (50, 50))):
        step, value = values[name]
        assert step == 5
        assert Image.open(run_dir.parent / "trackio/media" / value["file_path"]).size == size
    assert values["samples/1"][1]["_type"] == "trackio.image"
    assert sum(values["weights"][1]["values"]) == 10
    assert values["answer"] == (4, {"_type": "trackio.markdown", "_value": "```\nforty-two\n```"})
    assert values["mistakes"][1]["_value"][1] == {"row": 2, "label": "shirt"}
    assert pending(run_dir, "trackio") == []
