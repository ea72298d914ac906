"""The demo's report: curves, confusions, predictions and the summary, from a finished run's figures."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from footplate.demo import report

NAMES = ("boot", "bag", "coat")
CSV = """step,epoch,train_loss,val_loss,val_acc
10,0,0.9,,
20,0,0.7,0.6,0.75
30,1,0.5,,
40,1,0.4,0.5,0.875
"""
SUMMARY = {
    "val_acc": 0.90849, "val_loss": 0.2641, "epochs": 10, "steps": 1880, "seconds": 61.23,
    "samples_per_second": 1959.8, "checkpoint": "runs/demo/checkpoints/best", "model": "runs/demo/model.pt2",
    "mlflow_run_id": "4f3c",
}  # fmt: skip


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.csv"
    path.write_text(CSV)
    return path


def test_curve_skips_the_rows_where_a_metric_was_not_logged(metrics):
    rows = report.read_metrics(metrics)
    steps, values = report.curve(rows, "val_acc")
    assert steps.tolist() == [20, 40]
    assert values.tolist() == [0.75, 0.875]


def test_curve_of_a_metric_that_was_never_logged_is_empty(metrics):
    steps, values = report.curve(report.read_metrics(metrics), "lr")
    assert (steps.size, values.size) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=50))
def test_confusion_matrix_counts_every_pair_once(pairs):
    labels, predictions = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    matrix = report.confusion_matrix(labels, predictions, 5)
    assert matrix.sum() == len(pairs)
    for label, prediction in set(pairs):
        assert matrix[label, prediction] == pairs.count((label, prediction))


def test_report_is_one_picture_drawn_from_the_csv_file_or_its_rows(metrics, tmp_path):
    labels, predictions = np.array([0, 1, 2, 2]), np.array([0, 1, 2, 1])
    from_file = report.plot_report(metrics, labels, predictions, NAMES, tmp_path / "file.png")
    from_rows = report.plot_report(report.read_metrics(metrics), labels, predictions, NAMES, tmp_path / "rows.png")
    drawn = cv2.imread(str(from_file))
    assert drawn.shape[1] > 2 * drawn.shape[0]
    assert len(np.unique(drawn)) > 50
    assert (drawn == cv2.imread(str(from_rows))).all()


def test_report_of_a_run_without_validation_is_still_drawn(tmp_path):
    path = report.plot_report([{"step": 1.0, "epoch": 0.0}], np.array([0]), np.array([0]), NAMES, tmp_path / "r.png")
    assert cv2.imread(str(path)) is not None


def test_accuracy_panel_names_the_best_value(metrics):
    axes = Figure().subplots()
    report.draw_accuracy(axes, report.read_metrics(metrics))
    assert axes.get_title("left") == "Validation accuracy, best 87.5%"
    assert axes.lines[0].get_ydata().tolist() == [0.75, 0.875]


def test_loss_panel_has_both_curves(metrics):
    axes = Figure().subplots()
    report.draw_loss(axes, report.read_metrics(metrics))
    assert [line.get_label() for line in axes.lines] == ["training batch", "validation"]
    assert axes.lines[0].get_ydata().tolist() == [0.9, 0.7, 0.5, 0.4]


def test_confusion_panel_writes_the_counts_and_leaves_zeros_blank():
    axes = Figure().subplots()
    report.draw_confusion(axes, np.array([[7, 0, 1], [0, 8, 0], [0, 0, 0]]), NAMES)
    assert {text.get_position(): text.get_text() for text in axes.texts} == {(0, 0): "7", (2, 0): "1", (1, 1): "8"}
    assert [label.get_text() for label in axes.get_yticklabels()] == list(NAMES)


def test_predictions_of_all_batches_become_one_row_each_in_order():
    batches = [
        {"label": torch.tensor([2, 0]), "prediction": torch.tensor([2, 1]), "probability": torch.tensor([0.5, 0.25])},
        {"label": torch.tensor([1]), "prediction": torch.tensor([1]), "probability": torch.tensor([0.75])},
    ]
    assert report.predictions_table(batches, NAMES).to_pydict() == {
        "row": [0, 1, 2],
        "label": [2, 0, 1],
        "label_name": ["coat", "boot", "bag"],
        "prediction": [2, 1, 1],
        "prediction_name": ["coat", "bag", "bag"],
        "probability": [0.5, 0.25, 0.75],
    }


def printed(summary: dict[str, object]) -> str:
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report.summary_table(summary))
    return capture.get()


def test_summary_shows_every_figure_of_the_run():
    text = printed(SUMMARY)
    for part in ("90.85%", "0.2641", "10, 1,880", "61.2 s", "1,960 images/s", "checkpoints/best", "model.pt2", "4f3c"):
        assert part in text


def test_summary_says_when_mlflow_has_no_run_yet():
    assert "not recorded yet" in printed(SUMMARY | {"mlflow_run_id": None})
